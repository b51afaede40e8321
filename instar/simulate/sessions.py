"""What a simulated session does: calls of given lengths, and waits between them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, cast

from instar.config import DistributionConfig, SimulateConfig
from instar.errors import ConfigError

DrawValue = Callable[[], float]


class SimulatedTurn(NamedTuple):
    prompt: int
    """Tokens that the call's prompt adds to what is trained on; all of it where a session branches, for what
    goes before is in both samples then."""
    generated: int
    tool_seconds: float
    """Seconds until the next call, or the session's end."""

    @property
    def tokens_after_first(self) -> int:
        """Tokens behind the first, which is there when the call's latency is over."""
        return max(0, self.generated - 1)

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated


@dataclass(frozen=True, slots=True)
class SimulatedSession:
    turns: tuple[SimulatedTurn, ...]
    start: float = 0.0
    """Seconds before the first call."""

    @property
    def generated(self) -> int:
        return sum(turn.generated for turn in self.turns)

    @property
    def wait_seconds(self) -> float:
        return self.start + sum(turn.tool_seconds for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Of its samples: prompts and replies."""
        return self.count_tokens(len(self.turns))

    def count_tokens(self, replies: int) -> int:
        """When it has ended after so many of them."""
        return sum(turn.tokens for turn in self.turns[:replies])


def make_draw(config: DistributionConfig, rng: random.Random) -> DrawValue:
    """Draws from the distribution, one value a call."""
    if config.value is not None:
        value = config.value
        return lambda: value
    if config.values is not None:
        values = config.values
        return lambda: rng.choice(values)
    assert config.median is not None
    mu, sigma, most = math.log(config.median), config.sigma, config.most or math.inf
    return lambda: min(most, rng.lognormvariate(mu, sigma))


def distribution_mean(config: DistributionConfig) -> float:
    if config.value is not None:
        return config.value
    if config.values is not None:
        return sum(config.values) / len(config.values)
    assert config.median is not None
    mu, sigma, most = math.log(config.median), config.sigma, config.most or math.inf
    if sigma == 0:
        return min(config.median, most)
    whole = config.median * math.exp(sigma**2 / 2)
    if most == math.inf:
        return whole
    below = NormalDist(mu, sigma).cdf
    # The mean of what is below the cut, and the cut itself for all that is above.
    return whole * below(math.log(most) - sigma**2) + most * (1 - below(math.log(most)))


def draw_sessions(config: SimulateConfig, rng: random.Random, count: int) -> list[SimulatedSession]:
    """Sessions whose every turn is drawn for itself."""
    turns, prompt, generated, tool, start = (
        make_draw(given, rng)
        for given in (config.turns, config.prompt, config.generated, config.tool, config.start)
    )
    return [
        SimulatedSession(
            tuple(
                SimulatedTurn(round(prompt()), max(1, round(generated())), tool())
                for _ in range(max(1, round(turns())))
            ),
            start(),
        )
        for _ in range(count)
    ]


def read_workload(path: Path) -> list[SimulatedSession]:
    """The sessions of a workload file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    sessions = [
        _parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not sessions:
        raise ConfigError(f"{path}: no session in it")
    return sessions


def _parse(line: str, where: str) -> SimulatedSession:
    try:
        given: Any = json.loads(line)
        turns = cast(Sequence[Sequence[float]], given["turns"])
        session = SimulatedSession(
            tuple(
                SimulatedTurn(int(prompt), int(generated), float(tool)) for prompt, generated, tool in turns
            ),
            float(given.get("start", 0.0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f'{where}: expected {{"turns": [[prompt, generated, tool], ...]}}') from error
    if not session.turns or any(t.prompt < 0 or t.generated < 1 or t.tool_seconds < 0 for t in session.turns):
        raise ConfigError(f"{where}: a session has turns, each of 1 token or more, and no negative number")
    return session


def write_workload(path: Path, sessions: Sequence[SimulatedSession]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for session in sessions:
            turns = [[turn.prompt, turn.generated, round(turn.tool_seconds, 4)] for turn in session.turns]
            start = {"start": round(session.start, 4)} if session.start else {}
            file.write(json.dumps({**start, "turns": turns}, separators=(",", ":")) + "\n")
