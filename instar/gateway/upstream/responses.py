"""Read the responses of providers that speak OpenAI's Responses API."""

from __future__ import annotations

import msgspec

from instar.gateway.upstream.replies import ReplyDraft, ReplyReader, TokenUsage, parse_error
from instar.wire.openai import ResponsesEvent, ResponsesOutputItem, ResponsesResponse

_decode = msgspec.json.Decoder(ResponsesResponse).decode
_decode_event = msgspec.json.Decoder(ResponsesEvent).decode

_END_EVENTS = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
)
_CALL_TYPES = ("function_call", "custom_tool_call")
_TEXT_EVENTS = frozenset({"response.output_text.delta", "response.refusal.delta"})
_REASONING_EVENTS = frozenset({"response.reasoning_text.delta", "response.reasoning_summary_text.delta"})
_ARGUMENT_EVENTS = frozenset(
    {"response.function_call_arguments.delta", "response.custom_tool_call_input.delta"}
)


def _add_item(draft: ReplyDraft, item: ResponsesOutputItem) -> None:
    if item.type == "message":
        draft.add_text("".join(part.text or part.refusal for part in item.content or ()))
    elif item.type == "reasoning":
        draft.add_reasoning("".join(part.text for part in item.content or item.summary or ()))
    elif item.type in _CALL_TYPES:
        arguments = str(item.arguments)
        if item.type == "custom_tool_call":
            # A custom tool takes text instead of JSON. The text is recorded as the JSON argument ``input``.
            arguments = msgspec.json.encode({"input": item.input}).decode()
        draft.add_arguments(draft.open_call(item.call_id or "", item.name or ""), arguments)


def _build_draft(response: ResponsesResponse, output: list[ResponsesOutputItem]) -> ReplyDraft:
    draft = ReplyDraft()
    for item in output:
        _add_item(draft, item)
    details = response.incomplete_details
    draft.finish_reason = "stop"
    if response.status in ("failed", "cancelled"):
        draft.finish_reason = "aborted"
    elif response.status == "incomplete" and (details is None or details.reason == "max_output_tokens"):
        draft.finish_reason = "length"
    return draft


class ResponsesReader(ReplyReader):
    """Reads a Responses API response. The last event of a stream replaces the reply built from deltas."""

    def __init__(self, *, emit_deltas: bool = False) -> None:
        super().__init__(emit_deltas=emit_deltas)
        self._partial_draft = ReplyDraft(0, self.deltas)
        self._calls: dict[int, int] = {}  # output index → tool call index
        self._finished_items: list[ResponsesOutputItem] = []
        self._final_draft: ReplyDraft | None = None

    def read(self, body: bytes) -> None:
        response = _decode(body)
        if response.output is None:
            raise parse_error(body)
        self._end(response)

    def feed(self, data: bytes) -> None:
        if data.startswith(b"[DONE]"):
            return
        event = _decode_event(data)
        event_type = event.type
        if event_type in _TEXT_EVENTS:
            self._partial_draft.add_text(str(event.delta))
        elif event_type in _REASONING_EVENTS:
            self._partial_draft.add_reasoning(str(event.delta))
        elif event_type in _ARGUMENT_EVENTS and event.output_index in self._calls:
            self._partial_draft.add_arguments(self._calls[event.output_index], str(event.delta))
        elif event_type == "response.output_item.added" and event.item and event.item.type in _CALL_TYPES:
            call_index = self._partial_draft.open_call(event.item.call_id or "", event.item.name or "")
            self._calls[event.output_index] = call_index
        elif event_type == "response.output_item.done" and event.item:
            self._finished_items.append(event.item)
        elif event_type == "error":
            raise parse_error(data)
        elif event_type in _END_EVENTS:
            response = event.response or ResponsesResponse()
            response.status = response.status or event_type.removeprefix("response.")
            self._end(response)

    def _end(self, response: ResponsesResponse) -> None:
        self.has_seen_end = self.is_exhausted = True
        self.set_response_id(response.id)
        if usage := response.usage:
            self.usage = TokenUsage.build(usage.input_tokens, usage.output_tokens, usage.input_tokens_details)
        self._final_draft = _build_draft(response, response.output or self._finished_items)

    @property
    def drafts(self) -> list[ReplyDraft]:
        return [self._final_draft or self._partial_draft]
