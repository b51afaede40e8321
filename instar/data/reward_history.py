"""The rewards of earlier live sessions, and the baselines that they give to later ones.

A baseline must not depend on the session that it is for, so only sessions that ended before the session
started count. With n earlier rewards of the session's kind of task and N of its agent, all in a window of the
agent's last `WINDOW_SIZE` rewards, the baseline is::

    mean_agent = (N · mean of the agent's rewards + k · middle of the reward range) / (N + k)
    baseline   = (n · mean of the kind's rewards + k · mean_agent) / (n + k)

The scale is the standard deviation of the agent's rewards, shrunk towards `PRIOR_STD` in the same way.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from instar.types import Json

PRIOR_COUNT = 4
"""k: the weight of a prior, as a number of rewards."""
PRIOR_STD = 0.5
"""The standard deviation of a reward that is 0 or 1 with equal probability."""
MIN_STD = 0.1
WINDOW_SIZE = 512
MAX_ADVANTAGE = 2.0

Observation = tuple[float, str, float]
"""The time at which a session ended, its kind and its reward."""


@dataclass(frozen=True, slots=True)
class LiveBaseline:
    mean: float
    std: float

    def compute_advantage(self, reward: float) -> float:
        return max(-MAX_ADVANTAGE, min(MAX_ADVANTAGE, (reward - self.mean) / self.std))


@dataclass
class RewardHistory:
    prior_mean: float
    """The middle of `gateway.reward_range`."""
    _by_agent: dict[str, list[Observation]] = field(default_factory=dict[str, list[Observation]])
    """The observations of each agent, ordered by time."""

    def add(self, agent_id: str, kind: str, ended_at: float, reward: float) -> None:
        observations = self._by_agent.setdefault(agent_id, [])
        insort(observations, (ended_at, kind, reward))
        del observations[:-WINDOW_SIZE]

    def estimate(self, agent_id: str, kind: str, started_at: float) -> LiveBaseline:
        earlier = [seen for seen in self._by_agent.get(agent_id, []) if seen[0] < started_at]
        rewards = [reward for _, _, reward in earlier]
        mean_agent = _shrink(rewards, self.prior_mean)
        mean = _shrink([reward for _, other, reward in earlier if other == kind], mean_agent)
        center = sum(rewards) / len(rewards) if rewards else 0.0
        variance = _shrink([(reward - center) ** 2 for reward in rewards], PRIOR_STD**2)
        return LiveBaseline(mean, max(MIN_STD, math.sqrt(variance)))

    def to_json(self) -> Json:
        return {agent_id: list(observations) for agent_id, observations in self._by_agent.items()}

    def load_json(self, state: Json) -> None:
        self._by_agent = {
            agent_id: [(float(ended_at), str(kind), float(reward)) for ended_at, kind, reward in rows]
            for agent_id, rows in cast(dict[str, list[Any]], state).items()
        }


def _shrink(values: Sequence[float], prior: float) -> float:
    return (sum(values) + PRIOR_COUNT * prior) / (len(values) + PRIOR_COUNT)
