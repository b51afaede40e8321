"""Finds signs in a run's metrics that training goes wrong, and says what to try."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from instar.trainer.monitor import MetricsReader
from instar.types import Json

WINDOW = 8
"""The number of steps over which metrics are averaged."""
MAX_WITHOUT_SIGNAL = 0.8
MAX_IDENTICAL = 0.8
MIN_SOLVED = 0.9
"""A policy has solved its tasks if its mean reward reaches this fraction of the range of rewards so far."""
MIN_IMPROVEMENT = 0.02
"""A policy still learns if its mean reward rises by this fraction of the range within a window."""
MIN_ENTROPY_RATIO = 0.1
MAX_LENGTH_RATIO = 2.5
MAX_REPETITION = 0.5
MIN_REPETITION_INCREASE = 0.3
MAX_KL = 0.1
MAX_SCORE_DROP = 0.15
REWARD_ALARMS = frozenset({"collapse", "no_signal", "entropy"})
"""The alarms that are not raised while the policy has solved its tasks or its rewards rise."""


@dataclass(frozen=True, slots=True)
class Alarm:
    name: str
    text: str
    is_collapse: bool = False
    """True if the policy got worse or no longer learns, so that `trainer.on_collapse` applies."""


@dataclass
class RunningRange:
    low: float = math.inf
    high: float = -math.inf
    last: float = math.nan

    def add(self, value: float) -> None:
        self.low, self.high, self.last = min(self.low, value), max(self.high, value), value


class AlarmDetector:
    """Checks the metrics of a run's policy, which it reads from metrics.jsonl. ``agent`` is the agent of the
    policy, or None if the policy is that of all agents."""

    def __init__(self, run_dir: Path, agent: str | None = None) -> None:
        self._reader = MetricsReader(run_dir)
        self._agent = agent
        self._first: list[Json] = []
        self._previous: deque[Json] = deque(maxlen=WINDOW)
        """The steps before the recent ones."""
        self._recent: deque[Json] = deque(maxlen=WINDOW)
        self._rewards = RunningRange()
        self._scores: dict[str, RunningRange] = {}
        """The held-out scores by evaluation mode."""
        self._active: set[str] = set()

    @property
    def recent_reward(self) -> float | None:
        """The mean reward of the last WINDOW steps, or None if there are fewer steps."""
        return _average(self._recent, "reward_mean") if len(self._recent) == WINDOW else None

    def check(self) -> list[Alarm]:
        """Read the new records and return the alarms that were not active at the previous call."""
        for record in self._reader.read_new():
            if record.get("agent") == self._agent:
                self._add(record)
        alarms = list(self._find())
        new = [alarm for alarm in alarms if alarm.name not in self._active]
        # Noise can make rewards seem to rise, which must not end an alarm and raise it again.
        held = self._active & REWARD_ALARMS if self._is_improving() else set[str]()
        self._active = {alarm.name for alarm in alarms} | held
        if "collapse" in self._active:  # not reported again under the other name while it ends gradually
            self._active.add("no_signal")
        return new

    def _add(self, record: Json) -> None:
        if "rewound_to" in record:  # the records so far describe weights that are no longer used
            self._previous.clear()
            self._recent.clear()
            self._scores.clear()
        elif record["kind"] == "train":
            # A step that is trained again after a crash is recorded again.
            for steps in (self._recent, self._previous):
                while steps and steps[-1]["step"] >= record["step"]:
                    steps.pop()
            if len(self._recent) == WINDOW:
                self._previous.append(self._recent[0])
            self._recent.append(record)
            if len(self._first) < WINDOW:
                self._first = [step for step in self._first if step["step"] < record["step"]] + [record]
            if record.get("reward_mean") is not None:
                self._rewards.add(float(record["reward_mean"]))
        elif record["kind"] == "eval":
            self._scores.setdefault(record["mode"], RunningRange()).add(float(record["accuracy"]))

    def _find(self) -> Iterator[Alarm]:
        yield from self._check_scores()
        first, recent = self._first, self._recent
        if len(recent) < WINDOW or recent[0]["step"] <= first[-1]["step"]:
            return
        if not (self._is_solved() or self._is_improving()):
            yield from _check_reward_alarms(first, recent)
        yield from _check_outputs(first, recent)
        yield from _check_logprobs(recent)

    def _is_solved(self) -> bool:
        """Return True if nearly all recent sessions got the highest reward."""
        low, high, reward = self._rewards.low, self._rewards.high, self.recent_reward
        return reward is not None and low < high and reward >= low + MIN_SOLVED * (high - low)

    def _is_improving(self) -> bool:
        low, high, reward = self._rewards.low, self._rewards.high, self.recent_reward
        previous = _average(self._previous, "reward_mean")
        if reward is None or previous is None or high <= low:
            return False
        return reward >= previous + MIN_IMPROVEMENT * (high - low)

    def _check_scores(self) -> Iterator[Alarm]:
        for mode, scores in self._scores.items():
            if scores.high - scores.last > MAX_SCORE_DROP:
                yield Alarm(
                    f"held_out_{mode}",
                    f"the held-out score ({mode}) fell from {scores.high:.2f} to {scores.last:.2f}. "
                    "The policy gets worse at tasks that it is not trained on; lower trainer.adam.lr, or "
                    "check whether the reward can be gained without solving the task.",
                    is_collapse=True,
                )


def _check_reward_alarms(first: Iterable[Json], recent: Iterable[Json]) -> Iterator[Alarm]:
    """Yield the alarms in `REWARD_ALARMS`."""
    groups = sum(_get_values(recent, "groups"))
    without_signal = sum(_get_values(recent, "zero_signal")) / groups if groups else 0.0
    identical = _average(recent, "identical_share") or 0.0
    if without_signal >= MAX_WITHOUT_SIGNAL and identical >= MAX_IDENTICAL:
        yield Alarm(
            "collapse",
            f"in the last {WINDOW} steps, {identical:.0%} of the outputs were identical to another output of "
            f"their group, and {without_signal:.0%} of the groups had no signal. The policy gives the same "
            "answers again and again and no longer learns; lower trainer.adam.lr, or raise "
            "trainer.groups_per_step or the sampling temperature.",
            is_collapse=True,
        )
    elif without_signal >= MAX_WITHOUT_SIGNAL:
        yield Alarm(
            "no_signal",
            f"in the last {WINDOW} steps, all sessions got the same reward in {without_signal:.0%} of the "
            "groups, so these taught nothing. Use easier or harder tasks, a larger rollout.group_size, or a "
            "reward with more levels.",
        )
    before, now = _average(first, "entropy"), _average(recent, "entropy")
    if before and now is not None and now < MIN_ENTROPY_RATIO * before:
        yield Alarm(
            "entropy",
            f"the entropy of the sampled tokens fell from {before:.3f} to {now:.3f} nats, so the policy "
            "hardly explores. Lower trainer.adam.lr or raise the sampling temperature.",
        )


def _check_outputs(first: Iterable[Json], recent: Iterable[Json]) -> Iterator[Alarm]:
    before, now = _average(first, "output_tokens_mean"), _average(recent, "output_tokens_mean")
    if before and now and now > MAX_LENGTH_RATIO * before:
        yield Alarm(
            "length",
            f"the outputs grew from {before:.0f} to {now:.0f} tokens. Check whether the reward favors long "
            "outputs, and limit rollout.sampling.max_tokens.",
        )
    before, now = _average(first, "output_repetition"), _average(recent, "output_repetition")
    if now is not None and now > max(MAX_REPETITION, (before or 0.0) + MIN_REPETITION_INCREASE):
        yield Alarm(
            "repetition",
            f"{now:.0%} of the word sequences in the outputs repeat earlier ones. Check whether the reward "
            "favors repetition, and lower trainer.adam.lr.",
        )


def _check_logprobs(recent: Iterable[Json]) -> Iterator[Alarm]:
    kl = _average(recent, "kl")
    if kl is not None and abs(kl) > MAX_KL:
        yield Alarm(
            "logprobs",
            f"the logprobs of the trainer and the engine differ (KL {kl:.2f}). Check that both use the same "
            "model, precision and chat template, lower trainer.max_staleness, or set "
            "trainer.off_policy.proximal to recompute.",
        )


def _average(steps: Iterable[Json], name: str) -> float | None:
    values = _get_values(steps, name)
    return fmean(values) if values else None


def _get_values(steps: Iterable[Json], name: str) -> list[float]:
    values: list[Any] = [step.get(name) for step in steps]
    return [float(value) for value in values if value is not None]
