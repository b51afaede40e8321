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
from instar.cli.config_file import apply_overrides, load_config, load_run_config, validate
from instar.cli.model import fetch_model
from instar.cli.options import AsJson, Overrides, find_run
from instar.cli.output import print_json
from instar.cluster.live_run import LiveRun, serve_run
from instar.cluster.tasks import run_until_first
from instar.cluster.versions import find_policy
from instar.config import RunConfig, UpstreamEngineConfig
from instar.errors import ConfigError
from instar.gateway.auth import create_key


def serve(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE|RUN]",
            help="The YAML file of a run, or the folder or name of a run whose newest version to serve. "
            "Default: serve the default model.",
        ),
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="Version to serve instead of the newest; 0 is the base model.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    if file is not None and (run_dir := find_run(file)).is_dir():
        config = load_run_config(run_dir, overrides or ())
    elif file is not None:
        config = load_config(file, overrides or ())
    else:
        data = {"name": f"serve-{time.strftime('%Y%m%d-%H%M%S')}"}
        config = validate(apply_overrides(data, overrides or ()), "settings")
    if version is not None and isinstance(config.engine, UpstreamEngineConfig):
        raise ConfigError(f"--version {version}: a provider serves this run's model; leave --version out")
    resolved, _ = resolve_run(config, os.environ)
    console = Console(stderr=as_json)
    if not isinstance(config.engine, UpstreamEngineConfig):
        fetch_model(resolved, console)
    asyncio.run(_serve(config, version, console, as_json))


def _format_instructions(run: LiveRun, version: int, key: str, feedback_key: str) -> list[str]:
    engine, url = run.config.engine, run.gateway_url
    model = engine.base_url if isinstance(engine, UpstreamEngineConfig) else run.config.model.name
    trained = f", version {version} of the run {run.run_id}" if version else ""
    return [
        f"Serving {model}{trained}. Connect an agent with:\n",
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}",
        f"  export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}\n",
        f"To rate its replies, POST to {url}/feedback with the feedback key:\n",
        f"  export INSTAR_FEEDBACK_KEY={feedback_key}\n",
    ]


async def _serve(config: RunConfig, version: int | None, console: Console, as_json: bool) -> None:
    run_exists = (config.run_dir / "config.json").is_file()
    async with serve_run(
        config, resume=run_exists, version=version, log=lambda text: console.print(text, highlight=False)
    ) as run:
        stop = asyncio.Event()
        run.interrupts.on_first_signal = stop.set
        key_name = f"serve-{secrets.token_hex(4)}"
        key = await create_key(run.store, "agent", config.agent_id, key_name)
        feedback_key = await create_key(run.store, "feedback", config.agent_id, f"{key_name}-feedback")
        if as_json:
            keys = {"api_key": key, "feedback_key": feedback_key, "admin_key": run.admin_key}
            print_json({"base_url": f"{run.gateway_url}/v1", **keys, "run_dir": str(run.folder.path)})
        is_upstream = isinstance(config.engine, UpstreamEngineConfig)
        served_version = 0 if is_upstream else (await find_policy(run.store, run.run_id, version)).version
        for line in _format_instructions(run, served_version, key, feedback_key):
            console.print(line, highlight=False, soft_wrap=True)
        console.print(f"Calls are recorded in {run.folder.path}. Press Ctrl-C to stop.", highlight=False)
        await run_until_first(stop.wait(), asyncio.shield(run.cluster.failure))
