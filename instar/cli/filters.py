"""The options that select sessions, shared by all commands that work on sessions."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from instar.errors import ConfigError

if TYPE_CHECKING:
    from instar.store.base import SessionFilter

_SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}

OPTIONS: dict[str, Any] = {
    "channel": Annotated[str | None, typer.Option(help="Channel: train, val, live or data.")],
    "status": Annotated[str | None, typer.Option(help="Status: open, completed, failed or abandoned.")],
    "tag": Annotated[
        list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="Only sessions with this tag.")
    ],
    "without": Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only sessions without this tag.")
    ],
    "reward_min": Annotated[
        float | None, typer.Option(help="Minimum reward: the latest, or any from --scorer or --source.")
    ],
    "reward_max": Annotated[
        float | None, typer.Option(help="Maximum reward: the latest, or any from --scorer or --source.")
    ],
    "scorer": Annotated[
        str | None, typer.Option(metavar="NAME[@VERSION]", help="Only sessions rewarded by this scorer.")
    ],
    "source": Annotated[
        str | None, typer.Option(help="Only sessions rewarded by agent, rule, judge, human or fallback.")
    ],
    "task": Annotated[str | None, typer.Option(help="Task id.")],
    "agent": Annotated[str | None, typer.Option(help="Agent id.")],
    "since": Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Opened since this time, e.g. 2026-01-31T12:00 or 3h (ago)."),
    ],
    "until": Annotated[str | None, typer.Option(metavar="TIME", help="Opened before this time.")],
}


def with_session_filters(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's ``filters`` parameter with the options in OPTIONS. The command receives their
    values as a dict, with None for options that are not set."""
    signature = inspect.signature(command, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, keyword, default=None, annotation=annotation)
        for name, annotation in OPTIONS.items()
    ]
    others = [parameter for parameter in signature.parameters.values() if parameter.name != "filters"]

    @wraps(command)
    def run(*args: Any, **values: Any) -> None:
        filters = {name: values.pop(name) for name in OPTIONS}
        command(*args, filters=filters, **values)

    parameters = [*(parameter.replace(kind=keyword) for parameter in others), *options]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def build_session_filter(filters: dict[str, Any], ids: tuple[str, ...] = ()) -> SessionFilter:
    from instar.store.base import SessionFilter
    from instar.types import Channel, RewardSource, SessionStatus

    return SessionFilter(
        channel=_parse_choice(Channel, "channel", filters),
        status=_parse_choice(SessionStatus, "status", filters),
        ids=ids,
        tags=tuple(parse_tag(tag) for tag in filters["tag"] or ()),
        without=tuple(filters["without"] or ()),
        reward_min=filters["reward_min"],
        reward_max=filters["reward_max"],
        scorer=filters["scorer"],
        source=_parse_choice(RewardSource, "source", filters),
        task=filters["task"],
        agent=filters["agent"],
        since=_parse_time("since", filters),
        until=_parse_time("until", filters),
    )


def has_filters(filters: dict[str, Any]) -> bool:
    return any(value is not None and value != [] for value in filters.values())


def parse_tag(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name:
        raise ConfigError(f"{text!r} is not a valid tag; use NAME or NAME=VALUE.")
    return name, value if equals else None


def _parse_choice(enum_type: Any, name: str, filters: dict[str, Any]) -> Any:
    value = filters[name]
    if value is None:
        return None
    try:
        return enum_type(value)
    except ValueError:
        raise ConfigError(f"Unknown {name} {value!r}. Available: {', '.join(enum_type)}") from None


def _parse_time(name: str, filters: dict[str, Any]) -> float | None:
    """Return the value of a time option as seconds since the epoch, or None if the option is not set. The
    value is a duration before now, or a date and time, which is local unless it has a time zone."""
    text: str | None = filters[name]
    if text is None:
        return None
    if (seconds := parse_duration(text)) is not None:
        return time.time() - seconds
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(
            f"--{name}: {text!r} is not a time; use a date, a date and time (2026-01-31T12:00) or a "
            "duration before now (90s, 15m, 3h, 2d)."
        ) from None


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration such as 90s, 15m, 3h or 2d, or None if the text is not a duration."""
    number, unit = text[:-1], text[-1:]
    if unit in _SECONDS_PER_UNIT and number.replace(".", "", 1).isdigit():
        return float(number) * _SECONDS_PER_UNIT[unit]
    return None
