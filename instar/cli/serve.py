"""`instar serve`: run the gateway and an engine, and record calls without training."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from instar.cli.config_file import load_config, load_run_config
from instar.cli.model import fetch_served_model
from instar.cli.options import AsJson, HomeFolder, Overrides, find_run
from instar.cli.output import print_json
from instar.cli.service.home import Home, ServiceSettings
from instar.cli.service.process import make_launch, prepare_service, run_service, serve_until_stopped
from instar.cluster.live_run import LiveRun
from instar.cluster.versions import choose_policy_id, find_policy
from instar.config import RunConfig, UpstreamEngineConfig
from instar.errors import ConfigError
from instar.gateway.auth import create_key
from instar.types import Json, PolicyRef


@dataclass(frozen=True)
class Connection:
    """The URL and the keys with which agents and people connect."""

    url: str
    api_key: str
    feedback_key: str
    admin_key: str
    run_dir: Path

    def to_json(self) -> Json:
        keys = {"api_key": self.api_key, "feedback_key": self.feedback_key, "admin_key": self.admin_key}
        return {"base_url": f"{self.url}/v1", **keys, "run_dir": str(self.run_dir)}


def serve(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE|RUN]",
            help="The YAML file of a run, or the folder or name of a run whose newest version to serve. "
            "Default: the settings, port and keys of the service.",
        ),
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="Version to serve instead of the newest; 0 is the first one.")
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="The learning agent that the printed keys belong to, and whose --version to serve."
        ),
    ] = None,
    home_folder: HomeFolder = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Without FILE or RUN, this is `instar start` in the foreground, and --home applies."""
    console = Console(stderr=as_json)
    if file is not None:
        is_run = (run_dir := find_run(file)).is_dir()
        config = load_run_config(run_dir, overrides or ()) if is_run else load_config(file, overrides or ())
        _serve_run(config, agent, version, console, as_json=as_json)
        return
    for option, value in (("--version", version), ("--agent", agent)):
        if value is not None:
            raise ConfigError(f"{option} {value}: name the run to serve: instar serve RUN")
    home, launch = Home.locate(home_folder, os.environ), make_launch(None, overrides or ())
    config = prepare_service(home, launch, console)

    def show(run: LiveRun, settings: ServiceSettings) -> None:
        connection = make_service_connection(run.config, run.gateway_url, settings)
        _show(config, connection, console, as_json=as_json)

    asyncio.run(run_service(home, launch, config, log=_make_log(console), on_ready=show))


def _serve_run(
    config: RunConfig, agent: str | None, version: int | None, console: Console, *, as_json: bool
) -> None:
    is_upstream = isinstance(config.engine, UpstreamEngineConfig)
    if version is not None and is_upstream:
        raise ConfigError(f"--version {version}: a provider serves this run's model; leave --version out")
    # Without --agent, each agent of a run with several policies is served by its own.
    has_choice = agent is not None or version is not None or len(config.policy_ids) == 1
    policy_id = choose_policy_id(config, agent) if has_choice else config.name
    fetch_served_model(config, console)

    async def show(run: LiveRun) -> None:
        agent_id = agent or config.agent_id
        name = f"serve-{secrets.token_hex(4)}"
        connection = Connection(
            url=run.gateway_url,
            api_key=await create_key(run.store, "agent", agent_id, name),
            feedback_key=await create_key(run.store, "feedback", agent_id, f"{name}-feedback"),
            admin_key=run.admin_key,
            run_dir=run.folder.path,
        )
        served_version = 0 if is_upstream else (await find_policy(run.store, policy_id, version)).version
        _show(run.config, connection, console, served_version, as_json=as_json)

    served = None if version is None else PolicyRef(policy_id, version)
    asyncio.run(serve_until_stopped(config, _make_log(console), show, version=served))


def _make_log(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, highlight=False)


def _show(
    config: RunConfig, connection: Connection, console: Console, version: int = 0, *, as_json: bool
) -> None:
    if as_json:
        print_json(connection.to_json())
    print_connection(config, connection, console, version)
    console.print(f"Calls are recorded in {connection.run_dir}. Press Ctrl-C to stop.", highlight=False)


def make_service_connection(config: RunConfig, url: str, settings: ServiceSettings) -> Connection:
    return Connection(
        url=url,
        api_key=settings.get_key("agent", config.agent_id),
        feedback_key=settings.get_key("feedback", config.agent_id),
        admin_key=settings.get_key("admin", None),
        run_dir=config.run_dir,
    )


def print_connection(config: RunConfig, connection: Connection, console: Console, version: int = 0) -> None:
    """Print the settings for agents. ``version`` is the served version of a run that was trained."""
    engine, url, key = config.engine, connection.url, connection.api_key
    model = engine.base_url if isinstance(engine, UpstreamEngineConfig) else config.model.name
    trained = f", version {version} of the run {config.name}" if version else ""
    for line in (
        f"Serving {model}{trained}. Connect an agent with:\n",
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}",
        f"  export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}\n",
        f"To rate its replies, POST to {url}/feedback with the feedback key:\n",
        f"  export INSTAR_FEEDBACK_KEY={connection.feedback_key}\n",
    ):
        console.print(line, highlight=False, soft_wrap=True)
