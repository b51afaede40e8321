"""A provider that speaks OpenAI's chat completions, or completions: what it is asked and what it answers."""

from __future__ import annotations

from typing import Any

import msgspec

from instar.gateway.dialects.base import ModelRequest, ReplyChoice
from instar.gateway.upstream.replies import ReplyDraft, ReplyReader, TokenUsage, build_choices, parse_error
from instar.types import Json, Message

# --- what it answers: only what is read of it ---------------------------------------------------


class Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class WireCall(msgspec.Struct):
    function: Function = msgspec.field(default_factory=Function)
    id: str | None = None
    index: int | None = None


class Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class WireMessage(msgspec.Struct):
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[WireCall] | None = None


class Logprob(msgspec.Struct):
    logprob: float | None = None


class Logprobs(msgspec.Struct):
    content: list[Logprob] | None = None
    token_logprobs: list[float | None] | None = None
    """Of a completion."""

    def chosen(self) -> list[float | None]:
        return self.token_logprobs or [token.logprob for token in self.content or ()]


class WireChoice(msgspec.Struct):
    """Of a chat, whole (``message``) or streamed (``delta``), or of a completion (``text``)."""

    index: int = 0
    message: WireMessage | None = None
    delta: WireMessage | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """vLLM: the stop string that ended it."""


class ExactChoice(WireChoice):
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    prompt_token_ids: list[int] | None = None
    """Of a completion; a chat has them outside its choices."""


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class WireUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None

    def read(self) -> TokenUsage:
        details = self.prompt_tokens_details
        return TokenUsage(
            self.prompt_tokens or 0, self.completion_tokens or 0, details.cached_tokens if details else None
        )


class WireAnswer(msgspec.Struct):
    id: Any = None
    choices: list[WireChoice] | None = None
    usage: WireUsage | None = None
    error: Any = None


class ExactAnswer(msgspec.Struct):
    id: Any = None
    choices: list[ExactChoice] | None = None
    usage: WireUsage | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None


_CUT = ("length", "max_tokens")
_decode = msgspec.json.Decoder(WireAnswer).decode
_decode_exact = msgspec.json.Decoder(ExactAnswer).decode


def _text(content: str | list[Part] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text or "" for part in content if part.type == "text")
    return content or ""


def _add(draft: ReplyDraft, message: WireMessage) -> None:
    if reasoning := message.reasoning_content or message.reasoning:
        draft.add_reasoning(reasoning)
    if text := _text(message.content) or message.refusal:
        draft.add_text(text)
    for call in message.tool_calls or ():
        _add_call(draft, call)


def _add_call(draft: ReplyDraft, call: WireCall) -> None:
    """By its index; where a provider leaves that out, an id begins a call and what has none continues it."""
    at = call.index
    if at is None:
        at = len(draft.calls) if call.id or not draft.calls else len(draft.calls) - 1
    while at >= len(draft.calls):
        draft.open_call(call.id or "", call.function.name or "")
    if (arguments := call.function.arguments) is not None:
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        draft.add_arguments(at, text)


class ChatReader(ReplyReader):
    def __init__(self, n: int = 1, *, emit_deltas: bool = False, exact: bool = False) -> None:
        super().__init__(emit_deltas=emit_deltas)
        self._decode = _decode_exact if exact else _decode
        self._by_index: dict[int, ReplyDraft] = {}
        self._open = n
        self._prompt_ids: list[int] | None = None

    def read(self, body: bytes) -> None:
        self.feed(body)
        if not self._by_index:
            raise parse_error(body)

    def feed(self, data: bytes) -> None:
        if data.startswith(b"[DONE]"):
            self.has_ended = self.is_done = True
            return
        chunk = self._decode(data)
        if chunk.error:
            raise parse_error(data)
        self.set_response_id(chunk.id)
        if chunk.usage:
            self.usage = chunk.usage.read()
        if isinstance(chunk, ExactAnswer) and chunk.prompt_token_ids is not None:
            self._prompt_ids = chunk.prompt_token_ids
        for choice in chunk.choices or ():
            self._take(choice)

    def _take(self, choice: WireChoice) -> None:
        draft = self._by_index.get(choice.index)
        if draft is None:
            draft = self._by_index[choice.index] = ReplyDraft(choice.index, self.deltas)
        if message := choice.delta or choice.message:
            _add(draft, message)
        if choice.text:
            draft.add_text(choice.text)
        if isinstance(choice.stop_reason, str):
            draft.stop_string = choice.stop_reason
        if isinstance(choice, ExactChoice):
            self._take_tokens(draft, choice)
        if choice.finish_reason is not None and draft.finish_reason is None:
            draft.finish_reason = "length" if choice.finish_reason in _CUT else "stop"
            self._open -= 1
            self.has_ended = self.has_ended or self._open <= 0

    def _take_tokens(self, draft: ReplyDraft, choice: ExactChoice) -> None:
        if choice.prompt_token_ids is not None:
            self._prompt_ids = choice.prompt_token_ids
        if choice.token_ids is not None:
            draft.add_tokens(choice.token_ids, choice.logprobs.chosen() if choice.logprobs else ())

    @property
    def is_complete(self) -> bool:
        drafts = self._by_index.values()
        return bool(drafts) and (self.has_ended or all(draft.finish_reason for draft in drafts))

    @property
    def drafts(self) -> list[ReplyDraft]:
        return [self._by_index[index] for index in sorted(self._by_index)]

    def choices(self) -> list[ReplyChoice]:
        return build_choices(self.drafts, self.usage, self._prompt_ids)


# --- what it is asked ---------------------------------------------------------------------------


def build_chat_request(request: ModelRequest, model: str, *, limit_name: str = "max_tokens") -> Json:
    """A request that came in another dialect. ``limit_name``: what the provider calls its token limit."""
    body: Json = {"model": model, "messages": [_message(message) for message in request.messages]}
    if request.tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in request.tools]
    settings: Json = {
        limit_name: request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "stop": list(request.stop) or None,
        "n": request.n if request.n > 1 else None,
    }
    body |= {name: value for name, value in settings.items() if value is not None}
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _message(message: Message) -> Json:
    """Reasoning stays behind: several providers refuse to be shown it."""
    wire: Json = {"role": message["role"], "content": message["content"]}
    if calls := message.get("tool_calls"):
        wire["content"] = message["content"] or None
        wire["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    if message["role"] == "tool":
        wire["tool_call_id"] = message.get("tool_call_id", "")
    elif "name" in message:
        wire["name"] = message["name"]
    return wire
