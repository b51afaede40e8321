"""`instar serve`: the gateway and an engine, recording, without training."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from instar.backends.resolve import resolve_run
from instar.cli.config_file import apply_overrides, load_config, validate
from instar.cli.model import get_model
from instar.cluster.run import serve_run
from instar.config import RunConfig, UpstreamEngineConfig
from instar.gateway.auth import create_agent_key


def run_serve(file: Path | None, *, overrides: Sequence[str], as_json: bool) -> None:
    config = _config(file, overrides)
    resolved, _ = resolve_run(config, os.environ)
    console = Console(stderr=as_json)
    if not isinstance(config.engine, UpstreamEngineConfig):
        get_model(resolved, console)
    asyncio.run(_serve(config, console, as_json))


def _config(file: Path | None, overrides: Sequence[str]) -> RunConfig:
    if file is not None:
        return load_config(file, overrides)
    data = {"name": f"serve-{time.strftime('%Y%m%d-%H%M%S')}"}
    return validate(apply_overrides(data, overrides), "settings")


def _directions(config: RunConfig, url: str, key: str) -> list[str]:
    """What a person sets, in the words of most agents."""
    engine = config.engine
    upstream = isinstance(engine, UpstreamEngineConfig)
    what = f"what {engine.base_url} answers" if upstream else config.model.name
    return [
        f"Serving {what}. Point an agent at it:\n",
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}",
        f"  export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}\n",
    ]


async def _serve(config: RunConfig, console: Console, as_json: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    there = (config.run_dir / "config.json").is_file()
    async with serve_run(config, resume=there, log=lambda text: console.print(text, highlight=False)) as run:
        base_url = f"{run.gateway_url}/v1"
        key = await create_agent_key(run.store, config.agent_id)
        if as_json:
            facts = {
                "base_url": base_url,
                "api_key": key,
                "admin_key": run.admin_key,
                "run_dir": str(run.folder.path),
            }
            print(json.dumps(facts), flush=True)
        for line in _directions(config, run.gateway_url, key):
            console.print(line, highlight=False, soft_wrap=True)
        console.print(f"Everything is recorded in {run.folder.path}. Ctrl-C stops.", highlight=False)
        ended = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, run.cluster.failure}, return_when=asyncio.FIRST_COMPLETED)
        run.cluster.raise_failure()
