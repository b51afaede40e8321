"""The rule with which the owner of the resampled agent scores replies, in the run's own processes.

It makes the same mistakes as the users, and is inverted in the same week.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

from instar.rewards.base import Transcript
from live_parts.schedule import DAY_SECONDS, START
from live_parts.users import PREFERENCES, RESAMPLED_AGENT, WRONG_RATINGS, Phase

WEEKS_ENV, DAYS_PER_WEEK_ENV = "LIVE_BENCH_WEEKS", "LIVE_BENCH_DAYS_PER_WEEK"


def score(task: dict[str, Any], transcript: Transcript) -> float:
    del task  # a live session has no task
    text = transcript.final_text
    is_mistaken = random.Random(text).random() < WRONG_RATINGS
    is_inverted = find_phase(time.time()) is Phase.INVERTED
    return float(PREFERENCES[RESAMPLED_AGENT].is_satisfied(text) ^ is_mistaken ^ is_inverted)


def find_phase(timestamp: float) -> Phase:
    weeks = [Phase(week) for week in os.environ[WEEKS_ENV].split(",")]
    week = int((timestamp - START) / DAY_SECONDS) // int(os.environ[DAYS_PER_WEEK_ENV])
    return weeks[max(0, min(week, len(weeks) - 1))]
