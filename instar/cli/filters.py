"""The options that choose sessions, the same for every command that takes some."""

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

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

OPTIONS: dict[str, Any] = {
    "channel": Annotated[str | None, typer.Option(help="train, val, live or data.")],
    "status": Annotated[str | None, typer.Option(help="open, completed, failed or abandoned.")],
    "tag": Annotated[list[str] | None, typer.Option(metavar="NAME[=VALUE]", help="Has this tag.")],
    "without": Annotated[list[str] | None, typer.Option(metavar="NAME", help="Has no such tag.")],
    "reward_min": Annotated[
        float | None, typer.Option(help="Its latest reward, or one by --scorer or --source, is no less.")
    ],
    "reward_max": Annotated[float | None, typer.Option(help="Likewise, and no more.")],
    "scorer": Annotated[str | None, typer.Option(metavar="NAME[@VERSION]", help="Was rewarded by it.")],
    "source": Annotated[str | None, typer.Option(help="agent, rule, judge, human or fallback.")],
    "task": Annotated[str | None, typer.Option(help="The id of its task.")],
    "agent": Annotated[str | None, typer.Option(help="The id of its agent.")],
    "since": Annotated[str | None, typer.Option(metavar="TIME", help="2026-01-31T12:00, or 3h, 2d ago.")],
    "until": Annotated[str | None, typer.Option(metavar="TIME", help="Likewise: opened before it.")],
}


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with the options in the place of its parameter ``chosen``: a dict of what was given."""
    signature = inspect.signature(command, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in OPTIONS.items()
    ]
    others = [each for each in signature.parameters.values() if each.name != "chosen"]

    @wraps(command)
    def run(*args: Any, **given: Any) -> None:
        chosen = {name: given.pop(name) for name in OPTIONS}
        command(*args, chosen=chosen, **given)

    ordered = [*(each.replace(kind=keyword) for each in others), *options]
    run.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in ordered}
    return run


def session_filter(chosen: dict[str, Any], ids: tuple[str, ...] = ()) -> SessionFilter:
    """What the options mean."""
    from instar.store.base import SessionFilter
    from instar.types import Channel, RewardSource, SessionStatus

    return SessionFilter(
        channel=_word(Channel, "channel", chosen),
        status=_word(SessionStatus, "status", chosen),
        ids=ids,
        tags=tuple(parse_tag(each) for each in chosen["tag"] or ()),
        without=tuple(chosen["without"] or ()),
        reward_min=chosen["reward_min"],
        reward_max=chosen["reward_max"],
        scorer=chosen["scorer"],
        source=_word(RewardSource, "source", chosen),
        task=chosen["task"],
        agent=chosen["agent"],
        since=_time("since", chosen),
        until=_time("until", chosen),
    )


def is_given(chosen: dict[str, Any]) -> bool:
    """Whether any option was."""
    return any(value is not None and value != [] for value in chosen.values())


def parse_tag(given: str) -> tuple[str, str | None]:
    name, equals, value = given.partition("=")
    if not name:
        raise ConfigError(f"{given!r} is no tag; a tag is a name, or name=value")
    return name, value if equals else None


def _word(kind: Any, name: str, chosen: dict[str, Any]) -> Any:
    given = chosen[name]
    if given is None:
        return None
    try:
        return kind(given)
    except ValueError:
        raise ConfigError(f"--{name}: {given!r} is not one of: {', '.join(kind)}") from None


def _time(name: str, chosen: dict[str, Any]) -> float | None:
    """A date and time, in local time where it names no zone, or how long ago."""
    given: str | None = chosen[name]
    if given is None:
        return None
    number, unit = given[:-1], given[-1:]
    if unit in _UNITS and number.replace(".", "", 1).isdigit():
        return time.time() - float(number) * _UNITS[unit]
    try:
        return datetime.fromisoformat(given).timestamp()
    except ValueError:
        raise ConfigError(
            f"--{name}: {given!r} is no time; allowed are a date, a date and time (2026-01-31T12:00) and how "
            "long ago (90s, 15m, 3h, 2d)"
        ) from None
