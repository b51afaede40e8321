"""A recorded call as the message graph keeps it, and when two messages are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from instar.record.hashing import parse_arguments
from instar.types import Ids, Json, Message, ToolCall

EMPTY_IDS: Ids = np.empty(0, np.int32)
REDACTED = "redacted from message "
"""How the reason of a call begins that is not trainable because of a redacted span."""


@dataclass(slots=True)
class CallNode:
    call_id: str
    request_id: str
    parent_id: str | None
    client_key: str | None
    is_ok: bool
    has_tokens: bool
    """Whether its tokens are at hand."""
    is_stored: bool
    """Whether they are in the store, for others to stand on."""
    base: CallNode | None
    base_tokens: int
    base_messages: int
    prompt: Ids
    """Beyond the base's first ``base_tokens``."""
    sampled: Ids
    tools: bytes
    exact: list[bytes]
    """The exact chain beyond ``base_messages``, the reply included."""
    reply: Message | None
    """Kept where it has tool calls: an agent may give it back changed."""
    digest: bytes
    """Of the reply."""
    messages: int
    first_redacted_message: int | None = None
    """The first message with a redacted span; the reply's place is behind the messages."""
    prompt_and_reply: tuple[int, bytes] | None = None
    """Length and digest of prompt + reply, where the prompt was given as text."""

    def prompt_ids(self) -> Ids:
        whole = self.sequence()
        return whole[: len(whole) - len(self.sampled)]

    def sequence(self, length: int | None = None) -> Ids:
        """Prompt + sampled tokens, or the first ``length`` of them. Not recursive: sessions are long."""
        pieces: list[Ids] = []
        node: CallNode | None = self
        wanted = length
        while node is not None:
            room = len(node.prompt) + len(node.sampled)
            end = room if wanted is None else wanted - node.base_tokens
            if end > 0:
                if end > len(node.prompt):
                    pieces.append(node.sampled[: end - len(node.prompt)])
                pieces.append(node.prompt[:end])
                wanted = node.base_tokens
            node = node.base
        return np.concatenate(pieces[::-1]) if pieces else EMPTY_IDS

    def shared_messages(self, exact: Sequence[bytes]) -> int:
        """How many leading messages equal those of this call and its reply, byte for byte."""
        node: CallNode | None = self
        limit = len(exact) - 1
        while node is not None:
            for i in range(min(len(node.exact), limit - node.base_messages) - 1, -1, -1):
                count = node.base_messages + i + 1
                if node.exact[i] == exact[count]:
                    return count
            limit = min(limit, node.base_messages)
            node = node.base
        return 0


def choose_parent(candidates: Sequence[CallNode], ids: tuple[str, ...]) -> CallNode:
    """The newest, if possible a finished one with the very tool call ids."""
    return max(enumerate(candidates), key=lambda pair: (_reply_ids(pair[1]) == ids, pair[1].is_ok, pair[0]))[
        1
    ]


def redaction_reason(at: int, reason: str | None) -> str:
    """The reason of a call that holds a redacted span, in message ``at`` at first, and ``reason`` beside."""
    return f"{REDACTED}{at}: {reason or 'it holds a secret'}"


def parse_redaction_reason(reason: str | None) -> int | None:
    if reason is None or not reason.startswith(REDACTED):
        return None
    return int(reason.removeprefix(REDACTED).partition(":")[0])


def redacted_within(node: CallNode, count: int) -> int | None:
    """Where the first redacted span of its first ``count`` messages is."""
    return (
        node.first_redacted_message
        if node.first_redacted_message is not None and node.first_redacted_message < count
        else None
    )


def _reply_ids(node: CallNode) -> tuple[str, ...]:
    return tool_call_ids(node.reply) if node.reply else ()


def normalize_call_id(call_id: str) -> str:
    """Some agents drop all but letters and digits."""
    return "".join(filter(str.isalnum, call_id))


def matches_reply(message: Message, reply: Message) -> bool:
    given, made = message.get("tool_calls", ()), reply.get("tool_calls", ())
    return (
        message["content"].strip() == reply["content"].strip()
        and len(given) == len(made)
        and all(_is_call(a, b) for a, b in zip(given, made, strict=True))
    )


def _is_call(given: ToolCall, made: ToolCall) -> bool:
    if given["name"] != made["name"] or normalize_call_id(given["id"]) != normalize_call_id(made["id"]):
        return False
    arguments, generated = parse_arguments(given), parse_arguments(made)
    if not isinstance(arguments, dict) or not isinstance(generated, dict):
        return arguments == generated
    given_members = cast(Json, arguments)
    return all(
        name in given_members and given_members[name] == value
        for name, value in cast(Json, generated).items()
    )


def tool_call_ids(message: Message) -> tuple[str, ...]:
    return tuple(call["id"] for call in message.get("tool_calls", ()))


def common_prefix_length(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
