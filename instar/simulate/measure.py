"""Measures a workload from the store and the metrics of a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from instar.config import DistributionConfig
from instar.errors import ConfigError
from instar.simulate.base import EngineSpeed, Workload
from instar.simulate.sessions import SimulatedSession, SimulatedTurn
from instar.store.base import Store
from instar.types import Call, Channel, Json, Link, SessionStatus
from instar.types import Session as RecordedSession

MAX_SESSIONS = 5000
MAX_VALUES = 5000
"""Maximum number of values that are kept of a measured distribution."""
WARM_UP = 1
"""Number of steps excluded from the trainer's times. The first step compiles, allocates and fills caches."""


@dataclass(frozen=True, slots=True)
class CallTiming:
    sent: float
    began: float
    ended: float
    tokens: int


async def measure(
    store: Store, run_id: str, records: Sequence[Json], *, engines: int, max_batch: int
) -> Workload:
    """Return the workload of a run: its sessions, and fits of its engines' speed and its step times.
    ``records`` are the records of training steps in metrics.jsonl."""
    rows = await store.sessions(run_id, channel=Channel.TRAIN, limit=MAX_SESSIONS)
    ended = [
        row.session for row in rows if row.session.status in (SessionStatus.COMPLETED, SessionStatus.FAILED)
    ]
    sessions: list[SimulatedSession] = []
    timed: list[CallTiming] = []
    for session in ended:
        calls = [call for call in await store.calls(session.session_id) if len(call.sampled_ids)]
        timed += [_measure_call(call) for call in calls]
        if calls and session.status is SessionStatus.COMPLETED:
            sessions.append(to_simulated_session(session, calls))
    if not sessions or not records:
        raise ConfigError(
            f"run {run_id}: cannot be measured, it has no completed session or no training step"
        )
    failed = sum(session.status is SessionStatus.FAILED for session in ended)
    base, per_token = fit_training(records)
    latency, crowding = fit_latency(timed, engines)
    published = [max(0.0, r["step_seconds"] - r["train_seconds"]) for r in _warm(records)]
    groups = sum(record.get("groups", 0) for record in records)
    return Workload(
        sessions=sessions,
        latency=latency,
        crowding=crowding,
        speed=fit_speed(timed, engines, max_batch),
        train_base=base,
        train_per_token=per_token,
        publish=_empirical(published),
        failures=failed / len(ended),
        zero_signal=sum(record.get("zero_signal", 0) for record in records) / max(1, groups),
    )


def with_sessions(work: Workload, sessions: Sequence[SimulatedSession]) -> Workload:
    return replace(work, sessions=sessions)


def to_simulated_session(session: RecordedSession, calls: Sequence[Call]) -> SimulatedSession:
    """Return the session as turns. Concurrent calls become turns without a wait. A call starts a new sample
    if it does not continue another call, or if the call that it continues is already continued."""
    after = [call.started_at for call in calls[1:]] + [session.ended_at or calls[-1].ended_at]
    return SimulatedSession(
        tuple(
            SimulatedTurn(
                prompt=added,
                generated=len(call.sampled_ids),
                tool_seconds=max(0.0, until - call.ended_at),
            )
            for call, added, until in zip(calls, _added(calls), after, strict=True)
        ),
        start=max(0.0, calls[0].started_at - session.created_at),
    )


def _added(calls: Sequence[Call]) -> list[int]:
    """Return the number of tokens that the prompt of each call adds to the session's samples."""
    ends = {call.call_id: len(call.prompt_ids) + len(call.sampled_ids) for call in calls}
    added: list[int] = []
    for call in calls:
        before = ends.pop(call.parent_id or "", 0) if call.link is Link.EXTENDS else 0
        added.append(len(call.prompt_ids) - before)
    return added


def _measure_call(call: Call) -> CallTiming:
    began = call.first_token_at if call.first_token_at is not None else call.started_at
    return CallTiming(call.started_at, began, call.ended_at, len(call.sampled_ids))


def _empirical(values: Sequence[float]) -> DistributionConfig:
    kept = sorted(values)
    if len(kept) > MAX_VALUES:
        kept = kept[:: len(kept) // MAX_VALUES + 1]
    return DistributionConfig(values=[max(0.0, value) for value in kept])


def _warm(records: Sequence[Json]) -> Sequence[Json]:
    return records[WARM_UP:] or records


def fit_training(records: Sequence[Json]) -> tuple[float, float]:
    """Return (seconds of a step without tokens, seconds per token), fitted by least squares. The second value
    is 0 if the steps differ too little in size. If the backend reports how many tokens it computed, the fit
    is over these, so that common prefixes count once. The computed share is assumed to be the same in all
    steps."""
    used = _warm(records)
    seconds = np.array([record["train_seconds"] for record in used], float)
    sampled = np.array([record.get("sequence_tokens", 0) for record in used], float)
    tokens = np.array([_count_computed(record) for record in used], float)
    computed = float(tokens.sum() / sampled.sum()) if sampled.any() else 1.0
    if len(used) >= 4 and tokens.std() > 0.02 * tokens.mean() > 0:
        slope = float(np.cov(tokens, seconds)[0, 1] / tokens.var(ddof=1))
        base = float(seconds.mean() - slope * tokens.mean())
        if slope > 0 and base > 0:
            return base, slope * computed
    return float(seconds.mean()), 0.0


def _count_computed(record: Json) -> float:
    """Return the number of tokens that determines the time of a step."""
    return float(record.get("distinct_tokens", record.get("sequence_tokens", 0)))


def fit_speed(calls: Sequence[CallTiming], engines: int, max_batch: int) -> EngineSpeed:
    """Return the speed of an engine. The seconds per token are fitted as c + d · (concurrent replies - 1)
    over all calls, each with the mean number of replies that shared its engine."""
    used = [call for call in calls if call.tokens > 1 and call.ended > call.began]
    if not used:
        timed = [call for call in calls if call.ended > call.sent] or [CallTiming(0.0, 0.0, 1.0, 1)]
        used = [replace(call, began=call.sent) for call in timed]
    spans = np.array([(call.began, call.ended) for call in used])
    shared = _mean_concurrency(spans, spans) / engines
    tokens = np.array([max(1, call.tokens - 1) for call in used], float)
    seconds = np.array([call.ended - call.began for call in used])
    others = np.maximum(0.0, shared - 1)
    # seconds = c · tokens + d · tokens · others, so long replies count more.
    design = np.stack([tokens, tokens * others], axis=1)
    each, more = (float(value) for value in np.linalg.lstsq(design, seconds, rcond=None)[0])
    if more < 0 or each <= 0:
        each, more = float(seconds.sum() / tokens.sum()), 0.0
        # The calls do not show that sharing an engine slows a reply.
    sizes = [size for power in range(16) if (size := 2**power) < max_batch] + [max_batch]
    return EngineSpeed({size: size / (each + more * (size - 1)) for size in sizes})


def fit_latency(calls: Sequence[CallTiming], engines: int) -> tuple[DistributionConfig, float]:
    """Return (latencies of calls that are alone on their engine, relative increase per additional call),
    fitted over all calls, each with the mean number of calls in progress while it waited."""
    seconds = np.array([max(0.0, call.began - call.sent) for call in calls])
    within = np.array([(call.sent, call.began) for call in calls])
    concurrent = _mean_concurrency(np.array([(call.sent, call.ended) for call in calls]), within) / engines
    others = np.maximum(0.0, concurrent - 1)
    crowding = 0.0
    if others.std() > 0:
        more = float(np.cov(others, seconds)[0, 1] / others.var(ddof=1))
        alone = max(float(seconds.mean() - more * others.mean()), float(seconds.min()))
        if more > 0 and alone > 0:
            crowding = more / alone
    return _empirical((seconds / (1 + crowding * others)).tolist()), crowding


def _mean_concurrency(spans: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Return the mean number of ``spans`` in progress during each of the time ranges ``within``."""
    times = spans.T.ravel()
    order = np.argsort(times, kind="stable")
    change = np.repeat([1.0, -1.0], len(spans))[order]
    at = times[order]
    # The integral of the number of spans over time, at every change.
    integral = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:-1] * np.diff(at))])
    began, ended = within.T
    seconds = np.maximum(ended - began, 1e-9)
    return (np.interp(ended, at, integral) - np.interp(began, at, integral)) / seconds
