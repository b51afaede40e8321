"""`instar learn`: open and close the training window of a run."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from instar.cli.filters import parse_duration
from instar.cli.learning_status import describe_window
from instar.cli.options import AsJson, RunDir, new_app
from instar.cli.output import print_json
from instar.cluster.layout import RunFolder
from instar.errors import ConfigError, InstarError
from instar.live.learning_window import read_schedule, write_opened
from instar.live.windows import OpenedWindow

app = new_app()


@app.callback()
def learn() -> None:
    """Choose when a run learns from live traffic."""


@app.command()
def now(
    run_dir: RunDir,
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="How long: 30m, 2h or 1d.")] = "1h",
    is_stopping: Annotated[
        bool, typer.Option("--stop", help="Close the window that an earlier call opened.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Learn for some time, whatever `live.window` says about hours, calendar, load and budget. Training still
    pauses while an agent waits for a reply. The window stays open if the run is restarted."""
    config = RunFolder(run_dir).read_config()
    if not config.trains_on_live:
        raise InstarError(
            f"The run in {run_dir} does not learn from live traffic, so it has no window; list `live` in "
            "`data`, and set the mode of an agent to learn."
        )
    seconds = parse_duration(duration)
    if seconds is None or not seconds:
        raise ConfigError(
            f"--for: {duration!r} is not a duration; use a number with a unit: 90s, 30m, 2h or 1d."
        )
    moment = time.time()
    write_opened(run_dir, None if is_stopping else OpenedWindow(moment, moment + seconds))
    state = read_schedule(config)
    if as_json:
        print_json({"open": state.is_open, "reason": state.reason, "until": state.until})
    else:
        typer.echo(f"window: {describe_window(state)}")
