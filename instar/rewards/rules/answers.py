"""Finds the answer in a session's final text, and the expected answers in a task."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Any, Generic, TypeVar, cast

from instar.config import Section, rules
from instar.errors import ScoreError
from instar.rewards.base import Scorer, Transcript
from instar.types import Json, Reward, RewardSource, Task

NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?\$?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?"
)
MINUS = "\N{MINUS SIGN}"
CODE_BLOCK = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE)
PLAIN_CHARACTERS = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {ord(MINUS): "-"}
"""Maps the code points of full-width characters and the minus sign to ASCII."""
SUPERSCRIPT = re.compile(r"(?<=[\w)])⁻?[⁰¹²³⁴-⁹]+")
VULGAR_FRACTION = re.compile(r"(?:(?<=\d) ?)?[¼-¾⅐-⅞]")
NUMBER_FORMATS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\w)–(?=[\d.])", "-"),
        (r"(?<=\d)(?:\{,\}|\\,|[\u00a0\u202f\u2009'’_])(?=\d{3}(?!\d))", ""),
        (r"(?<=\d)(?=\\[dt]?frac)", " "),
        (r"\\[dt]?frac(?:(\d)(\d)|\{(\d+)\}\{(\d+)\})", r"\1\3/\2\4"),
        (r"(?<=\d) ?[/⁄] ?(?=\d)", "/"),
        (r" ?(?:[×·*]|\\times|\\cdot) ?10(?:\^|\*\*)\{?([-+]?\d+)\}?", r"e\1"),
        (r"(?<![\w.])10(?:\^|\*\*)\{?([-+]?\d+)\}?", r"1e\1"),
    )
]
"""Replacements for dashes used as minus signs, thousands separators, LaTeX fractions, and powers of ten."""
MIXED_NUMBER = re.compile(r"(?<![\w.,/])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\d/])")
SPACED_NUMBER = re.compile(r"\W*\d{1,3}(?: \d{3})+(?:\.\d+)?\W*")
MAX_DETAIL_CHARS = 500
RULES_VERSION = "3"
"""Increment this when a code change may make any rule score the same answer differently."""

ComparisonConfig = rules.ExactRewardConfig | rules.NumericRewardConfig
WorkerConfig = rules.MathRewardConfig | rules.JsonSchemaRewardConfig | rules.RegexRewardConfig
SandboxedConfig = rules.CommandRewardConfig | rules.TestsRewardConfig
ConfigT = TypeVar("ConfigT", bound=ComparisonConfig | WorkerConfig | SandboxedConfig)


class AnswerRule(Scorer, Generic[ConfigT]):
    """A scorer that checks the final text of a session."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config
        self.name = config.name
        self.version = hash_settings(config)

    def build_rewards(self, transcript: Transcript, value: float, **detail: Any) -> list[Reward]:
        truncated: Json = {
            name: item[:MAX_DETAIL_CHARS] if isinstance(item, str) else item
            for name, item in detail.items()
            if item not in (None, "")
        }
        return [
            Reward(
                transcript.session_id,
                float(value),
                RewardSource.RULE,
                scorer=self.name,
                scorer_version=self.version,
                detail=truncated,
            )
        ]


def hash_settings(section: Section) -> str:
    settings = section.model_dump_json(exclude={"name"})
    return hashlib.sha256(f"{RULES_VERSION} {settings}".encode()).hexdigest()[:8]


def extract_answer(text: str, *, part: str = "whole", after: str | None = None) -> str | None:
    """Return a part of the text, or None if it is missing. Without a code block, `last_block` is the whole
    text. With ``after``, only the text after its last occurrence counts (None if it does not occur)."""
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
            blocks = CODE_BLOCK.findall(text)
            return blocks[-1][1] if blocks else text
        case _:
            return text


def simplify_characters(text: str) -> str:
    """Convert full-width characters, superscripts, fractions and minus signs to ASCII."""
    text = SUPERSCRIPT.sub(lambda match: "^" + unicodedata.normalize("NFKC", match[0]), text)
    text = VULGAR_FRACTION.sub(_replace_fraction, text)
    return text.translate(PLAIN_CHARACTERS)


def _replace_fraction(match: re.Match[str]) -> str:
    is_mixed = match.start() > 0 and match.string[match.start() - 1].isdigit()
    fraction = unicodedata.normalize("NFKC", match[0].strip()).replace("\N{FRACTION SLASH}", "/")
    return f" {fraction}" if is_mixed else fraction


def _convert_mixed_number(match: re.Match[str]) -> str:
    integer, numerator, denominator = map(int, match.groups())
    return f"{integer * denominator + numerator}/{denominator}" if numerator < denominator else match[0]


def find_last_number(text: str) -> str | None:
    """Return the last number in the text, in a format that `parse_number` accepts, or None."""
    text = simplify_characters(text)
    for pattern, replacement in NUMBER_FORMATS:
        text = pattern.sub(replacement, text)
    if SPACED_NUMBER.fullmatch(text):
        text = text.replace(" ", "")
    numbers = NUMBER.findall(MIXED_NUMBER.sub(_convert_mixed_number, text))
    return numbers[-1] if numbers else None


def parse_number(text: str) -> float | None:
    """Parse a number such as ``1,234.5``, ``$3``, ``2/3`` or ``1e-3``. Return None for other text."""
    numerator, _, denominator = text.replace(",", "").replace("$", "").replace(MINUS, "-").partition("/")
    try:
        return float(numerator) / (float(denominator) if denominator else 1.0)
    except (ValueError, ZeroDivisionError):
        return None


def get_task_field(task: Task, path: str) -> Any:
    """Return the task field at ``path``, such as ``a`` or ``a.b``. Raises ScoreError if it is missing."""
    value: Any = task.data
    for name in [path] if path in task.data else path.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(task.data) or "none"
            raise ScoreError(f"task {task.task_id!r} has no field {path!r}; its fields are: {known}")
        value = cast(Json, value)[name]
    return value


def get_expected_answers(task: Task, path: str, after: str | None = None) -> list[str]:
    """Return the expected answers in the task field ``path`` as strings. If ``after`` is set, only the text
    after its last occurrence counts, or the whole text if it does not occur."""
    value = get_task_field(task, path)
    answers = [str(item) for item in (cast(list[Any], value) if isinstance(value, list) else [value])]
    return [text.rpartition(after)[2] for text in answers] if after is not None else answers
