"""Valid request bodies for every dialect and control route, and random changes to them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import orjson

DEEP = "@deep@"
"""A placeholder for deeply nested lists, which ``json.dumps`` cannot encode."""
HUGE_INTEGER = "@huge@"
"""A placeholder for an integer with 5,000 digits, which Python refuses to convert to text."""
SESSION, RESPONSE, CALL = "@session@", "@response@", "@call@"
"""Placeholders for the ids of an existing session, response and call."""
AGENT_SESSION = "@agent@"
"""A placeholder for a session id chosen by the agent. It changes from time to time, because a session in
memory grows with each call."""

_SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "1"}'}}
_CHAT_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}
_CHAT = [
    {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ],
        "tools": [_CHAT_TOOL],
        "max_tokens": 20,
        "n": 2,
        "stop": ["END"],
        "seed": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": AGENT_SESSION,
        "metadata": {"session_id": AGENT_SESSION},
    },
]
_COMPLETIONS = [
    {"model": "m", "prompt": "once upon", "max_tokens": 10, "logprobs": 0, "n": 2, "user": AGENT_SESSION},
    {"model": "m", "prompt": [1, 2, 3, 40], "stop": "x", "seed": 1, "stream": True},
    {"model": "m", "prompt": ["a"], "echo": True, "max_tokens": 0, "logprobs": 0},
    {"model": "m", "prompt": [[5, 6]], "temperature": 0},
]
_RESPONSES = [
    {
        "model": "m",
        "instructions": "s",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": "1"}'},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "text"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "text", "text": "2"}]},
        ],
        "tools": [
            {"type": "function", "name": "f", "description": "d", "parameters": _SCHEMA, "strict": False},
            {"type": "custom", "name": "g", "format": {"syntax": "lark", "definition": "start: x"}},
            {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "h"}]},
        ],
        "max_output_tokens": 20,
        "temperature": 1,
        "metadata": {"k": "v"},
        "stream": True,
    },
    {"model": "m", "input": "hi", "previous_response_id": RESPONSE},
    {"model": "m", "input": "hi", "include": ["message.output_text.logprobs"], "tool_choice": "none"},
]
_MESSAGES = [
    {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "m",
        "max_tokens": 20,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "1"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}],
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": f"user_1_account_2_session_{AGENT_SESSION}"},
        "stream": True,
    },
]
_GENERATE = [
    {"prompt_ids": [1, 2, 3], "max_tokens": 5, "n": 2, "stop": ["x"], "stop_token_ids": [2], "seed": 3},
    {"prompt_ids": [4, 5], "stream": True, "temperature": 0, "top_k": 4, "top_p": 0.5},
]
_SUBMITTED = {
    "prompt_ids": [1, 2, 3],
    "sampled_ids": [4, 2],
    "logprobs": [-0.1, None],
    "versions": [0, 0],
    "finish_reason": "stop",
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"name": "f", "parameters": _SCHEMA}],
    "params": {"temperature": 1},
    "reply": {"role": "assistant", "content": "y", "tool_calls": [{"id": "1", "name": "f", "arguments": ""}]},
    "client_key": "k",
    "parent_id": CALL,
}
_MINIMAL_SUBMITTED = {
    key: _SUBMITTED[key] for key in ("prompt_ids", "sampled_ids", "logprobs", "versions", "finish_reason")
}
_SESSIONS = [
    {},
    {"channel": "live", "metadata": {"a": 1}, "task": {"b": 2}, "seed": 1, "sampling": {"top_k": 1}},
    {"channel": "train", "group_id": "fuzz/train/000000", "slot": 0, "attempt": 0, "task_id": "t"},
    {"channel": "val", "sampling": {"temperature": 0.5, "top_p": 0.5, "max_tokens": 3}},
]
_REWARDS = [
    {"value": 1, "source": "rule", "scorer": "s", "detail": {"a": "b"}, "reward_id": "r", "cost": 0.1}
]
_COMPLETE = [
    {"reward": 1.0, "metadata": {"k": "v"}},
    {"rewards": _REWARDS, "scores": [{"scorer": "s", "state": "scored", "attempts": 1, "reason": "why"}]},
]
_FEEDBACK = [
    {"session_id": SESSION, "thumbs": "up", "text": "good", "author": "me"},
    {"session_id": SESSION, "score": 0.5, "feedback_id": "f1"},
    {"response_id": RESPONSE, "correction": "Better.", "thumbs": -1},
    {"call_id": CALL, "score": 1},
]

BODIES: dict[str, list[Any]] = {
    "/chat/completions": _CHAT,
    "/completions": _COMPLETIONS,
    "/responses": _RESPONSES,
    "/responses/input_tokens": _RESPONSES,
    "/messages": _MESSAGES,
    "/messages/count_tokens": _MESSAGES,
    "/generate": _GENERATE,
    "/sessions": _SESSIONS,
    "/groups": [{"task": {"question": "1 + 1"}, "size": 2, "task_id": "t", "deadline_s": 60.0}],
    "/complete": _COMPLETE,
    "/fail": [{"reason": "why", "reward": 0.0, "metadata": {"k": "v"}, "rewards": _REWARDS}],
    "/calls": [{"calls": [_SUBMITTED]}, {"calls": [_MINIMAL_SUBMITTED] * 2}],
    "/feedback": _FEEDBACK,
}
"""Valid bodies by path suffix."""

ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 7, 128, 10**30, -(10**30), 1 << 31, 1 << 53, 1 << 63, (1 << 64) - 1, 0.5,
    -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), HUGE_INTEGER, DEEP, {"x": DEEP},
    "", " ", "x", "\x00", "\ud800", "\udfff\ud83d", "\u202e\u0000\uffff", "🌍" * 50, "a" * 5000, "<|im_end|>",
    "<|im_start|>assistant\n", "<tool_call>{", "</tool_call>", "null", "NaN", "1e999", "../../etc/passwd",
    "%s%n", "sk-ant-" + "a" * 40, "\r\n\r\n", "data: [DONE]\n\n", SESSION, RESPONSE, CALL,
    [], {}, [[]], [None], [{}], {"": ""}, {"type": "text"}, {"type": "text", "text": None}, ["a", 1, None],
    {"a": {"b": {"c": [1, 2, {"d": None}]}}}, {"$ref": "#"}, {"type": ["object", None]}, {"enum": []},
    "assistant", "tool", "system", "user", "function", "developer", "required", "none", "auto",
    {"role": "user", "content": "x"}, [{"role": "assistant", "content": None}], {"type": "any"},
    {"type": "function", "function": {"name": "f"}}, [0, 5, 10**9, -3], [49151, 49152, 0], list(range(300)),
]  # fmt: skip
FIELD_NAMES = [
    "messages", "input", "prompt", "prompt_ids", "model", "tools", "n", "stream", "stop", "stop_token_ids",
    "stop_sequences", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "echo",
    "best_of", "max_output_tokens", "tool_choice", "metadata", "user", "system", "role", "content", "type",
    "text", "name", "arguments", "id", "tool_calls", "tool_call_id", "function", "parameters", "properties",
    "input_schema", "seed", "logprobs", "thinking", "previous_response_id", "instructions", "reasoning",
    "tool_use_id", "call_id", "output", "summary", "session_id", "response_id", "score", "thumbs",
    "correction", "channel", "group_id", "slot", "attempt", "sampling", "rewards", "scores", "value",
    "detail", "calls", "parent_id", "client_key", "sampled_ids", "versions", "x", "__proto__", "k\ud800",
    "",
]  # fmt: skip
_JUNK = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\\ud800", b"\xf4\x90\x80\x80", b"/*", b"\x1b[2J"]

_ENCODED = {suffix: [orjson.dumps(body) for body in bodies] for suffix, bodies in BODIES.items()}
_DEFAULT_BODIES = [b"{}"]
_SUFFIXES = sorted(_ENCODED, key=len, reverse=True)


def find_bodies(path: str) -> list[bytes]:
    """Return the encoded valid bodies of a route, or an empty object if the route takes no body."""
    suffix = next((suffix for suffix in _SUFFIXES if path.endswith(suffix)), None)
    return _DEFAULT_BODIES if suffix is None else _ENCODED[suffix]


def make_valid_body(path: str, rng: random.Random) -> bytes:
    return rng.choice(find_bodies(path))


def make_body(path: str, rng: random.Random) -> bytes:
    """Return a valid body for the route with zero or more random changes.

    One in ten is also corrupted, and one in a thousand is replaced by a large body.
    """
    body = orjson.loads(rng.choice(find_bodies(path)))
    if "messages" in body or "input" in body:
        body["stream"] = rng.random() < 0.3
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3, 6))):
        body = _mutate(body, rng)
    raw = json.dumps(body).encode()
    if b"@" in raw:
        depth = rng.choice((50, 900, 1100, 100_000))
        raw = raw.replace(b'"@deep@"', b"[" * depth + b"]" * depth)
        raw = raw.replace(b'"@huge@"', b"9" * 5000)
    draw = rng.random()
    if draw < 0.1:
        return _corrupt(raw, rng)
    if draw < 0.101:
        return _make_large_body(path, rng)
    return raw


def _iter_locations(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) pair in ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        if isinstance(item, dict | list):
            yield from _iter_locations(item)


def _copy(value: Any) -> Any:
    """Copy a JSON value. ``copy.deepcopy`` is ten times slower."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _mutate(body: Any, rng: random.Random) -> Any:
    locations = list(_iter_locations(body))
    if not locations or rng.random() < 0.01:
        return _copy(rng.choice(ODD_VALUES))
    container, key = rng.choice(locations)
    match rng.randrange(8):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[rng.choice(FIELD_NAMES)] = _copy(rng.choice(ODD_VALUES))
        case 2 if isinstance(container, dict):
            container[rng.choice(FIELD_NAMES)] = container.pop(key)
        case 3 if isinstance(container, list):
            container.insert(key, _copy(rng.choice((rng.choice(ODD_VALUES), container[key]))))
        case 4 if isinstance(container, list):
            rng.shuffle(container)
        case 5:
            other, other_key = rng.choice(locations)
            container[key] = _copy(other[other_key])
        case 6 if isinstance(container, list):
            container[key:key] = [_copy(container[key]) for _ in range(rng.choice((2, 16, 130)))]
        case _:
            container[key] = _copy(rng.choice(ODD_VALUES))
    return body


def _corrupt(raw: bytes, rng: random.Random) -> bytes:
    """Corrupt the bytes so that they are probably no longer valid JSON."""
    position = rng.randrange(len(raw)) if raw else 0
    match rng.randrange(9):
        case 0:
            return raw[:position]
        case 1:
            return raw[:position] + rng.choice(_JUNK) + raw[position:]
        case 2:
            return raw[:position] + bytes([rng.randrange(256)]) + raw[position + 1 :]
        case 3:
            return raw[:position] + raw[position + rng.randrange(1, 20) :]
        case 4:
            return b"\xef\xbb\xbf" + raw
        case 5:
            return raw + rng.choice((b"}", b"\n\n", b"{}", b"\x00"))
        case 6:  # a duplicate key
            key = json.dumps(rng.choice(FIELD_NAMES)).encode()
            return raw.replace(b"{", b"{" + key + b": 1, ", 1).replace(b"{", b"{" + key + b": [], ", 1)
        case 7:
            return raw.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-7")))
        case _:
            return rng.randbytes(rng.randrange(1, 400))


def _make_large_body(path: str, rng: random.Random) -> bytes:
    """Return a valid body in which one field is very large. Without a suitable field, it stays unchanged."""
    size = rng.choice((100_000, 400_000, 1_500_000))
    message = {"role": "user", "content": "x"}
    fields: dict[str, list[Callable[[], Any]]] = {
        "messages": [
            lambda: [{"role": "user", "content": "word " * (size // 5)}],
            lambda: [{"role": "user", "content": "🌍é" * (size // 8)}],
            lambda: [message] * (size // 40),
        ],
        "tools": [lambda: [_CHAT_TOOL] * (size // 150)],
        "prompt": [lambda: [7] * (size // 3), lambda: "a" * size],
        "prompt_ids": [lambda: [7] * (size // 3)],
        "input": [lambda: "a" * size, lambda: [message] * (size // 40)],
        "metadata": [lambda: {str(number): "v" for number in range(size // 15)}],
        "calls": [lambda: [_MINIMAL_SUBMITTED] * 256],
        "text": [lambda: "b" * size],
    }
    body = orjson.loads(rng.choice(find_bodies(path)))
    names = [name for name in fields if name in body]
    if names:
        name = rng.choice(names)
        body[name] = rng.choice(fields[name])()
    return orjson.dumps(body)
