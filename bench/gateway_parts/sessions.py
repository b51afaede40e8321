"""Measure the cost of late turns in long sessions, and the memory used by many sessions, in exact mode."""

from __future__ import annotations

import asyncio
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass

from gateway_parts.conversations import Conversation, open_conversations, run_turns
from gateway_parts.load import Target
from gateway_parts.processes import MeasurementError, read_usage
from gateway_parts.servers import GatewayProcess

TURN_BYTES = 3_800
"""The size of a turn's new message. The 100th request has about 200 messages and 400 KB."""
SMALL_TURN_BYTES = 400


@dataclass(frozen=True)
class Phase:
    """The turns over which CPU time is averaged."""

    name: str
    first_turn: int
    last_turn: int


EARLY, LATE = Phase("10", 8, 12), Phase("100", 96, 100)


def measure_turns(
    gateway: GatewayProcess, floor: Target, session_count: int, log: Callable[[str], None]
) -> dict[str, float]:
    """Measure the CPU time of turns 10 and 100, and compare them after subtracting the floor's CPU time."""
    metrics: dict[str, float] = {}
    conversations = asyncio.run(open_conversations(gateway, session_count, TURN_BYTES))
    floor_conversations = [
        Conversation(conversation.number, conversation.size) for conversation in conversations
    ]
    for phase in (EARLY, LATE):
        log(f"{session_count} sessions up to turn {phase.last_turn}")
        asyncio.run(run_turns(gateway.url, conversations, phase.first_turn - 1 - conversations[0].turn))
        for floor_conversation in floor_conversations:
            floor_conversation.skip_to(phase.first_turn - 1)
        turns = phase.last_turn - phase.first_turn + 1
        gateway_cpu_ms = _measure_cpu_ms(gateway.pid, gateway.url, conversations, turns)
        floor_cpu_ms = _measure_cpu_ms(floor.pid, floor.url, floor_conversations, turns)
        metrics[f"turn_{phase.name}_cpu_ms"] = gateway_cpu_ms
        metrics[f"turn_{phase.name}_floor_cpu_ms"] = floor_cpu_ms
        metrics[f"turn_{phase.name}_bytes"] = len(conversations[0].messages)
    early = metrics["turn_10_cpu_ms"] - metrics["turn_10_floor_cpu_ms"]
    late = metrics["turn_100_cpu_ms"] - metrics["turn_100_floor_cpu_ms"]
    metrics["turn_100_over_10"] = late / early
    return metrics


def _measure_cpu_ms(pid: int, url: str, conversations: list[Conversation], turns: int) -> float:
    """Run the turns and return the process's CPU time per turn in ms."""
    cpu_before = read_usage(pid).cpu_seconds
    asyncio.run(run_turns(url, conversations, turns))
    return 1000 * (read_usage(pid).cpu_seconds - cpu_before) / (len(conversations) * turns)


def measure_memory(
    gateway: GatewayProcess, sessions: int, calls: int, log: Callable[[str], None]
) -> dict[str, float | None]:
    """Return the memory and event loop lag of the gateway after the calls.

    All sessions pause halfway, so that those evicted from memory are read from the store again.
    """
    log(f"{sessions} sessions, {calls} calls")
    calls_before = gateway.count_calls()
    conversations = asyncio.run(open_conversations(gateway, sessions, SMALL_TURN_BYTES))
    calls_per_session = calls // sessions
    for turns in (calls_per_session // 2, calls_per_session - calls_per_session // 2):
        asyncio.run(run_turns(gateway.url, conversations, turns))
    recorded = gateway.count_calls() - calls_before
    if recorded != calls_per_session * sessions:
        raise MeasurementError(
            f"{calls_per_session * sessions} calls succeeded, but {recorded} are in the store"
        )
    return {
        "rss_mb": read_usage(gateway.pid).rss_mb,
        "loop_lag_p99_ms": _read_loop_lag(gateway),
        "open_sessions": sessions,
        "recorded_calls": recorded,
    }


def _read_loop_lag(gateway: GatewayProcess) -> float | None:
    """Return the 99th percentile of the gateway's event loop lag, or None if `/stats` fails."""
    try:
        return gateway.fetch_stats()["loop_lag_p99_ms"]
    except urllib.error.HTTPError:
        return None
