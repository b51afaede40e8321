"""`instar config check` and `instar config show`."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
import yaml

from instar.backends.factory import check_run
from instar.backends.resolve import remove_api_key
from instar.cli.config_file import DEMO_FILE, InvalidConfigError, load_config
from instar.cli.options import AsJson, ConfigFile, Overrides, new_app
from instar.cli.output import print_json, print_result
from instar.cluster.adapter import check_adapter
from instar.cluster.data import pin_data
from instar.config import CommandAgentConfig, RunConfig
from instar.errors import ConfigError
from instar.registry import load_object

app = new_app()


@app.command()
def check(file: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Report errors in a run's YAML file, including missing files, programs, functions and datasets."""
    try:
        config = load_config(file, overrides or ())
        if missing := list(_find_missing(config)):
            raise InvalidConfigError(str(file), missing)
        try:
            resolved, notes = check_run(config, os.environ)
            asyncio.run(check_adapter(resolved))
        except ConfigError as error:
            raise InvalidConfigError(str(file), [str(error)]) from error
    except ConfigError as error:
        if as_json:
            errors = error.errors if isinstance(error, InvalidConfigError) else [str(error)]
            print_json({"ok": False, "mistakes": errors})
        else:
            typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None
    result = {"ok": True, "mistakes": [], "name": config.name, "notes": notes}
    print_result(as_json, result, "\n".join([f"{file}: ok", *notes]))


def _find_missing(config: RunConfig) -> Iterator[str]:
    """Yield a message for each missing file, program, function or dataset that the settings refer to."""
    for section in ("rollout", "eval"):
        part = getattr(config, section)
        file: Path | None = getattr(part.tasks, "path", None) if part else None
        if file is not None and not file.is_file():
            yield f"{section}.tasks.path: the file {str(file)!r} does not exist"
    agent = config.rollout.agent if config.rollout else None
    if isinstance(agent, CommandAgentConfig):
        yield from _check_program(agent)
    # A single reward may be written without a list, so its path has no index.
    rewards = {f"reward.{index}": section for index, section in enumerate(config.reward)}
    rewards = {"reward": config.reward[0]} if len(rewards) == 1 else rewards
    sections = {
        "rollout.tasks": config.rollout.tasks if config.rollout else None,
        "rollout.agent": agent,
        "eval.tasks": config.eval.tasks if config.eval else None,
        **rewards,
        "engine": config.engine,
    }
    for path, section in sections.items():
        if function := getattr(section, "function", None):
            try:
                load_object(function)
            except ConfigError as error:
                yield f"{path}.function: {error}"
    try:
        asyncio.run(pin_data(config))
    except ConfigError as error:
        yield str(error)


def _check_program(agent: CommandAgentConfig) -> Iterator[str]:
    if agent.cwd is not None and not agent.cwd.is_dir():
        yield f"rollout.agent.cwd: the folder {str(agent.cwd)!r} does not exist"
        return
    if not agent.command:
        yield "rollout.agent.command: must not be empty"
        return
    program = agent.command[0]
    is_in_cwd = "/" in program and agent.cwd is not None and (agent.cwd / program).is_file()
    if "{" not in program and not is_in_cwd and shutil.which(program) is None:
        yield f"rollout.agent.command: the program {program!r} does not exist"


@app.command()
def show(
    file: Annotated[Path | None, typer.Argument(help="The YAML file. Default: the demo's file.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print a run's settings with all defaults filled in, without the API key."""
    config = remove_api_key(load_config(file or DEMO_FILE, overrides or ()))
    data = config.model_dump(mode="json")
    if as_json:
        print_json(data)
    else:
        typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)
