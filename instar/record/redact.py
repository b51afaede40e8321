"""Secrets are cut out of what is stored.

Each kind of secret has a mark that its text must hold; a text without any is not searched further, so that
looking for secrets costs next to nothing where there are none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from instar.config import RedactConfig
from instar.errors import ConfigError
from instar.types import Json, Message, Tool, ToolCall

_NOT_IN_WORD = r"(?<![A-Za-z0-9_-])"


@dataclass(frozen=True, slots=True)
class SecretPattern:
    name: str
    markers: tuple[str, ...]
    """One of these begins it."""
    rare_character: str
    """A rarer character that it holds, looked for first; empty where there is none."""
    pattern: re.Pattern[str]

    def replacement(self, match: re.Match[str]) -> str:
        """What stands in its place; the group ``before`` stays."""
        return f"{match.groupdict().get('before') or ''}[redacted {self.name}]"


def _secret(name: str, marks: str, sign: str, pattern: str) -> SecretPattern:
    return SecretPattern(name, tuple(marks.split()), sign, re.compile(pattern))


SECRET_PATTERNS: tuple[SecretPattern, ...] = (
    _secret("api-key", "sk-", "-", _NOT_IN_WORD + r"sk-[A-Za-z0-9_-]{20,}"),
    _secret("aws-key", "AKIA ASIA", "", r"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])"),
    _secret("github-token", "ghp_ gho_ ghu_ ghs_ ghr_", "_", _NOT_IN_WORD + r"gh[pousr]_[A-Za-z0-9]{36,}"),
    _secret("github-token", "github_pat_", "_", r"github_pat_[A-Za-z0-9_]{22,}"),
    _secret("gitlab-token", "glpat-", "-", r"glpat-[A-Za-z0-9_-]{20,}"),
    _secret("google-key", "AIza", "", _NOT_IN_WORD + r"AIza[A-Za-z0-9_-]{35}"),
    _secret("huggingface-token", "hf_", "_", _NOT_IN_WORD + r"hf_[A-Za-z0-9]{30,}"),
    _secret("npm-token", "npm_", "_", _NOT_IN_WORD + r"npm_[A-Za-z0-9]{36}"),
    _secret("slack-token", "xox", "-", _NOT_IN_WORD + r"xox[abeoprs]-[A-Za-z0-9-]{10,}"),
    _secret("stripe-key", "k_live_", "_", _NOT_IN_WORD + r"[rs]k_live_[A-Za-z0-9]{20,}"),
    _secret(
        "jwt", "eyJ", ".", _NOT_IN_WORD + r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"
    ),
    _secret(
        "private-key",
        "PRIVATE",
        "-",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    ),
    _secret("url-password", "://", "@", r"(?P<before>://)[^\s:/@\"']{1,64}:[^\s:/@\"']{3,128}(?=@)"),
)
"""Private keys are cut to the end of the text where their own end is missing."""


@dataclass(slots=True)
class Redactor:
    secrets: Sequence[SecretPattern] = SECRET_PATTERNS
    patterns: Sequence[re.Pattern[str]] = ()
    _marks: dict[str, list[str]] = field(init=False)
    """Sign that a secret must hold → the marks of those that do."""

    def __post_init__(self) -> None:
        self._marks = {}
        for secret in self.secrets:
            self._marks.setdefault(secret.rare_character, []).extend(secret.markers)

    @staticmethod
    def from_config(config: RedactConfig) -> Redactor:
        patterns: list[re.Pattern[str]] = []
        for i, pattern in enumerate(config.patterns):
            try:
                patterns.append(re.compile(pattern))
            except re.error as error:
                raise ConfigError(
                    f"gateway.redact.patterns[{i}]: {pattern!r} is no pattern: {error}"
                ) from error
        return Redactor(SECRET_PATTERNS if config.secrets else (), patterns)

    def redact_text(self, text: str) -> str:
        """The text itself when there is nothing to cut out."""
        if self._is_marked(text):
            for secret in self.secrets:
                if any(mark in text for mark in secret.markers):
                    text = secret.pattern.sub(secret.replacement, text)
        for pattern in self.patterns:
            text = pattern.sub(_cut, text)
        return text

    def _is_marked(self, text: str) -> bool:
        # Plain loops: they take half the time of any(), and run over every text.
        for sign, marks in self._marks.items():
            if sign in text:
                for mark in marks:
                    if mark in text:
                        return True
        return False

    def redact_message(self, message: Message) -> Message:
        """The message itself when there is nothing to cut out."""
        clean = message
        for name in ("content", "reasoning", "name", "tool_call_id"):
            if (text := message.get(name)) and (cut := self.redact_text(text)) != text:
                clean = cast(Message, {**clean, name: cut})
        if not (calls := message.get("tool_calls")):
            return clean
        cleaned = [self._call(call) for call in calls]
        if any(a is not b for a, b in zip(calls, cleaned, strict=True)):
            clean = cast(Message, {**clean, "tool_calls": cleaned})
        return clean

    def redact_tools(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        cleaned = tuple(cast(Tool, self.redact_value(cast(Json, tool))) for tool in tools)
        return cleaned if cleaned != tools else tools

    def redact_value(self, value: Any) -> Any:
        """Every text within it."""
        match value:
            case str():
                return self.redact_text(value)
            case dict():
                items = cast(Json, value).items()
                return {self.redact_text(str(key)): self.redact_value(item) for key, item in items}
            case list() | tuple():
                return [self.redact_value(item) for item in cast(Sequence[Any], value)]
            case _:
                return value

    def _call(self, call: ToolCall) -> ToolCall:
        clean = ToolCall(
            id=self.redact_text(call["id"]),
            name=self.redact_text(call["name"]),
            arguments=self._arguments(call["arguments"]),
        )
        return call if clean == call else clean

    def _arguments(self, arguments: str) -> str:
        """JSON, whose escapes may hide what is looked for."""
        clean = self.redact_text(arguments)
        if "\\" not in clean:
            return clean
        try:
            value = json.loads(clean)
            found = self.redact_value(value)
        except (ValueError, RecursionError):
            return clean  # no JSON, or none that anyone would read
        return clean if found == value else json.dumps(found, ensure_ascii=False)


def _cut(match: re.Match[str]) -> str:
    return "[redacted]" if match[0] else ""
