"""The request cache does not change results, parses only new messages, and stays within its size limit."""

from __future__ import annotations

import json
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from instar.config import GatewayConfig
from instar.gateway.base import ApiError
from instar.gateway.dialects.base import Dialect, ModelRequest
from instar.gateway.dialects.chat import ChatDialect
from instar.gateway.pipeline.parse import RequestParser
from instar.gateway.request_cache import RequestCache
from instar.record.hashing import HashChain, MessageHasher
from instar.registry import list_names, resolve

HASHER = MessageHasher(b"key")
CHAT = ChatDialect()
MAX_BYTES = 64 * 1024 * 1024
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
ParseOutcome = tuple[ModelRequest, HashChain] | tuple[str, str | None, str | None]


def create_parser() -> RequestParser:
    return RequestParser(GatewayConfig(), HASHER)


def parse(parser: RequestParser, dialect: Dialect, caller: str, body: bytes) -> ParseOutcome:
    """Return the request and its hash chain, or the error's fields. Both can be compared with ``==``."""
    try:
        request, chain = parser.parse(dialect, caller, body)
    except ApiError as error:
        return error.message, error.param, error.code
    unsupported = request.unsupported_error
    error = (unsupported.message, unsupported.param) if unsupported else None
    return replace(request, unsupported=(), parsed_body=(request.parsed_body, error)), chain


def parse_uncached(dialect: Dialect, body: bytes) -> ParseOutcome:
    return parse(create_parser(), dialect, "caller", body)


class BodyGenerator:
    """Generates request bodies with a growing history. Some bodies are edited, truncated or invalid."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ensure_ascii = rng.random() < 0.5
        self.separators = rng.choice([(",", ":"), (", ", ": "), (" ,  ", " :\n")])
        self.fields: dict[str, Any] = {"model": "m", "temperature": 1}
        self.messages_first = rng.random() < 0.7
        self.messages = [self.make_message() for _ in range(20)]

    def make_text(self) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, 12)))

    def make_message(self) -> Any:
        match self.rng.randrange(6):
            case 0:
                return {
                    "role": "assistant",
                    "content": self.make_text(),
                    "tool_calls": [self.make_tool_call()],
                }
            case 1:
                return {"content": self.make_text(), "role": "tool", "tool_call_id": "c"}
            case 2:
                return {"role": "user", "content": [{"type": "text", "text": self.make_text()}]}
            case 3:
                return {"role": "assistant", "content": None, "reasoning_content": self.make_text()}
            case _:
                return {"role": self.rng.choice(["user", "system"]), "content": self.make_text()}

    def make_tool_call(self) -> Any:
        return {
            "id": "c",
            "type": "function",
            "function": {"name": "f", "arguments": json.dumps([self.make_text()])},
        }

    def next_body(self) -> bytes:
        """Return the next body, usually with more messages, sometimes with edited, fewer or invalid ones."""
        rng = self.rng
        index = rng.randrange(len(self.messages)) if self.messages else 0
        match rng.randrange(14):
            case 0 if self.messages:
                self.messages[index] = self.make_message()
            case 1 if self.messages:
                self.messages.insert(index, self.make_message())
            case 2 if len(self.messages) > 1:
                del self.messages[index]
            case 3 if len(self.messages) > 2:
                del self.messages[index + 1 :]
            case 4:
                self.fields["temperature"] = rng.random()
            case 5:
                function = {"name": self.make_text(), "parameters": {}}
                self.fields["tools"] = [{"type": "function", "function": function}]
            case 6:
                self.messages_first = not self.messages_first
            case 7:
                self.messages.append(rng.choice([5, None, {"role": "robot"}, {"role": "user", "content": 5}]))
                return self.encode_body(drop_last=True)
            case 8:
                self.messages.append({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]})
                return self.encode_body(drop_last=True)
            case 9:
                return self.make_unusual_body()
            case _:
                self.messages += [self.make_message() for _ in range(rng.randint(1, 3))]
        return self.encode_body()

    def encode_body(self, drop_last: bool = False) -> bytes:
        """Encode the body. With ``drop_last``, later bodies do not have its last message."""
        messages = {"messages": self.messages}
        fields = {**messages, **self.fields} if self.messages_first else {**self.fields, **messages}
        text = json.dumps(fields, ensure_ascii=self.ensure_ascii, separators=self.separators)
        if drop_last:
            self.messages.pop()
        return text.encode()

    def make_unusual_body(self) -> bytes:
        """Return a body that is truncated, or has a repeated or unknown key, a trailing comma, extra spaces,
        a surplus brace, or invalid UTF-8."""
        body = self.encode_body()
        other = json.dumps([self.make_message()]).encode()
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
def test_parser_random_bodies_match_uncached_result(seed: int) -> None:
    rng = random.Random(seed)
    parser = create_parser()
    generators = [BodyGenerator(rng) for _ in range(3)]
    for _ in range(40):
        body = rng.choice(generators).next_body()
        # All generators use the same caller, because agents that share a key must not affect each other.
        assert parse(parser, CHAT, "caller", body) == parse_uncached(CHAT, body), body


@pytest.mark.parametrize("name", list_names("dialects"))
def test_parser_growing_history_matches_uncached_result(name: str) -> None:
    dialect: Dialect = resolve("dialects", name)()
    parser = create_parser()
    turns: list[Any] = []
    for i in range(30):
        turns += [{"role": "user", "content": f"{i} " * 400}, {"role": "assistant", "content": f"a{i}"}]
        body: dict[str, Any] = {"model": "m", "max_tokens": 5}
        match name:
            case "responses":
                body = {"model": "m", "input": turns}
            case "completions":
                body["prompt"] = str(turns)
            case "tokens":
                body["prompt_ids"] = [5] * 2000 * len(turns)
            case _:
                body["messages"] = turns
        raw = json.dumps(body).encode()
        assert parse(parser, dialect, "c", raw) == parse_uncached(dialect, raw)


def make_growing_bodies(count: int, size: int = 2000) -> list[bytes]:
    """Return bodies with 1 to ``count`` messages of about ``size`` bytes each."""
    turns = [{"role": "user", "content": f"{i} " + "w" * size} for i in range(count)]
    return [json.dumps({"model": "m", "messages": turns[: i + 1]}).encode() for i in range(count)]


def test_cache_long_history_parses_new_messages_only() -> None:
    parsed_sizes: list[int] = []

    class MeasuringDialect(ChatDialect):
        def parse_request(self, body: bytes) -> ModelRequest:
            parsed_sizes.append(len(body))
            return super().parse_request(body)

    cache, dialect = RequestCache(HASHER, MAX_BYTES), MeasuringDialect()
    for body in make_growing_bodies(60):
        cache.parse(dialect, "c", body)
    assert max(parsed_sizes[20:]) < 3 * 2100


def test_cache_unsupported_and_invalid_requests_are_not_cached() -> None:
    cache = RequestCache(HASHER, MAX_BYTES)
    valid = make_growing_bodies(8)[-1]
    unsupported = valid[:-2] + b',{"role":"user","content":[{"type":"image_url","image_url":"x"}]}]}'
    for _ in range(2):
        request, _ = cache.parse(CHAT, "c", unsupported)
        assert request.unsupported_error is not None
        assert request.unsupported_error.param == "messages[8].content[0]"
    continued = unsupported[:-2] + b',{"role":"user","content":"more"}]}'
    request, _ = cache.parse(CHAT, "c", continued)
    assert request.unsupported_error is not None
    invalid = valid[:-2] + b',{"role":"robot"}]}'
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            cache.parse(CHAT, "c", invalid)
        assert caught.value.param == "messages[8].role"


def test_cache_requests_that_fail_the_check_are_not_cached() -> None:
    def check(request: ModelRequest) -> None:
        if len(request.messages) > 8:
            raise ApiError(400, "too long")

    cache = RequestCache(HASHER, MAX_BYTES)
    *bodies, too_long = make_growing_bodies(9)
    cache.parse(CHAT, "c", bodies[-1], check)
    size = cache.size
    for caller in ("c", "d"):
        with pytest.raises(ApiError):
            cache.parse(CHAT, caller, too_long, check)
    assert 0 < cache.size == size


def test_cache_other_caller_matches_uncached_result() -> None:
    parser = create_parser()
    bodies = make_growing_bodies(12)
    for body in bodies:
        parse(parser, CHAT, "ann", body)
    assert parse(parser, CHAT, "ben", bodies[-1]) == parse_uncached(CHAT, bodies[-1])


def test_cache_size_includes_the_parsed_messages() -> None:
    cache = RequestCache(HASHER, MAX_BYTES)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": ""}] * 10_000}).encode()
    tracemalloc.start()
    cache.parse(CHAT, "c", body)
    parsed_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.7 < cache.size / (parsed_bytes + len(body)) < 1.5


def test_cache_size_includes_the_parsed_tools() -> None:
    cache = RequestCache(HASHER, MAX_BYTES)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": ""}], "tools": [tool] * 2000})
    tracemalloc.start()
    cache.parse(CHAT, "c", body.encode())
    parsed_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.7 < cache.size / (parsed_bytes + len(body)) < 1.6


@pytest.mark.parametrize(
    ("dialect_name", "field"),
    [("chat", "messages"), ("chat", "tools"), ("messages", "tools"), ("responses", "input")],
)
def test_parser_rejects_too_many_items_without_decoding_them(dialect_name: str, field: str) -> None:
    fields = {
        "model": "m",
        "messages": [],
        "max_tokens": 1,
        field: [{"role": "user", "content": ""}] * 30_000,
    }
    body = json.dumps(fields).encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=r"30000 .* the limit is"):
            create_parser().parse(resolve("dialects", dialect_name)(), "c", body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(body)


def test_bodies_that_were_not_used_for_20_seconds_are_removed() -> None:
    now = 0.0
    cache = RequestCache(HASHER, MAX_BYTES, clock=lambda: now)
    used, unused = make_growing_bodies(2, 20_000)[-1], make_growing_bodies(2, 30_000)[-1]
    cache.parse(CHAT, "used", used)
    size = cache.size
    cache.parse(CHAT, "unused", unused)
    now = 15.0
    cache.parse(CHAT, "used", used)
    assert cache.size > size
    now = 30.0
    cache.parse(CHAT, "used", used)
    assert cache.size == size


@pytest.mark.parametrize("caller_count", [1, 50])
def test_cache_size_with_many_bodies_is_bounded(caller_count: int) -> None:
    max_bytes = 400_000
    cache = RequestCache(HASHER, max_bytes)
    for i in range(300):
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"{i}" + "w" * 20_000}]})
        cache.parse(CHAT, i % caller_count, body.encode())
        assert cache.size <= max_bytes
    cache.parse(CHAT, "huge", make_growing_bodies(1, 2 * max_bytes)[0])
    assert cache.size <= max_bytes
