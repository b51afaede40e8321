"""Simulated sessions: the token counts of their calls and the waits between the calls."""

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
    prompt_tokens: int
    """Number of tokens that the prompt adds to the trained samples. Where the session branches, this is the
    length of the complete prompt, because both samples contain the preceding tokens."""
    generated_tokens: int
    tool_seconds: float
    """Seconds until the next call or the end of the session."""

    @property
    def tokens_after_first(self) -> int:
        """Number of generated tokens except the first one, which the latency accounts for."""
        return max(0, self.generated_tokens - 1)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class SimulatedSession:
    turns: tuple[SimulatedTurn, ...]
    start_seconds: float = 0.0
    """Seconds from the start of the session to its first call."""

    @property
    def tokens(self) -> int:
        return self.count_tokens(len(self.turns))

    def count_tokens(self, replies: int) -> int:
        """Return the number of tokens in the session's samples if it ends after ``replies`` replies."""
        return sum(turn.tokens for turn in self.turns[:replies])


def make_draw(config: DistributionConfig, rng: random.Random) -> DrawValue:
    if config.value is not None:
        value = config.value
        return lambda: value
    if config.values is not None:
        values = config.values
        return lambda: rng.choice(values)
    assert config.median is not None
    mu, sigma, maximum = math.log(config.median), config.sigma, config.max or math.inf
    return lambda: min(maximum, rng.lognormvariate(mu, sigma))


def compute_mean(config: DistributionConfig) -> float:
    if config.value is not None:
        return config.value
    if config.values is not None:
        return sum(config.values) / len(config.values)
    assert config.median is not None
    mu, sigma, maximum = math.log(config.median), config.sigma, config.max or math.inf
    if sigma == 0:
        return min(config.median, maximum)
    mean = config.median * math.exp(sigma**2 / 2)
    if maximum == math.inf:
        return mean
    cdf = NormalDist(mu, sigma).cdf
    # The mean of the values below the maximum, plus the maximum for all values above it.
    return mean * cdf(math.log(maximum) - sigma**2) + maximum * (1 - cdf(math.log(maximum)))


def draw_sessions(config: SimulateConfig, rng: random.Random, count: int) -> list[SimulatedSession]:
    draw_turns, draw_start = make_draw(config.turns, rng), make_draw(config.start_seconds, rng)
    draw_prompt, draw_generated = make_draw(config.prompt, rng), make_draw(config.generated, rng)
    draw_tool_seconds = make_draw(config.tool_seconds, rng)
    return [
        SimulatedSession(
            tuple(
                SimulatedTurn(round(draw_prompt()), max(1, round(draw_generated())), draw_tool_seconds())
                for _ in range(max(1, round(draw_turns())))
            ),
            draw_start(),
        )
        for _ in range(count)
    ]


def read_workload(path: Path) -> list[SimulatedSession]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    sessions = [
        _parse_session(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not sessions:
        raise ConfigError(f"{path} contains no sessions; expected one JSON object per line")
    return sessions


def _parse_session(line: str, location: str) -> SimulatedSession:
    try:
        fields: Any = json.loads(line)
        turns = cast(Sequence[Sequence[float]], fields["turns"])
        session = SimulatedSession(
            tuple(
                SimulatedTurn(int(prompt), int(generated), float(tool)) for prompt, generated, tool in turns
            ),
            float(fields.get("start", 0.0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        example = '{"turns": [[prompt tokens, generated tokens, tool seconds], ...]}'
        raise ConfigError(f"{location}: {line!r:.50} is not a session; expected {example}") from error
    if not session.turns:
        raise ConfigError(f"{location}: the session has no turns")
    for number, turn in enumerate(session.turns, 1):
        if not (turn.prompt_tokens >= 0 and turn.generated_tokens >= 1 and turn.tool_seconds >= 0):
            raise ConfigError(
                f"{location}: turn {number} must have at least 1 generated token and no negative numbers, "
                f"got {list(turn)}"
            )
    return session


def write_workload(path: Path, sessions: Sequence[SimulatedSession]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for session in sessions:
            turns = [(prompt, generated, round(seconds, 4)) for prompt, generated, seconds in session.turns]
            start = {"start": round(session.start_seconds, 4)} if session.start_seconds else {}
            file.write(json.dumps({**start, "turns": turns}, separators=(",", ":")) + "\n")
