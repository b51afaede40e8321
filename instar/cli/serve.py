"""`instar serve`: the gateway and an engine, recording, without training."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from instar.cli.config_file import apply_overrides, load_config, validate
from instar.cli.model import get_model
from instar.cluster.local import serving
from instar.config import RunConfig


def run_serve(file: Path | None, *, overrides: Sequence[str], as_json: bool) -> None:
    config = _config(file, overrides)
    console = Console(stderr=as_json)
    get_model(config.model.name, console)
    asyncio.run(_serve(config, console, as_json))


def _config(file: Path | None, overrides: Sequence[str]) -> RunConfig:
    if file is not None:
        return load_config(file, overrides)
    data = {"name": f"serve-{time.strftime('%Y%m%d-%H%M%S')}"}
    return validate(apply_overrides(data, overrides), "settings")


async def _serve(config: RunConfig, console: Console, as_json: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    there = (config.run_dir / "config.json").is_file()
    async with serving(config, resume=there, log=lambda text: console.print(text, highlight=False)) as run:
        base_url = f"{run.gateway_url}/v1"
        if as_json:
            facts = {"base_url": base_url, "api_key": run.admin_key, "run_dir": str(run.folder.path)}
            print(json.dumps(facts), flush=True)
        console.print(f"Serving {config.model.name}. Point an agent at it:\n", highlight=False)
        console.print(f"  export OPENAI_BASE_URL={base_url}", highlight=False)
        console.print(f"  export OPENAI_API_KEY={run.admin_key}\n", highlight=False)
        console.print(f"Everything is recorded in {run.folder.path}. Ctrl-C stops.", highlight=False)
        ended = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, run.supervisor.failure}, return_when=asyncio.FIRST_COMPLETED)
        run.supervisor.raise_failure()
