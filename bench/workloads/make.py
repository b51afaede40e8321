"""Write agents.jsonl: sessions with the published distribution of a coding agent's requests.

    python bench/workloads/make.py            # writes agents.jsonl next to this file, always the same

README.md in this folder lists the published figures and their sources. Every quantity of a turn is drawn
independently from a distribution through the published percentiles, linear between them on a logarithmic
scale; above the last percentile it extends to the value at which the published mean is met.
"""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path

SESSIONS = 2048
SEED = 20260630
DEADLINE = 900.0
"""The seconds after which a session ends, as it would in an RL run. In published batches of RL rollouts the
longest takes 20 times the median or more, which this deadline reproduces. The 99th percentile of the
published requests is 2634 s, three times as long: the lighter tail favours `mode: sync`."""
DECODE_SPEED = 40.2
"""The published tokens per second of the served models."""
TURNS = ((0.0, 1.0), (0.5, 3.0), (0.9, 19.0), (0.99, 71.0), (1.0, 150.0))
"""Steps per request: its published generation time (28.8 s, 222 s, 816 s) over that of a step; mean 8.4."""
GENERATED = ((0.0, 10.0), (0.5, 4.9 * DECODE_SPEED), (0.9, 20.2 * DECODE_SPEED), (0.99, 78.0 * DECODE_SPEED))
GENERATED_MEAN = 520.0
TOOL = ((0.0, 0.01), (0.5, 0.1), (0.9, 10.0), (0.99, 192.0))
TOOL_MEAN = 16.8
PROMPT = ((0.0, 20.0), (0.1, 137.0), (0.5, 652.0), (0.9, 4122.0))
PROMPT_MEAN = 1738.0

Points = tuple[tuple[float, float], ...]


def quantile(points: Points, share: float) -> float:
    for (low, a), (high, b) in pairwise(points):
        if share <= high:
            return math.exp(math.log(a) + (share - low) / (high - low) * math.log(b / a))
    return points[-1][1]


def mean(points: Points) -> float:
    return sum((high - low) * (b - a) / math.log(b / a) for (low, a), (high, b) in pairwise(points))


def with_mean(points: Points, target: float) -> Points:
    """Return the points with a last one that gives the distribution this mean."""
    low, high = points[-1][1] * 1.001, points[-1][1] * 1e4
    for _ in range(100):
        middle = math.sqrt(low * high)
        if mean((*points, (1.0, middle))) < target:
            low = middle
        else:
            high = middle
    return (*points, (1.0, low))


def make() -> list[list[tuple[int, int, float]]]:
    rng = random.Random(SEED)
    generated, tool = with_mean(GENERATED, GENERATED_MEAN), with_mean(TOOL, TOOL_MEAN)
    prompt = with_mean(PROMPT, PROMPT_MEAN)
    sessions: list[list[tuple[int, int, float]]] = []
    for _ in range(SESSIONS):
        turns: list[tuple[int, int, float]] = []
        seconds_left = DEADLINE
        for _ in range(max(1, round(quantile(TURNS, rng.random())))):
            tokens = max(1, round(quantile(generated, rng.random())))
            tool_seconds = quantile(tool, rng.random())
            prompt_tokens = round(quantile(prompt, rng.random()))
            seconds_left -= tokens / DECODE_SPEED
            if seconds_left <= 0:
                break
            turns.append((prompt_tokens, tokens, round(min(tool_seconds, seconds_left), 2)))
            seconds_left -= tool_seconds
            if seconds_left <= 0:
                break
        if turns:
            # A session does not wait for a tool after its last reply.
            turns[-1] = (turns[-1][0], turns[-1][1], 0.0)
            sessions.append(turns)
    return sessions


def main() -> None:
    lines = [json.dumps({"turns": turns}, separators=(",", ":")) for turns in make()]
    (Path(__file__).parent / "agents.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
