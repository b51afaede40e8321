"""`instar config check` and `instar config show`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
import yaml

from instar.backends.factory import check_run
from instar.backends.resolve import without_api_key
from instar.cli.config_file import DEMO, Mistakes, load_config
from instar.cluster.data import pin_data
from instar.config import CommandAgentConfig, RunConfig, Section
from instar.errors import ConfigError
from instar.registry import load_object


def run_check(file: Path, overrides: Sequence[str], *, as_json: bool) -> None:
    try:
        config = load_config(file, overrides)
        if found := list(_not_there(config)):
            raise Mistakes(str(file), found)
        notes = _notes(config, str(file))
    except ConfigError as error:
        if as_json:
            mistakes = error.found if isinstance(error, Mistakes) else [str(error)]
            typer.echo(json.dumps({"ok": False, "mistakes": mistakes}))
        else:
            typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"ok": True, "mistakes": [], "name": config.name, "notes": notes}))
    else:
        typer.echo("\n".join([f"{file}: ok", *notes]))


def _notes(config: RunConfig, origin: str) -> list[str]:
    """What the run's backend and engine will be, and what they will do otherwise than asked."""
    try:
        return check_run(config, os.environ)[1]
    except ConfigError as error:
        raise Mistakes(origin, [str(error)]) from error


def _not_there(config: RunConfig) -> Iterator[str]:
    """Files, programs, functions and datasets that the settings name and that are not to be found."""
    for section in ("rollout", "eval"):
        part = getattr(config, section)
        file: Path | None = getattr(part.tasks, "path", None) if part else None
        if file is not None and not file.is_file():
            yield f"{section}.tasks.path: given {str(file)!r}; there is no such file"
    agent = config.rollout.agent if config.rollout else None
    if isinstance(agent, CommandAgentConfig):
        yield from _program(agent)
    functions = {
        "rollout.tasks": config.rollout.tasks if config.rollout else None,
        "rollout.agent": agent,
        "eval.tasks": config.eval.tasks if config.eval else None,
        **_numbered("reward", config.reward),
        "engine": config.engine,
    }
    for path, named in functions.items():
        if function := getattr(named, "function", None):
            try:
                load_object(function)
            except ConfigError as error:
                yield f"{path}.function: {error}"
    try:
        asyncio.run(pin_data(config))
    except ConfigError as error:
        yield str(error)


def _numbered(name: str, sections: Sequence[Section]) -> dict[str, Section]:
    """Each with its path; where there is but one, it need not have been written as a list."""
    if len(sections) == 1:
        return {name: sections[0]}
    return {f"{name}.{place}": section for place, section in enumerate(sections)}


def _program(agent: CommandAgentConfig) -> Iterator[str]:
    if agent.cwd is not None and not agent.cwd.is_dir():
        yield f"rollout.agent.cwd: given {str(agent.cwd)!r}; there is no such folder"
        return
    if not agent.command:
        yield "rollout.agent.command: given []; a program is needed"
        return
    program = agent.command[0]
    beside = "/" in program and agent.cwd is not None and (agent.cwd / program).is_file()
    if "{" not in program and not beside and shutil.which(program) is None:
        yield f"rollout.agent.command: given {program!r}; there is no such program"


def run_show(file: Path | None, overrides: Sequence[str], *, as_json: bool) -> None:
    config = without_api_key(load_config(file or DEMO, overrides))
    data = config.model_dump(mode="json")
    if as_json:
        typer.echo(json.dumps(data))
    else:
        typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)
