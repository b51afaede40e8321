"""Read chat and text completions in OpenAI's formats, and translate requests to chat completions."""

from __future__ import annotations

import msgspec

from instar.gateway.dialects.base import ModelRequest
from instar.gateway.dialects.common import format_tool_call
from instar.gateway.upstream.replies import ReplyDraft, ReplyReader, TokenUsage, parse_error
from instar.types import OPTIONAL_SAMPLING_FIELDS, Json, Message
from instar.wire import openai as wire

_LENGTH_REASONS = ("length", "max_tokens")
_decode = msgspec.json.Decoder(wire.ChatResponse).decode
_decode_with_tokens = msgspec.json.Decoder(wire.ChatResponseWithTokens).decode


def _add_message(draft: ReplyDraft, message: wire.ChatReplyMessage) -> None:
    if reasoning := message.reasoning_content or message.reasoning:
        draft.add_reasoning(reasoning)
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text or "" for part in content if part.type == "text")
    if text := content or message.refusal:
        draft.add_text(text)
    for call in message.tool_calls or ():
        _add_call(draft, call)


def _add_call(draft: ReplyDraft, call: wire.ChatReplyToolCall) -> None:
    # If a provider omits the index, a piece with an id starts a call, and other pieces continue it.
    index = call.index
    if index is None:
        index = len(draft.calls) if call.id or not draft.calls else len(draft.calls) - 1
    while index >= len(draft.calls):
        draft.open_call(call.id or "", call.function.name or "")
    if (arguments := call.function.arguments) is not None:
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        draft.add_arguments(index, text)


class ChatReader(ReplyReader):
    def __init__(self, n: int = 1, *, emit_deltas: bool = False, has_token_ids: bool = False) -> None:
        super().__init__(emit_deltas=emit_deltas)
        self._decode = _decode_with_tokens if has_token_ids else _decode
        self._drafts_by_index: dict[int, ReplyDraft] = {}
        self._open_choice_count = n

    def read(self, body: bytes) -> None:
        self.feed(body)
        if not self._drafts_by_index:
            raise parse_error(body)

    def feed(self, data: bytes) -> None:
        if data.startswith(b"[DONE]"):
            self.has_seen_end = self.is_exhausted = True
            return
        chunk = self._decode(data)
        if chunk.error:
            raise parse_error(data)
        self.set_response_id(chunk.id)
        if usage := chunk.usage:
            self.usage = TokenUsage.build(
                usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details
            )
        if isinstance(chunk, wire.ChatResponseWithTokens) and chunk.prompt_token_ids is not None:
            self.prompt_ids = chunk.prompt_token_ids
        for choice in chunk.choices or ():
            self._add_choice(choice)

    def _add_choice(self, choice: wire.ChatResponseChoice) -> None:
        draft = self._drafts_by_index.get(choice.index)
        if draft is None:
            draft = self._drafts_by_index[choice.index] = ReplyDraft(choice.index, self.deltas)
        if message := choice.delta or choice.message:
            _add_message(draft, message)
        if choice.text:
            draft.add_text(choice.text)
        if isinstance(choice.stop_reason, str):
            draft.stop_string = choice.stop_reason
        if isinstance(choice, wire.ChatResponseChoiceWithTokens):
            if choice.prompt_token_ids is not None:
                self.prompt_ids = choice.prompt_token_ids
            if choice.token_ids is not None:
                logprobs = choice.logprobs or wire.ChatLogprobs()
                values = logprobs.token_logprobs or [token.logprob for token in logprobs.content or ()]
                draft.add_tokens(choice.token_ids, values)
        if choice.finish_reason is not None and draft.finish_reason is None:
            draft.finish_reason = "length" if choice.finish_reason in _LENGTH_REASONS else "stop"
            self._open_choice_count -= 1
            self.has_seen_end = self.has_seen_end or self._open_choice_count <= 0

    @property
    def can_end(self) -> bool:
        drafts = self._drafts_by_index.values()
        return bool(drafts) and (self.has_seen_end or all(draft.finish_reason for draft in drafts))

    @property
    def drafts(self) -> list[ReplyDraft]:
        return [self._drafts_by_index[index] for index in sorted(self._drafts_by_index)]


def build_chat_request(request: ModelRequest, model: str, max_tokens_field: str) -> Json:
    """Return a chat completions body. ``max_tokens_field`` is the provider's name for ``max_tokens``."""
    body: Json = {"model": model, "messages": [_format_message(message) for message in request.messages]}
    if request.tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in request.tools]
        if (required := request.required_output) is not None:
            name = required.only_tool
            body["tool_choice"] = {"type": "function", "function": {"name": name}} if name else "required"
    settings: Json = {
        max_tokens_field: request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        **{name: getattr(request, name) for name in OPTIONAL_SAMPLING_FIELDS},
        "chat_template_kwargs": request.chat_template_kwargs or None,
        "stop": list(request.stop) or None,
        "n": request.n if request.n > 1 else None,
    }
    body |= {name: value for name, value in settings.items() if value is not None}
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _format_message(message: Message) -> Json:
    # Reasoning is left out, because some providers reject it.
    formatted: Json = {"role": message["role"], "content": message["content"]}
    if calls := message.get("tool_calls"):
        formatted["content"] = message["content"] or None
        formatted["tool_calls"] = [format_tool_call(call) for call in calls]
    if message["role"] == "tool":
        formatted["tool_call_id"] = message.get("tool_call_id", "")
    elif "name" in message:
        formatted["name"] = message["name"]
    return formatted
