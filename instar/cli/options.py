"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
ConfigFile = Annotated[Path, typer.Argument(help="The YAML file that describes the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a setting, e.g. --set trainer.steps=5"),
]
RunDir = Annotated[Path, typer.Argument(help="The run's folder, runs/<name>.")]
SessionIds = Annotated[list[str] | None, typer.Argument(metavar="[SESSION]...", help="Session ids.")]


def new_app(*, no_args_is_help: bool = True) -> typer.Typer:
    """Return a Typer app with plain text help, for a group of subcommands."""
    return typer.Typer(
        no_args_is_help=no_args_is_help,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
