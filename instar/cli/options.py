"""Options and arguments that several commands share, and helpers for creating commands."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

P = ParamSpec("P")


def find_run(path: Path) -> Path:
    """Return the path, or ``runs/NAME`` if there is only a run with this name."""
    folder = Path("runs") / path
    return folder if not path.exists() and (folder / "config.json").is_file() else path


Agent = Annotated[
    str | None,
    typer.Option(
        "--agent",
        help="The learning agent whose policy is meant. Needed if the run trains several.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
ConfigFile = Annotated[Path, typer.Argument(help="The YAML file that describes the run.")]
HomeFolder = Annotated[
    Path | None,
    typer.Option(
        "--home",
        envvar="INSTAR_HOME",
        help="One folder for all files of the service. Default: the user's folders by the XDG specification.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a setting, e.g. trainer.steps=5; repeatable."),
]
RunDir = Annotated[
    Path, typer.Argument(callback=find_run, help="The run's folder, or the name of a folder in runs/.")
]
SessionIds = Annotated[list[str] | None, typer.Argument(metavar="[SESSION]...", help="Session ids.")]


def new_app(*, no_args_is_help: bool = True) -> typer.Typer:
    """Return a Typer app with plain text help."""
    return typer.Typer(
        no_args_is_help=no_args_is_help,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def async_command(command: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Return a synchronous version of the command for Typer, which cannot call async functions."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        import asyncio  # not needed for --help

        asyncio.run(command(*args, **kwargs))

    return run
