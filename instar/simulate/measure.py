"""Measures the workload of a finished run from its store and its metrics."""

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
MAX_DISTRIBUTION_VALUES = 5000
WARM_UP_STEPS = 1
"""Number of initial steps to exclude from the trainer's timings: they compile, allocate and fill caches."""


@dataclass(frozen=True, slots=True)
class CallTiming:
    sent_at: float
    first_token_at: float
    ended_at: float
    tokens: int
    """Number of sampled tokens."""


async def measure(
    store: Store, run_id: str, records: Sequence[Json], *, engines: int, max_batch: int
) -> Workload:
    """Measure a run with ``engines`` engines: its completed sessions, the fraction that failed, and fits of
    the latency, the step duration and the engine speed (up to ``max_batch`` replies). ``records`` are the
    steps in metrics.jsonl. Raises ConfigError if the run has no completed sessions or no training steps."""
    rows = await store.sessions(run_id, channel=Channel.TRAIN, limit=MAX_SESSIONS)
    ended = [
        row.session for row in rows if row.session.status in (SessionStatus.COMPLETED, SessionStatus.FAILED)
    ]
    sessions: list[SimulatedSession] = []
    timings: list[CallTiming] = []
    for session in ended:
        calls = [call for call in await store.calls(session.session_id) if len(call.sampled_ids)]
        for call in calls:
            first_token_at = call.started_at if call.first_token_at is None else call.first_token_at
            timings.append(CallTiming(call.started_at, first_token_at, call.ended_at, len(call.sampled_ids)))
        if calls and session.status is SessionStatus.COMPLETED:
            sessions.append(to_simulated_session(session, calls))
    if not sessions or not records:
        raise ConfigError(
            f"Run {run_id} cannot be measured: it has {len(sessions)} completed sessions and {len(records)} "
            "training steps, but at least one of each is required."
        )
    failed = sum(session.status is SessionStatus.FAILED for session in ended)
    base, per_token = fit_training(records)
    latency, growth = fit_latency(timings, engines)
    publish_seconds = [record["step_seconds"] - record["train_seconds"] for record in _skip_warm_up(records)]
    groups = sum(record.get("groups", 0) for record in records)
    return Workload(
        sessions=sessions,
        latency=latency,
        latency_growth_per_call=growth,
        speed=fit_speed(timings, engines, max_batch),
        train_base=base,
        train_per_token=per_token,
        publish_seconds=_to_distribution(publish_seconds),
        failures=failed / len(ended),
        zero_signal=sum(record.get("zero_signal", 0) for record in records) / max(1, groups),
    )


def to_simulated_session(session: RecordedSession, calls: Sequence[Call]) -> SimulatedSession:
    """Convert a recorded session. Concurrent calls become turns without a wait. A call starts a new sample
    unless it is the first call that continues another one."""
    lengths = {call.call_id: len(call.prompt_ids) + len(call.sampled_ids) for call in calls}
    next_starts = [call.started_at for call in calls[1:]] + [session.ended_at or calls[-1].ended_at]
    turns: list[SimulatedTurn] = []
    for call, next_start in zip(calls, next_starts, strict=True):
        continued = lengths.pop(call.parent_id or "", 0) if call.link is Link.EXTENDS else 0
        tool_seconds = max(0.0, next_start - call.ended_at)
        turns.append(SimulatedTurn(len(call.prompt_ids) - continued, len(call.sampled_ids), tool_seconds))
    return SimulatedSession(tuple(turns), max(0.0, calls[0].started_at - session.created_at))


def _to_distribution(values: Sequence[float]) -> DistributionConfig:
    step = 1 if len(values) <= MAX_DISTRIBUTION_VALUES else len(values) // MAX_DISTRIBUTION_VALUES + 1
    return DistributionConfig(values=[max(0.0, value) for value in sorted(values)[::step]])


def _skip_warm_up(records: Sequence[Json]) -> Sequence[Json]:
    return records[WARM_UP_STEPS:] or records


def fit_training(records: Sequence[Json]) -> tuple[float, float]:
    """Fit the seconds of a step without tokens and the seconds per token, by least squares.

    If there are fewer than 4 steps, their sizes differ too little, or a fitted value is not positive, return
    the mean seconds of a step and 0. If the backend reports the number of distinct tokens, the fit uses it,
    so that shared prefixes count once. The ratio of distinct to all tokens is assumed to be constant.
    """
    steps = _skip_warm_up(records)
    seconds = np.array([record["train_seconds"] for record in steps], float)
    sequence_tokens = np.array([record.get("sequence_tokens", 0) for record in steps], float)
    distinct = [record.get("distinct_tokens", record.get("sequence_tokens", 0)) for record in steps]
    tokens = np.array(distinct, float)
    distinct_ratio = float(tokens.sum() / sequence_tokens.sum()) if sequence_tokens.any() else 1.0
    if len(steps) >= 4 and tokens.std() > 0.02 * tokens.mean() > 0:
        slope = float(np.cov(tokens, seconds)[0, 1] / tokens.var(ddof=1))
        base = float(seconds.mean() - slope * tokens.mean())
        if slope > 0 and base > 0:
            return base, slope * distinct_ratio
    return float(seconds.mean()), 0.0


def fit_speed(calls: Sequence[CallTiming], engines: int, max_batch: int) -> EngineSpeed:
    """Fit the speed of an engine: seconds per token = alone + increase · (concurrent replies - 1). The
    concurrency of a call is the mean number of replies per engine during the call."""
    used = [call for call in calls if call.tokens > 1 and call.ended_at > call.first_token_at]
    if not used:
        # If no call has a duration either, assume one token per second.
        timed = [call for call in calls if call.ended_at > call.sent_at] or [CallTiming(0.0, 0.0, 1.0, 1)]
        used = [replace(call, first_token_at=call.sent_at) for call in timed]
    spans = np.array([(call.first_token_at, call.ended_at) for call in used])
    tokens = np.array([max(1, call.tokens - 1) for call in used], float)
    seconds = np.array([call.ended_at - call.first_token_at for call in used])
    others = np.maximum(0.0, _compute_mean_concurrency(spans, spans) / engines - 1)
    # seconds = alone · tokens + increase · tokens · others, so long replies count more.
    design = np.stack([tokens, tokens * others], axis=1)
    alone, increase = (float(value) for value in np.linalg.lstsq(design, seconds, rcond=None)[0])
    if increase < 0 or alone <= 0:  # in this data, sharing an engine does not slow replies down
        alone, increase = float(seconds.sum() / tokens.sum()), 0.0
    sizes = [size for power in range(16) if (size := 2**power) < max_batch] + [max_batch]
    return EngineSpeed({size: size / (alone + increase * (size - 1)) for size in sizes})


def fit_latency(calls: Sequence[CallTiming], engines: int) -> tuple[DistributionConfig, float]:
    """Fit the latencies of calls that are alone on their engine, and the relative increase per additional
    call. The concurrency of a call is the mean number of calls per engine while it waited."""
    seconds = np.array([max(0.0, call.first_token_at - call.sent_at) for call in calls])
    waits = np.array([(call.sent_at, call.first_token_at) for call in calls])
    spans = np.array([(call.sent_at, call.ended_at) for call in calls])
    others = np.maximum(0.0, _compute_mean_concurrency(spans, waits) / engines - 1)
    growth = 0.0
    if others.std() > 0:
        increase = float(np.cov(others, seconds)[0, 1] / others.var(ddof=1))
        alone = max(float(seconds.mean() - increase * others.mean()), float(seconds.min()))
        if increase > 0 and alone > 0:
            growth = increase / alone
    return _to_distribution((seconds / (1 + growth * others)).tolist()), growth


def _compute_mean_concurrency(spans: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Return the mean number of ``spans`` in progress during each time range in ``ranges``."""
    times = spans.T.ravel()
    order = np.argsort(times, kind="stable")
    times, changes = times[order], np.repeat([1.0, -1.0], len(spans))[order]
    # The integral of the number of spans over time, at every change.
    integral = np.concatenate([[0.0], np.cumsum(np.cumsum(changes)[:-1] * np.diff(times))])
    starts, ends = ranges.T
    seconds = np.maximum(ends - starts, 1e-9)
    return (np.interp(ends, times, integral) - np.interp(starts, times, integral)) / seconds
