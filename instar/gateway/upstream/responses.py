"""A provider that speaks OpenAI's Responses: what it answers."""

from __future__ import annotations

import msgspec

from instar.gateway.upstream.replies import ReplyDraft, ReplyReader, TokenUsage, parse_error
from instar.wire.openai import ResponsesEvent, ResponsesOutputItem, ResponsesResponse, ResponsesUsage

_decode = msgspec.json.Decoder(ResponsesResponse).decode
_decode_event = msgspec.json.Decoder(ResponsesEvent).decode

_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})
_CALLS = ("function_call", "custom_tool_call")
_TEXT = frozenset({"response.output_text.delta", "response.refusal.delta"})
_REASONING = frozenset({"response.reasoning_text.delta", "response.reasoning_summary_text.delta"})
_ARGUMENTS = frozenset({"response.function_call_arguments.delta", "response.custom_tool_call_input.delta"})


def _arguments(item: ResponsesOutputItem) -> str:
    """A custom tool takes text that is no JSON: one string, named ``input``."""
    if item.type == "custom_tool_call":
        return msgspec.json.encode({"input": item.input}).decode()
    return str(item.arguments)


def _add(draft: ReplyDraft, item: ResponsesOutputItem) -> None:
    if item.type == "message":
        draft.add_text("".join(part.text or part.refusal for part in item.content or ()))
    elif item.type == "reasoning":
        draft.add_reasoning("".join(part.text for part in item.content or item.summary or ()))
    elif item.type in _CALLS:
        draft.add_arguments(draft.open_call(item.call_id or "", item.name or ""), _arguments(item))


def _draft(response: ResponsesResponse, output: list[ResponsesOutputItem]) -> ReplyDraft:
    draft = ReplyDraft()
    for item in output:
        _add(draft, item)
    if response.status in ("failed", "cancelled"):
        draft.finish_reason = "aborted"
    else:
        draft.finish_reason = "length" if _cut(response) else "stop"
    return draft


def _cut(response: ResponsesResponse) -> bool:
    details = response.incomplete_details
    return response.status == "incomplete" and (details is None or details.reason == "max_output_tokens")


def _usage(wire: ResponsesUsage | None) -> TokenUsage:
    if wire is None:
        return TokenUsage()
    details = wire.input_tokens_details
    return TokenUsage(wire.input_tokens, wire.output_tokens, details.cached_tokens if details else None)


class ResponsesReader(ReplyReader):
    """The end of the stream repeats the whole output; until it comes, the deltas tell what there is."""

    def __init__(self, *, emit_deltas: bool = False) -> None:
        super().__init__(emit_deltas=emit_deltas)
        self._so_far = ReplyDraft(0, self.deltas)
        self._calls: dict[int, int] = {}  # output index → place among the tool calls
        self._done: list[ResponsesOutputItem] = []
        self._final: ReplyDraft | None = None

    def read(self, body: bytes) -> None:
        response = _decode(body)
        if response.output is None:
            raise parse_error(body)
        self._end(response)

    def feed(self, data: bytes) -> None:
        if data.startswith(b"[DONE]"):
            return
        event = _decode_event(data)
        kind = event.type
        if kind in _TEXT:
            self._so_far.add_text(str(event.delta))
        elif kind in _REASONING:
            self._so_far.add_reasoning(str(event.delta))
        elif kind in _ARGUMENTS and event.output_index in self._calls:
            self._so_far.add_arguments(self._calls[event.output_index], str(event.delta))
        elif kind == "response.output_item.added" and event.item:
            self._begin(event.output_index, event.item)
        elif kind == "response.output_item.done" and event.item:
            self._done.append(event.item)
        elif kind == "error":
            raise parse_error(data)
        elif kind in _ENDS:
            response = event.response or ResponsesResponse()
            response.status = response.status or kind.removeprefix("response.")
            self._end(response)

    def _begin(self, index: int, item: ResponsesOutputItem) -> None:
        if item.type in _CALLS:
            self._calls[index] = self._so_far.open_call(item.call_id or "", item.name or "")

    def _end(self, response: ResponsesResponse) -> None:
        self.has_ended = self.is_done = True
        self.set_response_id(response.id)
        self.usage = _usage(response.usage)
        self._final = _draft(response, response.output or self._done)

    @property
    def drafts(self) -> list[ReplyDraft]:
        return [self._final or self._so_far]
