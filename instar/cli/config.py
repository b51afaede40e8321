"""`instar config check` and `instar config show`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml

from instar.backends.factory import check_run
from instar.backends.resolve import without_api_key
from instar.cli.config_file import DEMO, ConfigMistakes, load_config
from instar.cli.options import AsJson, ConfigFile, Overrides, new_app
from instar.cluster.data import pin_data
from instar.config import CommandAgentConfig, RunConfig, Section
from instar.errors import ConfigError
from instar.registry import load_object

app = new_app()


@app.command()
def check(file: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Report every mistake in a run's YAML file."""
    try:
        config = load_config(file, overrides or ())
        if missing := list(_find_missing(config)):
            raise ConfigMistakes(str(file), missing)
        notes = _notes(config, str(file))
    except ConfigError as error:
        if as_json:
            mistakes = error.mistakes if isinstance(error, ConfigMistakes) else [str(error)]
            typer.echo(json.dumps({"ok": False, "mistakes": mistakes}))
        else:
            typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"ok": True, "mistakes": [], "name": config.name, "notes": notes}))
    else:
        typer.echo("\n".join([f"{file}: ok", *notes]))


def _notes(config: RunConfig, origin: str) -> list[str]:
    """Return notes on the run's backend and engine, and on settings that they will not follow exactly."""
    try:
        return check_run(config, os.environ)[1]
    except ConfigError as error:
        raise ConfigMistakes(origin, [str(error)]) from error


def _find_missing(config: RunConfig) -> Iterator[str]:
    """Yield a message for each missing file, program, function or dataset that the settings refer to."""
    for section in ("rollout", "eval"):
        part = getattr(config, section)
        file: Path | None = getattr(part.tasks, "path", None) if part else None
        if file is not None and not file.is_file():
            yield f"{section}.tasks.path: given {str(file)!r}; the file does not exist"
    agent = config.rollout.agent if config.rollout else None
    if isinstance(agent, CommandAgentConfig):
        yield from _check_program(agent)
    functions = {
        "rollout.tasks": config.rollout.tasks if config.rollout else None,
        "rollout.agent": agent,
        "eval.tasks": config.eval.tasks if config.eval else None,
        **_sections_by_path("reward", config.reward),
        "engine": config.engine,
    }
    for path, section in functions.items():
        if function := getattr(section, "function", None):
            try:
                load_object(function)
            except ConfigError as error:
                yield f"{path}.function: {error}"
    try:
        asyncio.run(pin_data(config))
    except ConfigError as error:
        yield str(error)


def _sections_by_path(name: str, sections: Sequence[Section]) -> dict[str, Section]:
    """Return the sections by path. A single section may have been written without a list."""
    if len(sections) == 1:
        return {name: sections[0]}
    return {f"{name}.{place}": section for place, section in enumerate(sections)}


def _check_program(agent: CommandAgentConfig) -> Iterator[str]:
    if agent.cwd is not None and not agent.cwd.is_dir():
        yield f"rollout.agent.cwd: given {str(agent.cwd)!r}; the folder does not exist"
        return
    if not agent.command:
        yield "rollout.agent.command: given []; name a program"
        return
    program = agent.command[0]
    beside = "/" in program and agent.cwd is not None and (agent.cwd / program).is_file()
    if "{" not in program and not beside and shutil.which(program) is None:
        yield f"rollout.agent.command: given {program!r}; the program does not exist"


@app.command()
def show(
    file: Annotated[Path | None, typer.Argument(help="The YAML file. Default: the demo's.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print a run's settings with every default filled in."""
    config = without_api_key(load_config(file or DEMO, overrides or ()))
    data = config.model_dump(mode="json")
    if as_json:
        typer.echo(json.dumps(data))
    else:
        typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)
