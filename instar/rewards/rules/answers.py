"""What a rule compares: the answer in a final text, and what the task expects."""

from __future__ import annotations

import hashlib
import re
from typing import Any, cast

from instar.config import Section
from instar.errors import ScoreError
from instar.rewards.base import Scorer, Transcript
from instar.types import Json, Reward, RewardSource, Task

NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?\$?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?"
)
MINUS = "\N{MINUS SIGN}"
BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
MAX_DETAIL_CHARS = 500
"""Most characters of an answer that are kept with its reward."""
RULES_VERSION = "2"
"""Of all rules here; changes when one of them might give the same answer another score."""


class AnswerRule(Scorer):
    """A scorer of source RULE. ``part`` and ``after`` of its section say where the answer is."""

    def __init__(self, section: Any) -> None:
        self.name = section.name
        self.version = settings_version(section)

    def reward(self, transcript: Transcript, value: float, **detail: Any) -> list[Reward]:
        shown: Json = {
            name: word[:MAX_DETAIL_CHARS] if isinstance(word, str) else word
            for name, word in detail.items()
            if word not in (None, "")
        }
        return [
            Reward(
                transcript.session_id,
                float(value),
                RewardSource.RULE,
                scorer=self.name,
                scorer_version=self.version,
                detail=shown,
            )
        ]


def settings_version(section: Section) -> str:
    settings = section.model_dump_json(exclude={"name"})
    return hashlib.sha256(f"{RULES_VERSION} {settings}".encode()).hexdigest()[:8]


def extract_answer(text: str, *, part: str = "whole", after: str | None = None) -> str | None:
    """The answer; None where the text has none."""
    if after is not None:
        _, marker, text = text.rpartition(after)
        if not marker:
            return None
    match part:
        case "last_line":
            lines = [line for line in text.splitlines() if line.strip()]
            return lines[-1] if lines else None
        case "last_number":
            return find_last_number(text)
        case "last_block":
            blocks = BLOCK.findall(text)
            return blocks[-1] if blocks else text
        case _:
            return text


def find_last_number(text: str) -> str | None:
    """As ASCII, whichever minus stands before it."""
    found = NUMBER.findall(text.replace(MINUS, "-"))
    return found[-1] if found else None


def parse_number(word: str) -> float | None:
    """``1,234.5``, ``$3``, ``2/3``, ``1e-3``."""
    above, _, below = word.replace(",", "").replace("$", "").replace(MINUS, "-").partition("/")
    try:
        return float(above) / (float(below) if below else 1.0)
    except (ValueError, ZeroDivisionError):
        return None


def get_task_field(task: Task, path: str) -> Any:
    """The task's field; ``a.b`` is field ``b`` of field ``a``."""
    value: Any = task.data
    for name in [path] if path in task.data else path.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(task.data) or "none"
            raise ScoreError(f"task {task.task_id!r} has no field {path!r}; it has {known}")
        value = cast(Json, value)[name]
    return value


def get_expected_answers(task: Task, path: str, after: str | None = None) -> list[str]:
    """Every right answer, as text."""
    value = get_task_field(task, path)
    right = [str(item) for item in (cast(list[Any], value) if isinstance(value, list) else [value])]
    return [text.rpartition(after)[2] for text in right] if after is not None else right
