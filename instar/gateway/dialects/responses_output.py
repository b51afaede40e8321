"""Convert replies to Responses API output items, and to the events that stream them.

Responses that are not streamed are built in the same way, and the events are discarded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import orjson

from instar.gateway.dialects.base import TokenLogprob, TokenLogprobs
from instar.gateway.dialects.common import format_logprob
from instar.gateway.dialects.responses_items import ClientTool, make_item_id
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.types import Json

Events = list[Json]


class ResponseOutput:
    """The output items of one reply. The methods return the events to send."""

    def __init__(self, request_id: str, tools: dict[str, ClientTool]) -> None:
        self.items: list[Json] = []
        self._request_id = request_id
        self._tools = tools
        self._open_item: _TextItem | _CallItem | None = None
        self._call_index: int | None = None
        self._held_space = ""
        self._logprobs: list[TokenLogprob] = []

    def add_deltas(self, deltas: Sequence[ReplyDelta], logprobs: TokenLogprobs = ()) -> Events:
        if not deltas or any(delta.text for delta in deltas):
            self._logprobs += logprobs
        events: Events = []
        for delta in deltas:
            if delta.call is not None:
                events += self._add_call(delta.call)
            elif delta.reasoning:
                item, begin_events = self._ensure_text_item("reasoning")
                events += [*begin_events, *item.add(delta.reasoning)]
            elif delta.text:
                events += self._add_text(delta.text)
        return events

    def close(self, status: str = "completed") -> Events:
        """Finish the reply and return the last events. An empty reply becomes an empty message."""
        events: Events = []
        if not self.items and self._open_item is None:
            item, events = self._ensure_text_item("message")
            events += item.add(self._held_space, self._logprobs)
        return events + self._end(status)

    def _add_text(self, text: str) -> Events:
        # Whitespace alone does not begin a message; it is sent with the text that follows.
        text, self._held_space = self._held_space + text, ""
        if not self._is_open("message") and not text.strip():
            self._held_space = text
            return []
        item, events = self._ensure_text_item("message")
        logprobs, self._logprobs = self._logprobs, []
        return events + item.add(text, logprobs)

    def _add_call(self, delta: ToolCallDelta) -> Events:
        events: Events = []
        if self._call_index != delta.index or not isinstance(self._open_item, _CallItem):
            tool = self._tools.get(delta.name) or ClientTool(delta.name)
            item_class = _CustomCallItem if tool.is_custom else _CallItem
            index = self._next_index()
            events += self._begin(item_class(self._request_id, index, delta, tool))
            self._call_index = delta.index
        assert isinstance(self._open_item, _CallItem)
        return events + self._open_item.add(delta.arguments)

    def _is_open(self, item_type: str) -> bool:
        return self._open_item is not None and self._open_item.item["type"] == item_type

    def _ensure_text_item(self, item_type: str) -> tuple[_TextItem, Events]:
        """Return the open item of this type. If there is none, begin one and also return its first events."""
        events: Events = []
        if not self._is_open(item_type):
            events = self._begin(_TextItem(self._request_id, self._next_index(), item_type))
        assert isinstance(self._open_item, _TextItem)
        return self._open_item, events

    def _next_index(self) -> int:
        return len(self.items) + (self._open_item is not None)

    def _begin(self, item: _TextItem | _CallItem) -> Events:
        events = self._end("completed")
        self._open_item = item
        return events + item.begin()

    def _end(self, status: str) -> Events:
        item, self._open_item = self._open_item, None
        if item is None:
            return []
        if isinstance(item, _TextItem) and item.item_type == "message":
            item.logprobs += self._logprobs
            self._logprobs = []
        events = item.end(status)
        self.items.append(item.item)
        return events


class _OutputItem:
    def __init__(self, index: int, item: Json) -> None:
        self.item = item
        self._index = index
        self._pieces: list[str] = []

    def begin(self) -> Events:
        return [self._item_event("added")]

    def _item_event(self, name: str) -> Json:
        fields = {"output_index": self._index, "item": {**self.item}}
        return {"type": f"response.output_item.{name}", **fields}

    def _event(self, name: str, **fields: Any) -> Json:
        location = {"item_id": self.item["id"], "output_index": self._index}
        return {"type": f"response.{name}", **location, **fields}


class _TextItem(_OutputItem):
    """A message or reasoning item, which has one content part."""

    def __init__(self, request_id: str, index: int, item_type: str) -> None:
        is_message = item_type == "message"
        item_id = make_item_id("msg" if is_message else "rs", request_id, index)
        item: Json = {"id": item_id, "type": item_type, "status": "in_progress", "content": []}
        super().__init__(index, item | ({"role": "assistant"} if is_message else {"summary": []}))
        self.item_type = item_type
        self.logprobs: list[TokenLogprob] = []
        self._part_type = "output_text" if is_message else "reasoning_text"

    def begin(self) -> Events:
        return [*super().begin(), self._part_event("content_part.added", part=self._format_part(""))]

    def add(self, text: str, logprobs: TokenLogprobs = ()) -> Events:
        self._pieces.append(text)
        self.logprobs += logprobs
        fields = self._format_logprobs(logprobs)
        return [self._part_event(f"{self._part_type}.delta", delta=text, **fields)]

    def end(self, status: str) -> Events:
        text = "".join(self._pieces)
        self.logprobs = _select_text_logprobs(self.logprobs, text)
        part = self._format_part(text)
        self.item |= {"status": status, "content": [part]}
        fields = self._format_logprobs(self.logprobs)
        return [
            self._part_event(f"{self._part_type}.done", text=text, **fields),
            self._part_event("content_part.done", part=part),
            self._item_event("done"),
        ]

    def _part_event(self, name: str, **fields: Any) -> Json:
        return self._event(name, content_index=0, **fields)

    def _format_part(self, text: str) -> Json:
        part: Json = {"type": self._part_type, "text": text}
        if self.item_type == "message":
            part |= {"annotations": [], **self._format_logprobs(self.logprobs)}
        return part

    def _format_logprobs(self, logprobs: TokenLogprobs) -> Json:
        if self.item_type == "reasoning":
            return {}
        return {"logprobs": [format_logprob(token) for token in logprobs]}


class _CallItem(_OutputItem):
    """A function call while its arguments are streamed."""

    def __init__(self, request_id: str, index: int, delta: ToolCallDelta, tool: ClientTool) -> None:
        item: Json = {
            "id": make_item_id("fc", request_id, delta.index),
            "type": "function_call",
            "status": "in_progress",
            "call_id": delta.id,
            "name": tool.name,
            "arguments": "",
        }
        super().__init__(index, item | ({"namespace": tool.namespace} if tool.namespace else {}))

    def add(self, arguments: str) -> Events:
        if not arguments:
            return []
        self._pieces.append(arguments)
        return [self._event("function_call_arguments.delta", delta=arguments)]

    def end(self, status: str) -> Events:
        arguments = "".join(self._pieces)
        self.item |= {"status": status, "arguments": arguments}
        done = self._event("function_call_arguments.done", arguments=arguments)
        return [done, self._item_event("done")]


class _CustomCallItem(_CallItem):
    """A custom tool call. Its input is the string in the arguments ``{"input": "..."}``.

    Other arguments are returned as a function call, so that the agent sends back exactly the text that the
    model wrote. If part of the input was already sent, the call stays a custom call.
    """

    def __init__(self, request_id: str, index: int, delta: ToolCallDelta, tool: ClientTool) -> None:
        super().__init__(request_id, index, delta, tool)
        self._custom_id = make_item_id("ctc", request_id, delta.index)
        self._input: JsonStringReader | None = None

    def begin(self) -> Events:
        return []

    def add(self, arguments: str) -> Events:
        self._pieces.append(arguments)
        if self._input is not None:
            return self._input_delta(self._input.feed(arguments))
        arguments_so_far = "".join(self._pieces)
        prefix = _INPUT_PREFIX.match(arguments_so_far)
        if not prefix or _is_other_json(arguments_so_far):
            return []
        self.item = {key: self.item[key] for key in ("call_id", "name", "namespace") if key in self.item}
        self.item |= {"id": self._custom_id, "type": "custom_tool_call", "status": "in_progress", "input": ""}
        self._input = JsonStringReader()
        delta = self._input_delta(self._input.feed(arguments_so_far[prefix.end() :]))
        return [self._item_event("added"), *delta]

    def end(self, status: str) -> Events:
        if self._input is None:
            delta = self._event("function_call_arguments.delta", delta="".join(self._pieces))
            return [self._item_event("added"), delta, *super().end(status)]
        self.item |= {"status": status, "input": self._input.text}
        done = self._event("custom_tool_call_input.done", input=self._input.text)
        return [done, self._item_event("done")]

    def _input_delta(self, text: str) -> Events:
        return [self._event("custom_tool_call_input.delta", delta=text)] if text else []


_INPUT_PREFIX = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_STRING_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_HIGH_SURROGATE_END = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")


def _is_other_json(arguments: str) -> bool:
    """Return True if ``arguments`` is complete JSON, but has keys other than ``input`` or cannot be sent."""
    try:
        value = json.loads(arguments)
        orjson.dumps(value)
    except json.JSONDecodeError:
        return False
    except (TypeError, RecursionError):  # A response cannot contain lone surrogates or very deep nesting.
        return True
    return set(value) != {"input"}


class JsonStringReader:
    """Decodes a JSON string incrementally, starting after its opening quote."""

    def __init__(self) -> None:
        self.text = ""
        self._rest = ""
        self._has_ended = False

    def feed(self, piece: str) -> str:
        """Return the decoded text up to the closing quote. An incomplete escape waits for the next piece."""
        if self._has_ended:
            return ""
        self._rest += piece
        match = _STRING_CHARACTERS.match(self._rest)
        assert match
        raw, end = match[0], match.end()
        self._has_ended = self._rest[end : end + 1] == '"'
        if not self._has_ended and (surrogate := _HIGH_SURROGATE_END.search(raw)):
            raw, end = raw[: surrogate.start()], surrogate.start()
        self._rest = self._rest[end:]
        # A lone surrogate is replaced, because no response can contain it.
        text = json.loads(f'"{raw}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self.text += text
        return text


def _select_text_logprobs(logprobs: list[TokenLogprob], text: str) -> list[TokenLogprob]:
    """Return the logprobs of the tokens that form ``text``, or all logprobs if ``text`` is not found."""
    start = "".join(token.text for token in logprobs).find(text)
    if start < 0:
        return logprobs
    text_logprobs: list[TokenLogprob] = []
    position = 0
    for token in logprobs:
        if position < start + len(text) and position + len(token.text) > start:
            text_logprobs.append(token)
        position += len(token.text)
    return text_logprobs
