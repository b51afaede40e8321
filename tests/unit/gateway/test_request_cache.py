"""Reading with what is remembered gives what reading anew gives, for whatever body."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import Dialect, ModelRequest
from instar.gateway.dialects.chat import ChatDialect
from instar.gateway.request_cache import RequestCache
from instar.record.hashing import HashChain, MessageHasher
from instar.registry import list_names, resolve

HASHER = MessageHasher(b"key")
CHAT = ChatDialect()
WORDS = [
    "one",
    "zwei",
    "três",
    "четыре",
    "五",
    "🌍",
    '"quoted"',
    "\\back",
    "\n",
    "\u2028",
    "]",
    "}",
    '","',
    "x" * 900,
]
Read = tuple[ModelRequest, HashChain] | tuple[str, str | None, str | None]


def outcome(read: Callable[[], tuple[ModelRequest, HashChain]]) -> Read:
    try:
        request, chain = read()
    except ApiError as error:
        return error.message, error.param, error.code
    refusal = request.unsupported_error
    said = (refusal.message, refusal.param) if refusal else None
    return replace(request, unsupported_error=None, parsed_body=(request.parsed_body, said)), chain


def plain(dialect: Dialect, body: bytes) -> Read:
    return outcome(lambda: RequestCache(HASHER).read(dialect, "nobody", body))


class Writer:
    """Writes the bodies of one agent, and of agents that do odd things."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ascii = rng.random() < 0.5
        self.separators = rng.choice([(",", ":"), (", ", ": "), (" ,  ", " :\n")])
        self.fields: dict[str, Any] = {"model": "m", "temperature": 1}
        self.first = rng.random() < 0.7
        """Whether the messages come before the other fields."""
        self.messages = [self.message() for _ in range(20)]

    def text(self) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, 12)))

    def message(self) -> Any:
        match self.rng.randrange(6):
            case 0:
                return {"role": "assistant", "content": self.text(), "tool_calls": [self.call()]}
            case 1:
                return {"content": self.text(), "role": "tool", "tool_call_id": "c"}
            case 2:
                return {"role": "user", "content": [{"type": "text", "text": self.text()}]}
            case 3:
                return {"role": "assistant", "content": None, "reasoning_content": self.text()}
            case _:
                return {"role": self.rng.choice(["user", "system"]), "content": self.text()}

    def call(self) -> Any:
        return {
            "id": "c",
            "type": "function",
            "function": {"name": "f", "arguments": json.dumps([self.text()])},
        }

    def step(self) -> bytes:
        """The next body: grown as a rule, else edited, cut, branched or broken."""
        rng = self.rng
        at = rng.randrange(len(self.messages)) if self.messages else 0
        match rng.randrange(14):
            case 0 if self.messages:
                self.messages[at] = self.message()
            case 1 if self.messages:
                self.messages.insert(at, self.message())
            case 2 if len(self.messages) > 1:
                del self.messages[at]
            case 3 if len(self.messages) > 2:
                del self.messages[at + 1 :]
            case 4:
                self.fields["temperature"] = rng.random()
            case 5:
                function = {"name": self.text(), "parameters": {}}
                self.fields["tools"] = [{"type": "function", "function": function}]
            case 6:
                self.first = not self.first
            case 7:
                self.messages.append(rng.choice([5, None, {"role": "robot"}, {"role": "user", "content": 5}]))
                return self.body(spoil=True)
            case 8:
                self.messages.append({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]})
                return self.body(spoil=True)
            case 9:
                return self.odd()
            case _:
                self.messages += [self.message() for _ in range(rng.randint(1, 3))]
        return self.body()

    def body(self, spoil: bool = False) -> bytes:
        messages = {"messages": self.messages}
        fields = {**messages, **self.fields} if self.first else {**self.fields, **messages}
        text = json.dumps(fields, ensure_ascii=self.ascii, separators=self.separators)
        if spoil:
            self.messages.pop()
        return text.encode()

    def odd(self) -> bytes:
        """Keys twice, a comma at the end, cut off, spaces, bytes that are no text."""
        body = self.body()
        other = json.dumps([self.message()]).encode()
        match self.rng.randrange(8):
            case 0:
                return body[:-1] + b',"messages":' + other + b"}"
            case 1:
                return b'{"messages":' + other + b"," + body[1:]
            case 2:
                return body.replace(b"]", b",]", 1)
            case 3:
                return body[: self.rng.randrange(len(body))]
            case 4:
                return b"\n " + body.replace(b"{", b"{ ", 3) + b"\n"
            case 5:
                return body.replace(b"x", b"\xff", 1)
            case 6:
                return body[:-1] + b',"unknown": 1}'
            case _:
                return body + body[-1:]


@pytest.mark.parametrize("seed", range(40))
def test_the_same_as_read_anew(seed: int) -> None:
    rng = random.Random(seed)
    recall = RequestCache(HASHER)
    agents = [Writer(rng) for _ in range(3)]
    for _ in range(40):
        writer = rng.choice(agents)
        body = writer.step()
        # One caller for all: agents behind one key get into each other's way.
        found = outcome(lambda body=body: recall.read(CHAT, "caller", body))
        assert found == plain(CHAT, body), body


@pytest.mark.parametrize("name", list_names("dialects"))
def test_every_dialect_reads_a_growing_history(name: str) -> None:
    """Also those that are not remembered."""
    dialect: Dialect = resolve("dialects", name)()
    recall = RequestCache(HASHER)
    turns: list[Any] = []
    for i in range(30):
        turns += [{"role": "user", "content": f"{i} " * 400}, {"role": "assistant", "content": f"a{i}"}]
        body: dict[str, Any] = {"model": "m", "max_tokens": 5}
        match name:
            case "responses":
                body = {"model": "m", "input": turns}
            case "completions":
                body["prompt"] = str(turns)
            case _:
                body["messages"] = turns
        raw = json.dumps(body).encode()
        assert outcome(lambda raw=raw: recall.read(dialect, "c", raw)) == plain(dialect, raw)


def growing(count: int, size: int = 2000) -> list[bytes]:
    turns = [{"role": "user", "content": f"{i} " + "w" * size} for i in range(count)]
    return [json.dumps({"model": "m", "messages": turns[: i + 1]}).encode() for i in range(count)]


def test_most_of_a_long_history_is_not_read_again() -> None:
    seen: list[int] = []

    class Watched(ChatDialect):
        def parse_request(self, body: bytes) -> ModelRequest:
            seen.append(len(body))
            return super().parse_request(body)

    recall, dialect = RequestCache(HASHER), Watched()
    for body in growing(60):
        recall.read(dialect, "c", body)
    assert max(seen[20:]) < 3 * 2100


def test_what_was_refused_is_not_kept() -> None:
    recall = RequestCache(HASHER)
    good = growing(8)[-1]
    part = b',{"role":"user","content":[{"type":"image_url","image_url":"x"}]}]}'
    refused = good[:-2] + part
    for _ in range(2):
        request, _ = recall.read(CHAT, "c", refused)
        assert request.unsupported_error is not None
        assert request.unsupported_error.param == "messages[8].content[0]"
    more = refused[:-2] + b',{"role":"user","content":"more"}]}'
    request, _ = recall.read(CHAT, "c", more)
    assert request.unsupported_error is not None
    bad = good[:-2] + b',{"role":"robot"}]}'
    for _ in range(2):
        with pytest.raises(ApiError) as raised:
            recall.read(CHAT, "c", bad)
        assert raised.value.param == "messages[8].role"


def test_callers_and_dialects_are_apart() -> None:
    recall = RequestCache(HASHER)
    for body in growing(12):
        recall.read(CHAT, "ann", body)
    assert outcome(lambda: recall.read(CHAT, "ben", growing(12)[-1])) == plain(CHAT, growing(12)[-1])


@pytest.mark.parametrize("callers", [1, 50])
def test_memory_is_bounded(callers: int) -> None:
    budget = 400_000
    recall = RequestCache(HASHER, budget)
    for i in range(300):
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"{i}" + "w" * 20_000}]})
        recall.read(CHAT, i % callers, body.encode())
        assert recall.size <= budget
    recall.read(CHAT, "huge", growing(1, 2 * budget)[0])
    assert recall.size <= budget
