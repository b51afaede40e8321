"""`instar serve`: run the gateway and an engine, and record calls without training."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from instar.backends.resolve import resolve_run
from instar.cli.config_file import apply_overrides, load_config, validate
from instar.cli.model import fetch_model
from instar.cli.options import AsJson, Overrides
from instar.cli.output import print_json
from instar.cluster.live_run import serve_run
from instar.cluster.tasks import run_until_first
from instar.config import RunConfig, UpstreamEngineConfig
from instar.gateway.auth import create_key


def serve(
    file: Annotated[
        Path | None, typer.Argument(help="The YAML file of the run. Default: serve the default model.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    if file is not None:
        config = load_config(file, overrides or ())
    else:
        data = {"name": f"serve-{time.strftime('%Y%m%d-%H%M%S')}"}
        config = validate(apply_overrides(data, overrides or ()), "settings")
    resolved, _ = resolve_run(config, os.environ)
    console = Console(stderr=as_json)
    if not isinstance(config.engine, UpstreamEngineConfig):
        fetch_model(resolved, console)
    asyncio.run(_serve(config, console, as_json))


def _format_instructions(config: RunConfig, url: str, key: str, feedback_key: str) -> list[str]:
    engine = config.engine
    model = engine.base_url if isinstance(engine, UpstreamEngineConfig) else config.model.name
    return [
        f"Serving {model}. Connect an agent with:\n",
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}",
        f"  export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}\n",
        f"To rate its replies, POST to {url}/feedback with the feedback key:\n",
        f"  export INSTAR_FEEDBACK_KEY={feedback_key}\n",
    ]


async def _serve(config: RunConfig, console: Console, as_json: bool) -> None:
    run_exists = (config.run_dir / "config.json").is_file()
    async with serve_run(
        config, resume=run_exists, log=lambda text: console.print(text, highlight=False)
    ) as run:
        key_name = f"serve-{secrets.token_hex(4)}"
        key = await create_key(run.store, "agent", config.agent_id, key_name)
        feedback_key = await create_key(run.store, "feedback", config.agent_id, f"{key_name}-feedback")
        if as_json:
            keys = {"api_key": key, "feedback_key": feedback_key, "admin_key": run.admin_key}
            print_json({"base_url": f"{run.gateway_url}/v1", **keys, "run_dir": str(run.folder.path)})
        for line in _format_instructions(config, run.gateway_url, key, feedback_key):
            console.print(line, highlight=False, soft_wrap=True)
        console.print(f"Calls are recorded in {run.folder.path}. Press Ctrl-C to stop.", highlight=False)
        stop = asyncio.Event()
        run.interrupts.on_first_signal = stop.set
        await run_until_first(stop.wait(), asyncio.shield(run.cluster.failure))
