"""The Responses API, out: a reply, piece by piece, as output items and the typed events that tell of them.

A whole answer is put together by the same steps; its events are then not sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import orjson

from instar.gateway.dialects.base import TokenLogprob
from instar.gateway.dialects.responses_items import ClientTool, make_item_id
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.types import Json, Message

Events = list[Json]


class ResponseOutput:
    """The output items of one reply. Every step returns the events that tell of it."""

    def __init__(self, request_id: str, tools: dict[str, ClientTool]) -> None:
        self.items: list[Json] = []
        self._request_id = request_id
        self._tools = tools
        self._open: _TextItem | _CallItem | None = None
        self._call: int | None = None
        self._blank = ""
        self._logprobs: list[TokenLogprob] = []

    def add_deltas(self, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob] = ()) -> Events:
        if not deltas or any(delta.text for delta in deltas):
            self._logprobs += logprobs
        events: Events = []
        for delta in deltas:
            if delta.call is not None:
                events += self._take_call(delta.call)
            elif delta.reasoning:
                events += self._take_reasoning(delta.reasoning)
            elif delta.text:
                events += self._take_text(delta.text)
        return events

    def close(self, status: str = "completed") -> Events:
        """The reply has ended. A reply of nothing is an empty message."""
        events: Events = []
        if not self.items and self._open is None:
            events += self._begin(_TextItem(self._id("msg"), len(self.items), "message"))
            events += self._open_text().add(self._blank, self._logprobs)
        return events + self._end(status)

    def _take_reasoning(self, text: str) -> Events:
        events: Events = []
        if not (isinstance(self._open, _TextItem) and self._open.kind == "reasoning"):
            events += self._begin(_TextItem(self._id("rs"), self._next(), "reasoning"))
        return events + self._open_text().add(text)

    def _take_text(self, text: str) -> Events:
        """White space alone opens no message: it goes with the text behind it."""
        events: Events = []
        if not (isinstance(self._open, _TextItem) and self._open.kind == "message"):
            self._blank += text
            if not self._blank.strip():
                return events
            text, self._blank = self._blank, ""
            events += self._begin(_TextItem(self._id("msg"), self._next(), "message"))
        logprobs, self._logprobs = self._logprobs, []
        return events + self._open_text().add(text, logprobs)

    def _take_call(self, delta: ToolCallDelta) -> Events:
        events: Events = []
        if self._call != delta.index or not isinstance(self._open, _CallItem):
            tool = self._tools.get(delta.name) or ClientTool(delta.name)
            kind = _CustomCallItem if tool.custom else _CallItem
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
    """A message or a piece of reasoning while it is being said: an item with one part."""

    def __init__(self, id: str, index: int, kind: str) -> None:
        self.kind = kind
        self.item: Json = {"id": id, "type": kind, "status": "in_progress", "content": []}
        self.item |= {"role": "assistant"} if kind == "message" else {"summary": []}
        self.logprobs: list[TokenLogprob] = []
        self._word = "output_text" if kind == "message" else "reasoning_text"
        self._pieces: list[str] = []
        self._at: Json = {"item_id": id, "output_index": index, "content_index": 0}

    def begin(self) -> Events:
        return [
            _added(self._at["output_index"], self.item),
            {"type": "response.content_part.added", **self._at, "part": self._part("")},
        ]

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Events:
        self._pieces.append(text)
        self.logprobs += logprobs
        event = {"type": f"response.{self._word}.delta", **self._at, "delta": text}
        return [event | self._with(logprobs)]

    def end(self, status: str) -> Events:
        text = "".join(self._pieces)
        self.logprobs = _of_text(self.logprobs, text)
        part = self._part(text)
        self.item |= {"status": status, "content": [part]}
        return [
            {"type": f"response.{self._word}.done", **self._at, "text": text} | self._with(self.logprobs),
            {"type": "response.content_part.done", **self._at, "part": part},
            _done(self._at["output_index"], self.item),
        ]

    def _part(self, text: str) -> Json:
        if self.kind == "reasoning":
            return {"type": self._word, "text": text}
        return {"type": self._word, "text": text, "annotations": []} | self._with(self.logprobs)

    def _with(self, logprobs: Sequence[TokenLogprob]) -> Json:
        return {} if self.kind == "reasoning" else {"logprobs": [_logprob(token) for token in logprobs]}


class _CallItem:
    """A call of a function while its arguments are being said."""

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

    def _event(self, name: str, **more: Any) -> Json:
        return {
            "type": f"response.{name}",
            "item_id": self.item["id"],
            "output_index": self._index,
            **more,
        }


class _CustomCallItem(_CallItem):
    """A call of a custom tool: the string in ``{"input": "..."}``, as it comes.

    Arguments of any other shape are told as a call of a function, as they are, so that an agent's echo of it
    says what the model said. When that shows only after a part of the input was sent, the call stands.
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
            return self._say(self._input.feed(arguments))
        given = "".join(self._pieces)
        opening = _INPUT.match(given)
        if not opening or _is_another_shape(given):
            return []
        self.item = {key: self.item[key] for key in ("call_id", "name", "namespace") if key in self.item}
        self.item |= {"id": self._custom_id, "type": "custom_tool_call", "status": "in_progress", "input": ""}
        self._input = JsonStringReader()
        return [_added(self._index, self.item), *self._say(self._input.feed(given[opening.end() :]))]

    def end(self, status: str) -> Events:
        if self._input is None:
            whole = self._event("function_call_arguments.delta", delta="".join(self._pieces))
            return [_added(self._index, self.item), whole, *super().end(status)]
        self.item |= {"status": status, "input": self._input.text}
        return [
            self._event("custom_tool_call_input.done", input=self._input.text),
            _done(self._index, self.item),
        ]

    def _say(self, text: str) -> Events:
        return [self._event("custom_tool_call_input.delta", delta=text)] if text else []


_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")


def _is_another_shape(arguments: str) -> bool:
    """Whether these are whole arguments, and not one string named ``input``."""
    try:
        value = json.loads(arguments)
        orjson.dumps(value)
    except json.JSONDecodeError:
        return False
    except (TypeError, RecursionError):  # lone surrogates, which no answer can carry
        return True
    return set(value) != {"input"}


class JsonStringReader:
    """A JSON string behind its opening quote, decoded as it comes."""

    def __init__(self) -> None:
        self.text = ""
        self._rest = ""
        self._ended = False

    def feed(self, piece: str) -> str:
        """The text that is certain by now; nothing after the closing quote."""
        if self._ended:
            return ""
        self._rest += piece
        found = _CHARACTERS.match(self._rest)
        assert found
        raw, end = found[0], found.end()
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
    """A finished reply as pieces."""
    reasoning = message.get("reasoning")
    deltas = [ReplyDelta(reasoning=reasoning)] if reasoning else []
    deltas += [ReplyDelta(text=message["content"])] if message["content"] else []
    for i, call in enumerate(message.get("tool_calls", ())):
        deltas.append(ReplyDelta(call=ToolCallDelta(i, call["id"], call["name"], call["arguments"])))
    return deltas


def _of_text(logprobs: list[TokenLogprob], text: str) -> list[TokenLogprob]:
    """Those of the tokens that make up ``text``; all, where the tokens alone do not tell."""
    start = "".join(token.text for token in logprobs).find(text)
    if start < 0:
        return logprobs
    chosen: list[TokenLogprob] = []
    at = 0
    for token in logprobs:
        if at < start + len(text) and at + len(token.text) > start:
            chosen.append(token)
        at += len(token.text)
    return chosen


def _added(index: int, item: Json) -> Json:
    return {"type": "response.output_item.added", "output_index": index, "item": {**item}}


def _done(index: int, item: Json) -> Json:
    return {"type": "response.output_item.done", "output_index": index, "item": item}


def _logprob(token: TokenLogprob) -> Json:
    return {
        "token": token.text,
        "logprob": token.logprob,  # orjson writes NaN as null: missing stays missing
        "bytes": list(token.text.encode()),
        "top_logprobs": [],
    }
