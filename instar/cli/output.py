"""The output of commands: JSON, tables and progress bars."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from instar.types import Json


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value))


def print_result(as_json: bool, value: Any, text: str) -> None:
    """Print the value as JSON if ``as_json`` is True, else the text."""
    typer.echo(json.dumps(value) if as_json else text)


def select_fields(item: object, *names: str) -> Json:
    return {name: getattr(item, name) for name in names}


def plain_table(*columns: Column | str, expand: bool = False) -> Table:
    return Table(*columns, box=None, padding=(0, 1, 0, 0), expand=expand)


def format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def format_short_time(seconds: float) -> str:
    """Return a local time in at most 12 characters: the time of day for today, or else the date."""
    moment, today = time.localtime(seconds), time.localtime()
    if moment[:3] == today[:3]:
        return time.strftime("today %H:%M", moment)
    return time.strftime("%b %d %H:%M" if moment.tm_year == today.tm_year else "%Y-%m-%d", moment)


def format_number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


@contextmanager
def progress_bar(text: str, *, hidden: bool = False) -> Generator[Callable[[int, int], None] | None]:
    """Show a progress bar if standard error is a terminal and ``hidden`` is False. Yield a function that
    updates the bar and takes the completed and total number of items, or None if there is no bar."""
    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield None
        return
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
