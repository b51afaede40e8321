"""Long and many sessions, in exact mode: what a late turn costs, and what the process holds."""

from __future__ import annotations

import asyncio
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass

from gateway_parts.load import Target
from gateway_parts.processes import DidNotStart, usage
from gateway_parts.servers import Gateway
from gateway_parts.talk import Talk, hold, open_talks

TURN_BYTES = 3_800
"""Of a turn's new message: with the reply, a session's 100th request has 200 messages and 400 KB."""
SMALL_TURN_BYTES = 400


@dataclass(frozen=True)
class Phase:
    """Turns over which CPU time is averaged."""

    name: str
    first: int
    last: int


EARLY, LATE = Phase("10", 8, 12), Phase("100", 96, 100)


def measure_turns(
    gateway: Gateway, floor: Target, count: int, log: Callable[[str], None]
) -> dict[str, float]:
    """CPU time of the 100th turn over that of the 10th, each less the floor's for the same bodies."""
    figures: dict[str, float] = {}
    talks = asyncio.run(open_talks(gateway, count, TURN_BYTES))
    twins = [Talk(talk.number, talk.size) for talk in talks]
    for phase in (EARLY, LATE):
        log(f"{count} sessions up to turn {phase.last}")
        asyncio.run(hold(gateway.url, talks, phase.first - 1 - talks[0].turn))
        for twin in twins:
            twin.skip_to(phase.first - 1)
        turns = phase.last - phase.first + 1
        ours = _cpu_ms(gateway.pid, gateway.url, talks, turns)
        bare = _cpu_ms(floor.pid, floor.url, twins, turns)
        figures[f"turn_{phase.name}_cpu_ms"] = ours
        figures[f"turn_{phase.name}_floor_cpu_ms"] = bare
        figures[f"turn_{phase.name}_bytes"] = len(talks[0].said)
    early = figures["turn_10_cpu_ms"] - figures["turn_10_floor_cpu_ms"]
    late = figures["turn_100_cpu_ms"] - figures["turn_100_floor_cpu_ms"]
    figures["turn_100_over_10"] = late / early
    return figures


def _cpu_ms(pid: int, url: str, talks: list[Talk], turns: int) -> float:
    before = usage(pid).cpu_s
    asyncio.run(hold(url, talks, turns))
    return 1000 * (usage(pid).cpu_s - before) / (len(talks) * turns)


def measure_memory(
    gateway: Gateway, sessions: int, calls: int, log: Callable[[str], None]
) -> dict[str, float | None]:
    """Memory and loop lag after so many calls. Every session is left alone for a while and comes back, so
    that those no longer at hand are read from the store again."""
    log(f"{sessions} sessions, {calls} calls")
    before = gateway.calls()
    talks = asyncio.run(open_talks(gateway, sessions, SMALL_TURN_BYTES))
    each = calls // sessions
    for turns in (each // 2, each - each // 2):
        asyncio.run(hold(gateway.url, talks, turns))
    recorded = gateway.calls() - before
    if recorded != each * sessions:
        raise DidNotStart(f"{recorded} calls are on disk, {each * sessions} were answered")
    return {
        "rss_mb": usage(gateway.pid).rss_mb,
        "loop_lag_p99_ms": _loop_lag(gateway),
        "open_sessions": sessions,
        "recorded_calls": recorded,
    }


def _loop_lag(gateway: Gateway) -> float | None:
    """As the gateway itself saw it; None where it does not say."""
    try:
        return gateway.stats()["loop_lag_p99_ms"]
    except urllib.error.HTTPError:
        return None
