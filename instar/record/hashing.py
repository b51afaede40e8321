"""Hashes every prefix of a request's messages, so that requests can be compared.

The canonical chain ignores what agents may change: a reply's reasoning, the whitespace around its content,
the ids of tool calls, the format of their arguments, and the tool names of results. The exact chain covers
every field and determines how many messages a call shares with its base call in the store. The hashes are
keyed, so that they reveal nothing about redacted text.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import orjson

from instar.types import Message, Tool, ToolCall

DIGEST_SIZE = 16
_PROMPT_DIGEST = struct.Struct(f"<{DIGEST_SIZE}sQ{DIGEST_SIZE}s")


@dataclass(frozen=True, slots=True)
class HashChain:
    """The hashes of all request prefixes: ``canonical[k]`` and ``exact[k]`` cover the first k messages."""

    tools_digest: bytes
    canonical: list[bytes]
    exact: list[bytes]
    digests: list[bytes]
    """One entry per message: its canonical digest followed by its exact digest."""

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def key(self) -> bytes:
        return self.canonical[-1] + self.tools_digest

    def prefix(self, count: int) -> HashChain:
        return HashChain(
            self.tools_digest, self.canonical[: count + 1], self.exact[: count + 1], self.digests[:count]
        )

    def extend(self, digests: Iterable[bytes]) -> HashChain:
        canonical, exact, all_digests = [*self.canonical], [*self.exact], [*self.digests]
        for digest in digests:
            canonical.append(_combine(canonical[-1], digest[:DIGEST_SIZE]))
            exact.append(_combine(exact[-1], digest[DIGEST_SIZE:]))
            all_digests.append(digest)
        return HashChain(self.tools_digest, canonical, exact, all_digests)

    def with_tools(self, tools_digest: bytes) -> HashChain:
        return replace(self, tools_digest=tools_digest)

    def pack(self, start: int) -> bytes:
        """Return the value of ``Call.digests``: the digest of the tools and the digests of the messages from
        index ``start`` on. The last message in the chain is the reply."""
        return b"".join([self.tools_digest, *self.digests[start:]])


def unpack_digests(packed: bytes) -> tuple[bytes, list[bytes]]:
    """Return the digest of the tools, and the digests of the messages and the reply."""
    starts = range(DIGEST_SIZE, len(packed), 2 * DIGEST_SIZE)
    return packed[:DIGEST_SIZE], [packed[start : start + 2 * DIGEST_SIZE] for start in starts]


def is_prompt_digest(packed: bytes) -> bool:
    return len(packed) == _PROMPT_DIGEST.size


def unpack_prompt_digest(packed: bytes) -> tuple[bytes, tuple[int, bytes]]:
    """Return the digest of the prompt, and the length (in characters) and digest of prompt + reply."""
    prompt, length, prompt_and_reply = _PROMPT_DIGEST.unpack(packed)
    return prompt, (length, prompt_and_reply)


class MessageHasher:
    def __init__(self, key: bytes = b"") -> None:
        self._key = key
        self._no_tools = self._hash(())

    def empty_chain(
        self, tools: Sequence[Tool] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> HashChain:
        start = bytes(DIGEST_SIZE)
        return HashChain(self.hash_tools(tools, template_kwargs), [start], [start], [])

    def hash_messages(
        self,
        messages: Iterable[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> HashChain:
        return self.empty_chain(tools, template_kwargs).extend(map(self.hash_message, messages))

    def hash_tools(self, tools: Sequence[Tool], template_kwargs: Mapping[str, Any] | None = None) -> bytes:
        """Return the digest of the tools and of the template's variables, which both affect the prompt."""
        if template_kwargs:
            return self._hash([tools, template_kwargs])
        return self._hash(tools) if tools else self._no_tools

    def hash_message(self, message: Message) -> bytes:
        """Return the canonical digest of the message followed by its exact digest."""
        canonical = self._hash(canonical_content(message))
        if message["role"] == "assistant":
            return canonical + self._hash(message)
        # The canonical content omits only the tool call id and the tool name.
        omitted = [message.get("tool_call_id"), message.get("name")]
        return canonical + (canonical if omitted == [None, None] else self._hash([canonical.hex(), omitted]))

    def hash_text(self, text: str) -> bytes:
        return self.hash_bytes(text.encode("utf-8", "surrogatepass"))

    def pack_prompt_digest(self, prompt: str, reply: str) -> bytes:
        """Return the value of ``Call.digests`` for a prompt that was sent as text."""
        prompt_and_reply = prompt + reply
        length, digest = len(prompt_and_reply), self.hash_text(prompt_and_reply)
        return _PROMPT_DIGEST.pack(self.hash_text(prompt), length, digest)

    def hash_bytes(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_SIZE, key=self._key).digest()

    def _hash(self, value: Any) -> bytes:
        # JSON allows integers beyond 64 bits and lone surrogates; orjson does not.
        try:
            packed = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        except TypeError:
            packed = json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")
        return self.hash_bytes(packed)


def canonical_content(message: Message) -> list[Any]:
    """Return the parts of a message that agents do not change when they send it back."""
    role = message["role"]
    if role == "assistant":
        calls = [[call["name"], parse_arguments(call)] for call in message.get("tool_calls", ())]
        return [role, message["content"].strip(), calls]
    return [role, message["content"], message.get("name") if role != "tool" else None]


def parse_arguments(call: ToolCall) -> Any:
    """Return the arguments as a JSON value, or as text if they are not JSON."""
    try:
        return json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call["arguments"]


def _combine(prefix_hash: bytes, digest: bytes) -> bytes:
    return blake2b(prefix_hash + digest, digest_size=DIGEST_SIZE).digest()


def normalize_call_id(call_id: str) -> str:
    """Keep only the letters and digits of an id, because some agents drop all other characters."""
    return "".join(filter(str.isalnum, call_id))


def tool_call_ids(message: Message) -> tuple[str, ...]:
    return tuple(call["id"] for call in message.get("tool_calls", ()))


def latest_tool_call_ids(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the tool call ids in the last message that has any, or an empty tuple."""
    return next((tool_call_ids(message) for message in reversed(messages) if message.get("tool_calls")), ())
