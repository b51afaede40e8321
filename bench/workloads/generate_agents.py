"""Generate agents.jsonl: sessions with the published request distribution of coding agents.

    python bench/workloads/generate_agents.py      # deterministic; writes agents.jsonl next to this file

README.md in this folder lists the published data and its sources. Every quantity of a turn is drawn
independently from a distribution with the published percentiles. Between the percentiles, values are
interpolated linearly on a logarithmic scale. The maximum is chosen so that the distribution has the published
mean.
"""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path

SESSION_COUNT = 2048
SEED = 20260630
TIME_LIMIT_SECONDS = 900.0
"""A session ends after this time, as it would in an RL run. In published batches of RL rollouts, the
longest takes at least 20 times as long as the median, which this limit reproduces. The 99th percentile of the
published requests is three times as high (2634 s); the lighter tail favours `mode: sync`."""
DECODE_SPEED = 40.2
"""The published decode speed of the served models, in tokens per second."""
TURNS_PER_SESSION = ((0.0, 1.0), (0.5, 3.0), (0.9, 19.0), (0.99, 71.0), (1.0, 150.0))
"""Quantiles of the turns per session (mean 8.4), estimated as the published generation time per request
(28.8 s, 222 s, 816 s) divided by the generation time per step."""
GENERATED_TOKENS = (
    (0.0, 10.0),
    (0.5, 4.9 * DECODE_SPEED),
    (0.9, 20.2 * DECODE_SPEED),
    (0.99, 78.0 * DECODE_SPEED),
)
GENERATED_TOKENS_MEAN = 520.0
TOOL_SECONDS = ((0.0, 0.01), (0.5, 0.1), (0.9, 10.0), (0.99, 192.0))
TOOL_SECONDS_MEAN = 16.8
PROMPT_TOKENS = ((0.0, 20.0), (0.1, 137.0), (0.5, 652.0), (0.9, 4122.0))
PROMPT_TOKENS_MEAN = 1738.0

Quantiles = tuple[tuple[float, float], ...]
"""(probability, value) pairs in ascending order."""


def compute_quantile(quantiles: Quantiles, probability: float) -> float:
    for (low, a), (high, b) in pairwise(quantiles):
        if probability <= high:
            return math.exp(math.log(a) + (probability - low) / (high - low) * math.log(b / a))
    return quantiles[-1][1]


def compute_mean(quantiles: Quantiles) -> float:
    return sum((high - low) * (b - a) / math.log(b / a) for (low, a), (high, b) in pairwise(quantiles))


def extend_to_mean(quantiles: Quantiles, target: float) -> Quantiles:
    """Return the quantiles with a maximum (probability 1) that gives the distribution the mean ``target``."""
    low, high = quantiles[-1][1] * 1.001, quantiles[-1][1] * 1e4
    for _ in range(100):
        middle = math.sqrt(low * high)
        if compute_mean((*quantiles, (1.0, middle))) < target:
            low = middle
        else:
            high = middle
    return (*quantiles, (1.0, low))


def generate_sessions() -> list[list[tuple[int, int, float]]]:
    """Return the turns of each session as (prompt tokens, generated tokens, tool seconds)."""
    rng = random.Random(SEED)
    generated = extend_to_mean(GENERATED_TOKENS, GENERATED_TOKENS_MEAN)
    tool = extend_to_mean(TOOL_SECONDS, TOOL_SECONDS_MEAN)
    prompt = extend_to_mean(PROMPT_TOKENS, PROMPT_TOKENS_MEAN)
    sessions: list[list[tuple[int, int, float]]] = []
    for _ in range(SESSION_COUNT):
        turns: list[tuple[int, int, float]] = []
        seconds_left = TIME_LIMIT_SECONDS
        for _ in range(max(1, round(compute_quantile(TURNS_PER_SESSION, rng.random())))):
            tokens = max(1, round(compute_quantile(generated, rng.random())))
            tool_seconds = compute_quantile(tool, rng.random())
            prompt_tokens = round(compute_quantile(prompt, rng.random()))
            seconds_left -= tokens / DECODE_SPEED
            if seconds_left <= 0:
                break
            turns.append((prompt_tokens, tokens, round(min(tool_seconds, seconds_left), 2)))
            seconds_left -= tool_seconds
            if seconds_left <= 0:
                break
        if turns:
            # There is no tool call after the last reply.
            turns[-1] = (turns[-1][0], turns[-1][1], 0.0)
            sessions.append(turns)
    return sessions


def main() -> None:
    lines = [json.dumps({"turns": turns}, separators=(",", ":")) for turns in generate_sessions()]
    (Path(__file__).parent / "agents.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
