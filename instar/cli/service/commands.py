"""`instar start`, `instar stop`, `instar restart` and `instar logs`: the gateway as a background service."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import instar
from instar.cli.options import AsJson, HomeFolder, Overrides
from instar.cli.output import print_json, print_result
from instar.cli.serve import make_service_connection, print_connection
from instar.cli.service.background import start_in_background, wait_until_ready, wait_until_stopped
from instar.cli.service.home import Home, ServiceSettings
from instar.cli.service.lock import Launch, ServiceLock, ServiceState
from instar.cli.service.logs import follow, read_last_lines
from instar.cli.service.process import load_service_config, make_launch, prepare_service, run_service
from instar.cli.service.systemd import describe_enabling, find_unit_file, make_unit
from instar.cluster.interrupts import EXIT_INTERRUPTED
from instar.cluster.layout import RunFolder
from instar.cluster.live_run import LiveRun
from instar.errors import ConfigError, InstarError
from instar.logs import configure_logging

SERVICE_LOG = "service"
logger = logging.getLogger(__name__)


def start(
    file: Annotated[
        Path | None,
        typer.Argument(help="A YAML file. Default: config.yaml in the home, or else the default model."),
    ] = None,
    home_folder: HomeFolder = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Run in this process, for containers and systemd.")
    ] = False,
    systemd: Annotated[
        bool, typer.Option("--systemd", help="Print a systemd user unit instead of starting the service.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="With --systemd: write the unit to systemd's folder.")
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Return when the gateway responds, and print its addresses. Its port, its keys and the recorded sessions
    are kept when it is restarted."""
    home = Home.locate(home_folder, os.environ)
    launch = make_launch(file, overrides or ())
    if foreground and systemd:
        raise ConfigError("--foreground and --systemd are mutually exclusive; the unit uses --foreground.")
    if write and not systemd:
        raise ConfigError("--write needs --systemd; it writes the systemd unit.")
    if systemd:
        _write_unit(home, launch, write)
    elif foreground:
        _run_in_foreground(home, launch)
    else:
        _start(home, launch, as_json=as_json)


def stop(home_folder: HomeFolder = None, as_json: AsJson = False) -> None:
    """Calls in progress have ten seconds to finish. If the service is not running, nothing happens."""
    state = _stop(Home.locate(home_folder, os.environ))
    text = "The service is not running." if state is None else f"Stopped the service (process {state.pid})."
    print_result(as_json, {"stopped": state is not None}, text)


def restart(home_folder: HomeFolder = None, as_json: AsJson = False) -> None:
    """Stop the service if it is running, and start it in the same way as before: with its YAML file and
    --set options. The file is read again."""
    home = Home.locate(home_folder, os.environ)
    lock = ServiceLock(home)
    running = lock.read_running()
    if running is not None and not running.is_background:
        raise InstarError(
            f"The service (process {running.pid}) runs in the foreground; restart it where it was started, "
            "for example with: systemctl --user restart instar"
        )
    last = running or lock.read_last()
    launch = last.launch if last is not None else make_launch(None, ())
    if not Path(launch.cwd).is_dir():
        raise InstarError(
            f"The folder {launch.cwd}, in which the service was started, no longer exists; use `instar stop` "
            "and `instar start` with the options of the service."
        )
    os.chdir(launch.cwd)  # the settings may refer to functions in this folder
    prepare_service(home, launch, Console(stderr=as_json))  # before a service that works is stopped
    _stop(home)
    _start(home, launch, as_json=as_json)


def logs(
    name: Annotated[
        str, typer.Argument(help="The service, or one of its processes, such as gateway or engine.")
    ] = SERVICE_LOG,
    home_folder: HomeFolder = None,
    is_following: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="The number of lines.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Print the end of the log of the service or of one of its processes."""
    if as_json and is_following:
        raise ConfigError("--json and --follow are mutually exclusive; use --follow without --json.")
    path = _find_log(Home.locate(home_folder, os.environ), name)
    text, position = read_last_lines(path, lines)
    if as_json:
        print_json({"path": str(path), "lines": text.splitlines()})
    else:
        typer.echo(text, nl=False)
    if is_following:
        try:
            for added_text in follow(path, position):
                typer.echo(added_text, nl=False)
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


def _find_log(home: Home, name: str) -> Path:
    running = ServiceLock(home).read_running()
    if name == SERVICE_LOG:
        if running is not None and not running.is_background:
            raise InstarError(
                f"The service (process {running.pid}) runs in the foreground and logs to its standard error; "
                "with systemd, use: journalctl --user -u instar"
            )
        if not home.log_file.is_file():
            raise InstarError(f"There is no log in {home.state}; start the service with `instar start`.")
        return home.log_file
    if running is None:
        raise InstarError(f"The service is not running, so {name!r} has no log; see `instar logs`.")
    folder = RunFolder(Path(running.run_dir))
    if not (path := folder.log(name)).is_file():
        names = ", ".join([SERVICE_LOG, *sorted(log.stem for log in folder.logs.glob("*.log"))])
        raise InstarError(f"Unknown log {name!r}. Available: {names}")
    return path


def _start(home: Home, launch: Launch, *, as_json: bool) -> None:
    lock = ServiceLock(home)
    running = lock.read_running()
    if running is not None and running.is_stopping:
        wait_until_stopped(home, running)
        running = None
    is_new = False
    try:
        if running is not None:
            state = wait_until_ready(home)
        else:
            prepare_service(home, launch, Console(stderr=as_json))
            state, is_new = start_in_background(home, launch)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not is_new:
        _check_same_launch(state, launch)
    _print_state(home, state, is_new=is_new, as_json=as_json)


def _check_same_launch(state: ServiceState, launch: Launch) -> None:
    """Raise ConfigError if the user asks for other settings than those with which the service is running."""
    has_settings = launch.config is not None or launch.overrides
    current = (state.launch.config, state.launch.overrides)
    if has_settings and (launch.config, launch.overrides) != current:
        settings = " ".join([state.launch.config or "its default settings", *state.launch.overrides])
        raise ConfigError(
            f"The service is already running (process {state.pid}) with {settings}; run `instar stop` before "
            "you start it with other settings."
        )


def _run_in_foreground(home: Home, launch: Launch) -> None:
    configure_logging()
    config = prepare_service(home, launch, Console(stderr=True))

    def announce(run: LiveRun, _: ServiceSettings) -> None:
        # The output of a service is often kept, so it does not contain the keys.
        logger.info("serving at %s; `instar start` prints the settings for agents", run.gateway_url)

    logger.info("starting Instar %s with the run %s", instar.__version__, config.run_dir)
    asyncio.run(run_service(home, launch, config, log=logger.info, on_ready=announce))
    logger.info("stopped")


def _stop(home: Home) -> ServiceState | None:
    state = ServiceLock(home).request_stop()
    if state is not None:
        wait_until_stopped(home, state)
    return state


def _print_state(home: Home, state: ServiceState, *, is_new: bool, as_json: bool) -> None:
    config = RunFolder(Path(state.run_dir)).read_config()
    connection = make_service_connection(config, state.url, ServiceSettings.read(home))
    if as_json:
        print_json({**connection.to_json(), "pid": state.pid, "started": is_new})
        return
    if not is_new:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started_at))
        typer.echo(f"The service is already running (process {state.pid}, since {since}).")
    print_connection(config, connection, Console())
    typer.echo(f"Calls are recorded in {state.run_dir}. Stop the service with `instar stop`.")


def _write_unit(home: Home, launch: Launch, should_write: bool) -> None:
    load_service_config(home, launch)
    unit = make_unit(home, launch, os.environ)
    if not should_write:
        typer.echo(unit, nl=False)
        path = find_unit_file(os.environ)
        typer.echo(f"\nWrite it to {path}, or pass --write. {describe_enabling()}", err=True)
        return
    path = find_unit_file(os.environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(unit)
    typer.echo(f"Wrote {path}. {describe_enabling()}")
