"""`instar status`: the state of the service, or of the processes of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
import typer
from rich.console import Console

import instar
from instar.cli.learning_status import LearningReport, make_learning_report
from instar.cli.options import AsJson, HomeFolder, async_command
from instar.cli.output import format_time, print_json
from instar.cli.roles import fetch_roles, print_roles
from instar.cli.run_status import list_external_rows, list_learning_rows, print_rows, show_run_status
from instar.cli.run_store import open_run_store
from instar.cli.service.external import ExternalService, list_external_services
from instar.cli.service.home import Home
from instar.cli.service.lock import ServiceLock, ServiceState
from instar.cli.version_warnings import list_version_warnings
from instar.cluster.control import RoleStatus
from instar.cluster.layout import RunFolder
from instar.config import UpstreamEngineConfig
from instar.gateway.base import HealthView

HEALTH_TIMEOUT_SECONDS = 5.0


class ServiceReport(msgspec.Struct, kw_only=True):
    """The state of the service. Most fields are None if it was never started."""

    is_running: bool = msgspec.field(name="running")
    home: str
    pid: int | None = None
    since: float | None = None
    url: str | None = None
    is_healthy: bool = msgspec.field(default=False, name="healthy")
    """True if the gateway responds and its engine is available."""
    problem: str | None = None
    is_background: bool = msgspec.field(default=False, name="background")
    version: str | None = None
    """The version of Instar that the service runs with."""
    installed_version: str = instar.__version__
    config: str | None = None
    run_dir: str | None = None
    name: str | None = None
    model: str | None = None
    policy_version: int | None = None
    """The version that the engine samples with or, if the service is not running, the newest one."""
    policies: dict[str, int] | None = None
    """The serving version of each learning agent's policy, if the run trains on live traffic."""
    sessions: dict[str, int] | None = None
    """The number of live sessions by status."""
    rewards: dict[str, int] | None = None
    """The number of rewards by source."""
    warnings: list[str] | None = None
    """Why agents are not answered by the versions that were promoted last."""
    agents: dict[str, list[str]] | None = None
    """The names of each agent's valid keys."""
    learning: LearningReport | None = None
    """The policies, the window and the trainer of a run that learns."""
    external: list[ExternalService] | None = None
    """The other machines that receive what agents say."""
    roles: list[RoleStatus] | None = None
    log: str | None = None


@async_command
async def status(
    run_dir: Annotated[
        Path | None, typer.Argument(help="A run's folder, such as runs/<name>. Default: the service.")
    ] = None,
    home_folder: HomeFolder = None,
    as_json: AsJson = False,
) -> None:
    """Without RUN_DIR, show the service: its addresses, sessions and agents, and what leaves this machine."""
    if run_dir is not None:
        await show_run_status(run_dir, as_json=as_json)
        return
    report = await make_report(Home.locate(home_folder, os.environ))
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        _print_report(report, Console())


async def make_report(home: Home) -> ServiceReport:
    lock = ServiceLock(home)
    running = lock.read_running()
    report = ServiceReport(is_running=running is not None, home=str(home.data))
    state = running or lock.read_last()
    if state is None:
        return report
    report.config, report.run_dir = state.launch.config, state.run_dir
    if RunFolder(Path(state.run_dir)).config_file.is_file():
        await _add_run(report, Path(state.run_dir))
    if running is not None:
        report.log = str(home.log_file) if running.is_background else None
        await _add_process(report, running)
    return report


async def _add_run(report: ServiceReport, run_dir: Path) -> None:
    async with open_run_store(run_dir, read_only=True) as (config, store):
        report.policy_version = (await store.latest_policy(config.policy_ids[0])).version
        keys = await store.keys()
        report.roles = await fetch_roles(run_dir)
        report.learning = await make_learning_report(config, store, report.roles)
        report.warnings = await list_version_warnings(store, config)
    agents: dict[str, list[str]] = {config.agent_id: []}
    for key in keys:
        if key.kind == "agent" and key.revoked_at is None and key.agent_id is not None:
            agents.setdefault(key.agent_id, []).append(key.name or f"unnamed ({key.key_hash[:12]})")
    engine = config.engine
    report.name = config.name
    report.model = engine.base_url if isinstance(engine, UpstreamEngineConfig) else config.model.name
    report.sessions, report.rewards = report.learning.sessions, report.learning.rewards
    report.agents = agents
    report.external = list_external_services(config)


async def _add_process(report: ServiceReport, state: ServiceState) -> None:
    report.pid, report.since, report.version = state.pid, state.started_at, state.instar_version
    report.is_background = state.is_background
    if state.is_stopping or not state.url:
        report.problem = "it is stopping" if state.is_stopping else "it is starting"
        return
    report.url = state.url
    timeout = aiohttp.ClientTimeout(HEALTH_TIMEOUT_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.get(f"{state.url}/healthz") as response,
        ):
            health = msgspec.json.decode(await response.read(), type=HealthView)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        report.problem = f"the gateway does not respond: {str(error) or type(error).__name__}"
        return
    report.is_healthy = health.status == "ok"
    if not report.is_healthy:
        report.problem = f"the engine is {health.engine}: {health.reason}"
    if health.version is not None:
        report.policy_version = health.version


def _print_report(report: ServiceReport, console: Console) -> None:
    if not report.is_running:
        console.print(f"The service is not running (home: {report.home}). Start it with `instar start`.")
    rows: list[tuple[str, str]] = []
    if report.is_running and report.since is not None:
        seconds = max(0.0, time.time() - report.since)
        since = f"{format_time(report.since)} ({_format_duration(seconds)})"
        rows.append(("running", f"process {report.pid}, since {since}"))
    if report.problem:
        rows.append(("problem", report.problem))
    if report.url:
        rows += [("OpenAI", f"{report.url}/v1"), ("Anthropic", report.url)]
    if report.version:
        outdated = report.version != report.installed_version
        note = f"; {report.installed_version} is installed, use `instar restart`" if outdated else ""
        rows.append(("version", f"Instar {report.version}{note}"))
    if report.name is not None:
        rows += [
            ("model", f"{report.model}, policy version {report.policy_version}"),
            ("settings", report.config or "config.yaml in the home, or the default settings"),
            ("run", report.run_dir or ""),
            *list_learning_rows(report.learning),
        ]
        rows += [
            ("agent", f"{agent} (keys: {', '.join(names) or 'none'})")
            for agent, names in (report.agents or {}).items()
        ]
        rows += [("warning", text) for text in report.warnings or []]
        rows += list_external_rows(report.external)
    if report.log:
        rows.append(("log", report.log))
    print_rows(rows, console)
    if report.is_running and report.roles:
        console.print()
        print_roles(report.roles, console)


def _format_duration(seconds: float) -> str:
    days, rest = divmod(int(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    return f"{days} d {hours} h" if days else f"{hours} h {rest // 60} min"
