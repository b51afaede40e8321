"""`instar config check` and `instar config show`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer
import yaml

from instar.cli.config_file import DEMO, load_config
from instar.errors import ConfigError


def run_check(file: Path, overrides: Sequence[str], *, as_json: bool) -> None:
    try:
        config = load_config(file, overrides)
    except ConfigError as error:
        if as_json:
            lines = str(error).splitlines()
            mistakes = [line.strip() for line in lines[1:]] or lines
            typer.echo(json.dumps({"ok": False, "mistakes": mistakes}))
        else:
            typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"ok": True, "name": config.name}))
    else:
        typer.echo(f"{file}: ok")


def run_show(file: Path | None, overrides: Sequence[str], *, as_json: bool) -> None:
    config = load_config(file or DEMO, overrides)
    data = config.model_dump(mode="json")
    if as_json:
        typer.echo(json.dumps(data))
    else:
        typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)
