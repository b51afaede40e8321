"""Build replies and errors from a provider's response, in any dialect."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import numpy as np

from instar.gateway.dialects.base import ReplyChoice
from instar.gateway.upstream.base import UpstreamError
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.types import FinishReason, Message, ToolCall
from instar.wire.openai import CachedTokens

IndexedDeltas = list[tuple[int, ReplyDelta]]
MAX_RESPONSE_ID_LENGTH = 512


@dataclass(slots=True)
class ToolCallDraft:
    id: str
    name: str
    argument_pieces: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class ReplyDraft:
    """The received part of one reply. If ``deltas`` is set, every addition is also appended to it."""

    index: int = 0
    deltas: IndexedDeltas | None = None
    text_pieces: list[str] = field(default_factory=list[str])
    reasoning_pieces: list[str] = field(default_factory=list[str])
    calls: list[ToolCallDraft] = field(default_factory=list[ToolCallDraft])
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float | None] = field(default_factory=list[float | None])

    def add_text(self, text: str) -> None:
        self.text_pieces.append(text)
        if self.deltas is not None and text:
            self.deltas.append((self.index, ReplyDelta(text=text)))

    def add_reasoning(self, text: str) -> None:
        self.reasoning_pieces.append(text)
        if self.deltas is not None and text:
            self.deltas.append((self.index, ReplyDelta(reasoning=text)))

    def open_call(self, call_id: str, name: str) -> int:
        """Start a tool call and return its index."""
        index = len(self.calls)
        self.calls.append(ToolCallDraft(call_id, name))
        if self.deltas is not None:
            self.deltas.append((self.index, ReplyDelta(call=ToolCallDelta(index, call_id, name))))
        return index

    def add_arguments(self, call_index: int, text: str) -> None:
        self.calls[call_index].argument_pieces.append(text)
        if self.deltas is not None and text:
            self.deltas.append((self.index, ReplyDelta(call=ToolCallDelta(call_index, arguments=text))))

    def add_tokens(self, token_ids: Sequence[int], logprobs: Sequence[float | None]) -> None:
        """Add sampled tokens. Unless each has a logprob, all their logprobs are treated as missing."""
        if self.token_ids is None:
            self.token_ids = []
        self.token_ids += token_ids
        self.logprobs += logprobs if len(logprobs) == len(token_ids) else [None] * len(token_ids)

    @property
    def is_empty(self) -> bool:
        return not (self.text_pieces or self.reasoning_pieces or self.calls or self.token_ids)

    def build_message(self) -> Message:
        message = Message(role="assistant", content="".join(self.text_pieces))
        if reasoning := "".join(self.reasoning_pieces):
            message["reasoning"] = reasoning
        if self.calls:
            message["tool_calls"] = [
                ToolCall(id=call.id, name=call.name, arguments="".join(call.argument_pieces))
                for call in self.calls
            ]
        return message


@dataclass(slots=True)
class TokenUsage:
    prompt: int = 0
    sampled: int = 0
    """The number of sampled tokens, summed over all replies. Providers do not report it per reply."""
    cached: int | None = None

    @classmethod
    def build(cls, prompt: int | None, sampled: int | None, details: CachedTokens | None) -> TokenUsage:
        return cls(prompt or 0, sampled or 0, details.cached_tokens if details else None)


def build_choices(
    drafts: Sequence[ReplyDraft], usage: TokenUsage, prompt_ids: Sequence[int] | None
) -> list[ReplyChoice]:
    """Return the replies. Without token ids, the provider's token count is split evenly among them."""
    prompt = None if prompt_ids is None else np.asarray(prompt_ids, np.int32)
    tokens_per_reply, remainder = divmod(usage.sampled, max(1, len(drafts)))
    choices: list[ReplyChoice] = []
    for i, draft in enumerate(drafts):
        choice = ReplyChoice(
            message=draft.build_message(),
            finish_reason=draft.finish_reason or "stop",
            prompt_tokens=usage.prompt,
            sampled_tokens=tokens_per_reply + (i < remainder),
            stop_string=draft.stop_string,
            cached_tokens=usage.cached,
        )
        if prompt is not None and draft.token_ids is not None:
            logprobs = [math.nan if value is None else value for value in draft.logprobs]
            choice = replace(
                choice,
                prompt_tokens=len(prompt),
                sampled_tokens=len(draft.token_ids),
                prompt_ids=prompt,
                sampled_ids=np.asarray(draft.token_ids, np.int32),
                sampled_logprobs=np.asarray(logprobs, np.float32),
            )
        choices.append(choice)
    return choices


class ReplyReader(ABC):
    """Reads one response: ``read`` takes a complete body, and ``feed`` one event of a stream.

    Both methods raise UpstreamError if the provider reports an error, and msgspec.DecodeError or
    UnicodeDecodeError if the data cannot be decoded.
    """

    def __init__(self, *, emit_deltas: bool) -> None:
        self.deltas: IndexedDeltas | None = [] if emit_deltas else None
        self.usage = TokenUsage()
        self.prompt_ids: list[int] | None = None
        self.has_seen_end = False
        """True once an event has announced the end of the response. More events may follow."""
        self.is_exhausted = False
        """True once the last event has been read."""
        self.response_id: str | None = None

    def set_response_id(self, response_id: Any) -> None:
        if isinstance(response_id, str) and 0 < len(response_id) <= MAX_RESPONSE_ID_LENGTH:
            self.response_id = response_id

    @abstractmethod
    def read(self, body: bytes) -> None: ...

    @abstractmethod
    def feed(self, data: bytes) -> None: ...

    @property
    def can_end(self) -> bool:
        """True if the provider may close the stream now without an error."""
        return self.has_seen_end

    @property
    @abstractmethod
    def drafts(self) -> list[ReplyDraft]: ...

    def choices(self) -> list[ReplyChoice]:
        return build_choices(self.drafts, self.usage, self.prompt_ids)

    def take_deltas(self) -> IndexedDeltas:
        """Return the deltas that were added since the last call."""
        if not self.deltas:
            return []
        deltas = self.deltas.copy()
        self.deltas.clear()
        return deltas

    def partial_choices(self) -> list[ReplyChoice]:
        if all(draft.is_empty for draft in self.drafts):
            return []
        return [replace(choice, finish_reason="aborted") for choice in self.choices()]


_STATUS_BY_ERROR = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}


def parse_error(
    raw: bytes, status: int | None = None, retry_after: int | None = None, content_type: str | None = None
) -> UpstreamError:
    """Return the error in a provider's response body or event. ``status`` is None if the response has a
    success status; the status is then derived from the error itself."""
    try:
        body: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = None
    fields = cast(dict[str, Any], body) if isinstance(body, dict) else {}
    error = fields.get("error") or fields
    detail: dict[str, Any] = cast(dict[str, Any], error) if isinstance(error, dict) else {"message": error}
    message = detail.get("message") or detail.get("detail") or raw[:300].decode("utf-8", "replace").strip()
    code = detail.get("code") or detail.get("type")
    param = detail.get("param")
    return UpstreamError(
        status or _parse_status(detail),
        str(message) if message else f"The provider responded with status {status}.",
        code=str(code) if code else None,
        param=param if isinstance(param, str) else None,
        retry_after=retry_after,
        raw=raw,
        content_type=content_type,
    )


def _parse_status(detail: dict[str, Any]) -> int:
    code = detail.get("code")
    if isinstance(code, int) and 400 <= code < 600:
        return code
    return _STATUS_BY_ERROR.get(str(detail.get("type")), _STATUS_BY_ERROR.get(str(code), 502))
