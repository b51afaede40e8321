"""Removes secrets from data before it is stored.

Each secret pattern lists marker strings, and every match contains at least one of them. The regular
expressions run only on text with a marker, so checking other text costs almost nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from instar.config import RedactConfig
from instar.errors import ConfigError
from instar.types import CallForm, Json, Message, SamplingParams, Tool, ToolCall

_NOT_IN_WORD = r"(?<![A-Za-z0-9_-])"
_REASON_PREFIX = "redacted from message "


def format_redaction_reason(message_index: int, reason: str | None) -> str:
    """Format the reason why a call is not trainable, with the index of its first redacted message."""
    return f"{_REASON_PREFIX}{message_index}: {reason or 'it contains a secret'}"


def parse_redaction_reason(reason: str | None) -> int | None:
    """Return the index of the first redacted message, or None if the reason is not about redaction."""
    if reason is None or not reason.startswith(_REASON_PREFIX):
        return None
    return int(reason.removeprefix(_REASON_PREFIX).partition(":")[0])


@dataclass(frozen=True, slots=True)
class SecretPattern:
    name: str
    markers: tuple[str, ...]
    """Every match contains at least one of these strings."""
    rare_character: str
    """A character that every match contains, or an empty string. It is searched for first."""
    pattern: re.Pattern[str]

    def build_replacement(self, match: re.Match[str]) -> str:
        """Return the replacement for a match, which keeps the text of the group ``before``."""
        return f"{match.groupdict().get('before') or ''}[redacted {self.name}]"


def _create_pattern(name: str, markers: str, rare_character: str, pattern: str) -> SecretPattern:
    return SecretPattern(name, tuple(markers.split()), rare_character, re.compile(pattern))


SECRET_PATTERNS: tuple[SecretPattern, ...] = (
    _create_pattern("api-key", "sk-", "-", _NOT_IN_WORD + r"sk-[A-Za-z0-9_-]{20,}"),
    _create_pattern("aws-key", "AKIA ASIA", "", r"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])"),
    _create_pattern(
        "github-token", "ghp_ gho_ ghu_ ghs_ ghr_", "_", _NOT_IN_WORD + r"gh[pousr]_[A-Za-z0-9]{36,}"
    ),
    _create_pattern("github-token", "github_pat_", "_", r"github_pat_[A-Za-z0-9_]{22,}"),
    _create_pattern("gitlab-token", "glpat-", "-", r"glpat-[A-Za-z0-9_-]{20,}"),
    _create_pattern("google-key", "AIza", "", _NOT_IN_WORD + r"AIza[A-Za-z0-9_-]{35}"),
    _create_pattern("huggingface-token", "hf_", "_", _NOT_IN_WORD + r"hf_[A-Za-z0-9]{30,}"),
    _create_pattern("npm-token", "npm_", "_", _NOT_IN_WORD + r"npm_[A-Za-z0-9]{36}"),
    _create_pattern("slack-token", "xox", "-", _NOT_IN_WORD + r"xox[abeoprs]-[A-Za-z0-9-]{10,}"),
    _create_pattern("stripe-key", "k_live_", "_", _NOT_IN_WORD + r"[rs]k_live_[A-Za-z0-9]{20,}"),
    _create_pattern(
        "jwt", "eyJ", ".", _NOT_IN_WORD + r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"
    ),
    _create_pattern(
        "private-key",
        "PRIVATE",
        "-",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    ),
    _create_pattern("url-password", "://", "@", r"(?P<before>://)[^\s:/@\"']{1,64}:[^\s:/@\"']{3,128}(?=@)"),
)
"""The built-in patterns. A private key without an end line extends to the end of the text."""


@dataclass(slots=True)
class Redactor:
    secret_patterns: Sequence[SecretPattern] = SECRET_PATTERNS
    custom_patterns: Sequence[re.Pattern[str]] = ()
    _markers: dict[str, list[str]] = field(init=False)
    """The markers of all patterns, by rare character."""

    def __post_init__(self) -> None:
        self._markers = {}
        for secret in self.secret_patterns:
            self._markers.setdefault(secret.rare_character, []).extend(secret.markers)

    @staticmethod
    def from_config(config: RedactConfig) -> Redactor:
        patterns: list[re.Pattern[str]] = []
        for i, pattern in enumerate(config.patterns):
            try:
                patterns.append(re.compile(pattern))
            except re.error as error:
                raise ConfigError(
                    f"gateway.redact.patterns[{i}]: {pattern!r} is not a valid regular expression: {error}"
                ) from error
        return Redactor(SECRET_PATTERNS if config.secrets else (), patterns)

    def redact_text(self, text: str) -> str:
        if self._has_marker(text):
            for secret in self.secret_patterns:
                if any(marker in text for marker in secret.markers):
                    text = secret.pattern.sub(secret.build_replacement, text)
        for pattern in self.custom_patterns:
            text = pattern.sub(lambda match: "[redacted]" if match[0] else "", text)
        return text

    def _has_marker(self, text: str) -> bool:
        # This runs for every text, and plain loops take half the time of any().
        for character, markers in self._markers.items():
            if character in text:
                for marker in markers:
                    if marker in text:
                        return True
        return False

    def redact_message(self, message: Message) -> Message:
        """Redact the secrets in a message. Return the same object if it contains none."""
        clean = message
        for name in ("content", "reasoning", "name", "tool_call_id"):
            if (text := message.get(name)) and (redacted := self.redact_text(text)) != text:
                clean = cast(Message, {**clean, name: redacted})
        if not (calls := message.get("tool_calls")):
            return clean
        clean_calls = [self._redact_call(call) for call in calls]
        if any(a is not b for a, b in zip(calls, clean_calls, strict=True)):
            clean = cast(Message, {**clean, "tool_calls": clean_calls})
        return clean

    def redact_tools(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        """Redact the secrets in tools. Return the same object if they contain none."""
        clean = tuple(cast(Tool, self.redact_value(cast(Json, tool))) for tool in tools)
        return clean if clean != tools else tools

    def redact_params(self, params: SamplingParams) -> SamplingParams:
        """Redact the secrets in the schemas of the constraint and in the variables of the chat template."""
        if params.chat_template_kwargs:
            redacted_kwargs = self.redact_value(params.chat_template_kwargs)
            params = msgspec.structs.replace(params, chat_template_kwargs=redacted_kwargs)
        if (constraint := params.constraint) is None:
            return params
        schema = None if constraint.schema is None else self._redact_arguments(constraint.schema)
        calls = tuple(
            CallForm(self.redact_text(call.begin), self._redact_arguments(call.schema), call.end)
            for call in constraint.calls
        )
        redacted = msgspec.structs.replace(constraint, schema=schema, calls=calls)
        return msgspec.structs.replace(params, constraint=redacted)

    def redact_value(self, value: Any) -> Any:
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

    def _redact_call(self, call: ToolCall) -> ToolCall:
        clean = ToolCall(
            id=self.redact_text(call["id"]),
            name=self.redact_text(call["name"]),
            arguments=self._redact_arguments(call["arguments"]),
        )
        return call if clean == call else clean

    def _redact_arguments(self, arguments: str) -> str:
        # The arguments are JSON, whose escape sequences may hide a secret from a text search.
        clean = self.redact_text(arguments)
        if "\\" not in clean:
            return clean
        try:
            value = json.loads(clean)
            redacted = self.redact_value(value)
        except (ValueError, RecursionError):
            return clean  # not JSON, or nested too deeply
        return clean if redacted == value else json.dumps(redacted, ensure_ascii=False)
