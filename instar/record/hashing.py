"""What requests are compared by: hashes of every prefix of their messages.

In the canonical chain, an assistant's message counts by what it says: white space around its content, the
ids of its tool calls and the way their arguments are spaced do not matter, for agents change those in
passing. The exact chain sees every byte; it decides how much of its base's messages a call may leave to the
store. The hashes are keyed, so that they tell nothing of a text that was redacted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from instar.types import Message, Tool, ToolCall

DIGEST_SIZE = 16
_PAIR = 2 * DIGEST_SIZE
_PROMPT = struct.Struct(f"<{DIGEST_SIZE}sQ{DIGEST_SIZE}s")


@dataclass(frozen=True, slots=True)
class HashChain:
    """Index k of ``canonical`` and ``exact`` stands for the first k messages; ``digests`` holds the two
    hashes of each message alone."""

    tools_digest: bytes
    canonical: list[bytes]
    exact: list[bytes]
    digests: list[bytes]

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def key(self) -> bytes:
        """Stands for the whole request."""
        return self.canonical[-1] + self.tools_digest

    def prefix(self, count: int) -> HashChain:
        return HashChain(
            self.tools_digest, self.canonical[: count + 1], self.exact[: count + 1], self.digests[:count]
        )

    def extend(self, digests: Iterable[bytes]) -> HashChain:
        canonical, exact, own = [*self.canonical], [*self.exact], [*self.digests]
        for digest in digests:
            canonical.append(_link(canonical[-1], digest[:DIGEST_SIZE]))
            exact.append(_link(exact[-1], digest[DIGEST_SIZE:]))
            own.append(digest)
        return HashChain(self.tools_digest, canonical, exact, own)

    def with_tools(self, tools: bytes) -> HashChain:
        return HashChain(tools, self.canonical, self.exact, self.digests)

    def pack(self, since: int) -> bytes:
        """For ``Call.digests``, of a chain that ends with the reply: the tools', then those of the messages
        from ``since`` on."""
        return b"".join([self.tools_digest, *self.digests[since:]])


def unpack_digests(packed: bytes) -> tuple[bytes, list[bytes]]:
    """``Call.digests`` → the tools' digest and those of the messages and the reply."""
    return packed[:DIGEST_SIZE], [packed[at : at + _PAIR] for at in range(DIGEST_SIZE, len(packed), _PAIR)]


def is_prompt_digest(packed: bytes) -> bool:
    """Whether ``Call.digests`` are those of a prompt given as text."""
    return len(packed) == _PROMPT.size


def unpack_prompt_digest(packed: bytes) -> tuple[bytes, tuple[int, bytes]]:
    """The prompt's digest; length and digest of prompt and reply together."""
    prompt, length, whole = _PROMPT.unpack(packed)
    return prompt, (length, whole)


class MessageHasher:
    def __init__(self, key: bytes = b"") -> None:
        self._key = key
        self._none = self._hash(())

    def empty_chain(self, tools: Sequence[Tool] = ()) -> HashChain:
        start = bytes(DIGEST_SIZE)
        return HashChain(self.hash_tools(tools), [start], [start], [])

    def hash_messages(self, messages: Iterable[Message], tools: Sequence[Tool] = ()) -> HashChain:
        return self.empty_chain(tools).extend(map(self.hash_message, messages))

    def hash_tools(self, tools: Sequence[Tool]) -> bytes:
        return self._hash(tools) if tools else self._none

    def hash_message(self, message: Message) -> bytes:
        """The canonical digest and the exact one."""
        said = self._hash(canonical_content(message))
        if message["role"] == "assistant":
            return said + self._hash(message)
        # All but the id of the call it answers, and a tool's name, is in what it says.
        rest = [message.get("tool_call_id"), message.get("name")]
        return said + (said if rest == [None, None] else self._hash([said.hex(), rest]))

    def hash_text(self, text: str) -> bytes:
        return self.hash_bytes(text.encode("utf-8", "surrogatepass"))

    def pack_prompt(self, prompt: str, reply: str) -> bytes:
        """For ``Call.digests`` where the prompt was given as text."""
        whole = prompt + reply
        return _PROMPT.pack(self.hash_text(prompt), len(whole), self.hash_text(whole))

    def hash_bytes(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_SIZE, key=self._key).digest()

    def _hash(self, value: Any) -> bytes:
        # Integers beyond 64 bits and lone surrogates, which JSON allows and orjson does not, go the slow way.
        try:
            packed = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        except TypeError:
            packed = json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")
        return self.hash_bytes(packed)


def canonical_content(message: Message) -> list[Any]:
    """What a message says, without what agents change in passing."""
    role = message["role"]
    if role == "assistant":
        calls = [[call["name"], parse_arguments(call)] for call in message.get("tool_calls", ())]
        return [role, message["content"].strip(), calls]
    return [role, message["content"], message.get("name") if role != "tool" else None]


def parse_arguments(call: ToolCall) -> Any:
    """As the value they stand for; what is no JSON stays text."""
    try:
        return json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call["arguments"]


def _link(before: bytes, digest: bytes) -> bytes:
    return blake2b(before + digest, digest_size=DIGEST_SIZE).digest()
