"""Replies as output items of the Responses API, and the typed events that announce them.

A response that is not streamed is built by the same steps; its events are discarded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import orjson

from instar.gateway.dialects.base import TokenLogprob
from instar.gateway.dialects.common import format_logprob
from instar.gateway.dialects.responses_items import ClientTool, make_item_id
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.types import Json, Message

Events = list[Json]


class ResponseOutput:
    """The output items of one reply. Every method returns the events to send."""

    def __init__(self, request_id: str, tools: dict[str, ClientTool]) -> None:
        self.items: list[Json] = []
        self._request_id = request_id
        self._tools = tools
        self._open: _TextItem | _CallItem | None = None
        self._call: int | None = None
        self._held_space = ""
        self._logprobs: list[TokenLogprob] = []

    def add_deltas(self, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob] = ()) -> Events:
        if not deltas or any(delta.text for delta in deltas):
            self._logprobs += logprobs
        events: Events = []
        for delta in deltas:
            if delta.call is not None:
                events += self._add_call(delta.call)
            elif delta.reasoning:
                events += self._add_reasoning(delta.reasoning)
            elif delta.text:
                events += self._add_text(delta.text)
        return events

    def close(self, status: str = "completed") -> Events:
        """End the reply and return the last events. An empty reply becomes an empty message."""
        events: Events = []
        if not self.items and self._open is None:
            events += self._begin(_TextItem(self._id("msg"), len(self.items), "message"))
            events += self._open_text().add(self._held_space, self._logprobs)
        return events + self._end(status)

    def _add_reasoning(self, text: str) -> Events:
        events: Events = []
        if not (isinstance(self._open, _TextItem) and self._open.kind == "reasoning"):
            events += self._begin(_TextItem(self._id("rs"), self._next(), "reasoning"))
        return events + self._open_text().add(text)

    def _add_text(self, text: str) -> Events:
        # White space alone opens no message; it is sent with the text that follows.
        events: Events = []
        if not (isinstance(self._open, _TextItem) and self._open.kind == "message"):
            self._held_space += text
            if not self._held_space.strip():
                return events
            text, self._held_space = self._held_space, ""
            events += self._begin(_TextItem(self._id("msg"), self._next(), "message"))
        logprobs, self._logprobs = self._logprobs, []
        return events + self._open_text().add(text, logprobs)

    def _add_call(self, delta: ToolCallDelta) -> Events:
        events: Events = []
        if self._call != delta.index or not isinstance(self._open, _CallItem):
            tool = self._tools.get(delta.name) or ClientTool(delta.name)
            kind = _CustomCallItem if tool.is_custom else _CallItem
            events += self._begin(kind(self._request_id, self._next(), delta.id, tool))
            self._call = delta.index
        assert isinstance(self._open, _CallItem)
        return events + self._open.add(delta.arguments)

    def _open_text(self) -> _TextItem:
        assert isinstance(self._open, _TextItem)
        return self._open

    def _next(self) -> int:
        return len(self.items) + (self._open is not None)

    def _id(self, prefix: str) -> str:
        return make_item_id(prefix, self._request_id, self._next())

    def _begin(self, item: _TextItem | _CallItem) -> Events:
        events = self._end("completed")
        self._open = item
        return events + item.begin()

    def _end(self, status: str) -> Events:
        item, self._open = self._open, None
        if item is None:
            return []
        if isinstance(item, _TextItem) and item.kind == "message":
            item.logprobs += self._logprobs
            self._logprobs = []
        events = item.end(status)
        self.items.append(item.item)
        return events


class _TextItem:
    """A message or reasoning item with one part, while it is streamed."""

    def __init__(self, id: str, index: int, kind: str) -> None:
        self.kind = kind
        self.item: Json = {"id": id, "type": kind, "status": "in_progress", "content": []}
        self.item |= {"role": "assistant"} if kind == "message" else {"summary": []}
        self.logprobs: list[TokenLogprob] = []
        self._part_type = "output_text" if kind == "message" else "reasoning_text"
        self._pieces: list[str] = []
        self._location: Json = {"item_id": id, "output_index": index, "content_index": 0}

    def begin(self) -> Events:
        return [
            _added(self._location["output_index"], self.item),
            {"type": "response.content_part.added", **self._location, "part": self._part("")},
        ]

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Events:
        self._pieces.append(text)
        self.logprobs += logprobs
        event = {"type": f"response.{self._part_type}.delta", **self._location, "delta": text}
        return [event | self._logprobs_field(logprobs)]

    def end(self, status: str) -> Events:
        text = "".join(self._pieces)
        self.logprobs = _logprobs_of_text(self.logprobs, text)
        part = self._part(text)
        self.item |= {"status": status, "content": [part]}
        return [
            {"type": f"response.{self._part_type}.done", **self._location, "text": text}
            | self._logprobs_field(self.logprobs),
            {"type": "response.content_part.done", **self._location, "part": part},
            _done(self._location["output_index"], self.item),
        ]

    def _part(self, text: str) -> Json:
        if self.kind == "reasoning":
            return {"type": self._part_type, "text": text}
        return {"type": self._part_type, "text": text, "annotations": []} | self._logprobs_field(
            self.logprobs
        )

    def _logprobs_field(self, logprobs: Sequence[TokenLogprob]) -> Json:
        return {} if self.kind == "reasoning" else {"logprobs": [format_logprob(token) for token in logprobs]}


class _CallItem:
    """A function call while its arguments are streamed."""

    def __init__(self, request_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        self._index = index
        self._pieces: list[str] = []
        self.item: Json = {
            "id": make_item_id("fc", request_id, index),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id,
            "name": tool.name,
            "arguments": "",
        }
        if tool.namespace:
            self.item["namespace"] = tool.namespace

    def begin(self) -> Events:
        return [_added(self._index, self.item)]

    def add(self, arguments: str) -> Events:
        if not arguments:
            return []
        self._pieces.append(arguments)
        return [self._event("function_call_arguments.delta", delta=arguments)]

    def end(self, status: str) -> Events:
        text = "".join(self._pieces)
        self.item |= {"status": status, "arguments": text}
        return [
            self._event("function_call_arguments.done", arguments=text),
            _done(self._index, self.item),
        ]

    def _event(self, name: str, **fields: Any) -> Json:
        return {
            "type": f"response.{name}",
            "item_id": self.item["id"],
            "output_index": self._index,
            **fields,
        }


class _CustomCallItem(_CallItem):
    """A call of a custom tool, which streams the string in ``{"input": "..."}``.

    Arguments of any other shape become a function call with the arguments unchanged, so that the agent sends
    back what the model wrote. If the shape turns out to be different after a part of the input was sent, the
    call stays custom.
    """

    def __init__(self, request_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        super().__init__(request_id, index, call_id, tool)
        self._custom_id = make_item_id("ctc", request_id, index)
        self._input: JsonStringReader | None = None

    def begin(self) -> Events:
        return []

    def add(self, arguments: str) -> Events:
        self._pieces.append(arguments)
        if self._input is not None:
            return self._input_delta(self._input.feed(arguments))
        arguments_so_far = "".join(self._pieces)
        opening = _INPUT.match(arguments_so_far)
        if not opening or _has_other_shape(arguments_so_far):
            return []
        self.item = {key: self.item[key] for key in ("call_id", "name", "namespace") if key in self.item}
        self.item |= {"id": self._custom_id, "type": "custom_tool_call", "status": "in_progress", "input": ""}
        self._input = JsonStringReader()
        return [
            _added(self._index, self.item),
            *self._input_delta(self._input.feed(arguments_so_far[opening.end() :])),
        ]

    def end(self, status: str) -> Events:
        if self._input is None:
            delta = self._event("function_call_arguments.delta", delta="".join(self._pieces))
            return [_added(self._index, self.item), delta, *super().end(status)]
        self.item |= {"status": status, "input": self._input.text}
        return [
            self._event("custom_tool_call_input.done", input=self._input.text),
            _done(self._index, self.item),
        ]

    def _input_delta(self, text: str) -> Events:
        return [self._event("custom_tool_call_input.delta", delta=text)] if text else []


_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")


def _has_other_shape(arguments: str) -> bool:
    """Return True if ``arguments`` is complete JSON but not an object with ``input`` as its only key."""
    try:
        value = json.loads(arguments)
        orjson.dumps(value)
    except json.JSONDecodeError:
        return False
    except (TypeError, RecursionError):  # lone surrogates, which no response can contain
        return True
    return set(value) != {"input"}


class JsonStringReader:
    """Decodes a JSON string incrementally, starting after its opening quote."""

    def __init__(self) -> None:
        self.text = ""
        self._rest = ""
        self._ended = False

    def feed(self, piece: str) -> str:
        """Return the decoded text that later pieces cannot change, up to the closing quote."""
        if self._ended:
            return ""
        self._rest += piece
        match = _CHARACTERS.match(self._rest)
        assert match
        raw, end = match[0], match.end()
        self._ended = self._rest[end : end + 1] == '"'
        half = None if self._ended else _HALF_PAIR.search(raw)
        if half:
            raw, end = raw[: half.start()], half.start()
        self._rest = self._rest[end:]
        text = _encodable(json.loads(f'"{raw}"'))
        self.text += text
        return text


def _encodable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def reply_deltas(message: Message) -> list[ReplyDelta]:
    """Return a finished reply as deltas."""
    reasoning = message.get("reasoning")
    deltas = [ReplyDelta(reasoning=reasoning)] if reasoning else []
    deltas += [ReplyDelta(text=message["content"])] if message["content"] else []
    for i, call in enumerate(message.get("tool_calls", ())):
        deltas.append(ReplyDelta(call=ToolCallDelta(i, call["id"], call["name"], call["arguments"])))
    return deltas


def _logprobs_of_text(logprobs: list[TokenLogprob], text: str) -> list[TokenLogprob]:
    """Return the logprobs of the tokens that make up ``text``, or all logprobs if ``text`` is not in the
    tokens."""
    start = "".join(token.text for token in logprobs).find(text)
    if start < 0:
        return logprobs
    chosen: list[TokenLogprob] = []
    position = 0
    for token in logprobs:
        if position < start + len(text) and position + len(token.text) > start:
            chosen.append(token)
        position += len(token.text)
    return chosen


def _added(index: int, item: Json) -> Json:
    return {"type": "response.output_item.added", "output_index": index, "item": {**item}}


def _done(index: int, item: Json) -> Json:
    return {"type": "response.output_item.done", "output_index": index, "item": item}
