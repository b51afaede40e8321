"""Nodes of the message graph, and functions that compare messages with recorded replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from instar.record.base import Messages, Placement, Renderer, Tools
from instar.record.hashing import normalize_call_id, parse_arguments, tool_call_ids
from instar.types import Ids, Json, Message, ToolCall

EMPTY_IDS: Ids = np.empty(0, np.int32)
_MAX_BRIDGE_TOKENS = 1024
"""A renderer needs at most this many tokens from the end of a prompt to continue it."""


@dataclass(slots=True)
class CallNode:
    """A recorded call. It contains only the tokens and hashes that are not in its base call."""

    call_id: str
    request_id: str
    parent_id: str | None
    client_key: str | None
    is_ok: bool
    has_tokens: bool
    """True if the tokens of the prompt are known."""
    is_stored: bool
    """True if the tokens are in the store, so that other calls can refer to them."""
    base: CallNode | None
    base_tokens: int
    base_messages: int
    prompt: Ids
    """The prompt without the first ``base_tokens`` tokens, which it shares with the base call."""
    sampled: Ids
    reply: Message | None
    """The reply if it has tool calls, else None. Digests are not enough to recognize such a reply, because
    agents may add arguments to its calls."""
    message_count: int
    first_redacted_message: int | None
    """Index of the first redacted message, or None. Tools count as 0, and the reply as ``message_count``."""
    tools_digest: bytes = b""
    reply_digest: bytes = b""
    exact: list[bytes] = field(default_factory=list[bytes])
    """The part of the exact chain after ``base_messages``, including the reply."""
    prompt_and_reply: tuple[int, bytes] | None = None
    """The length and the digest of prompt + reply if the prompt was sent as text, else None."""

    def prompt_ids(self) -> Ids:
        sequence = self.sequence()
        return sequence[: len(sequence) - len(self.sampled)]

    def sequence(self) -> Ids:
        """Return the prompt and the sampled tokens."""
        # This is not recursive, because a session can have more calls than the recursion limit.
        pieces = [self.sampled, self.prompt]
        node, needed = self.base, self.base_tokens
        while node is not None:
            end = needed - node.base_tokens
            if end > 0:
                if end > len(node.prompt):
                    pieces.append(node.sampled[: end - len(node.prompt)])
                pieces.append(node.prompt[:end])
                needed = node.base_tokens
            node = node.base
        return np.concatenate(pieces[::-1])

    def count_shared_messages(self, exact: Sequence[bytes]) -> int:
        """Return how many leading messages of the exact chain this call shares, counting its reply."""
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

    def first_redacted_within(self, count: int) -> int | None:
        """Return the index of the first redacted message if it is less than ``count``, else None."""
        first = self.first_redacted_message
        return first if first is not None and first < count else None


def choose_parent(candidates: Sequence[CallNode], call_ids: tuple[str, ...]) -> CallNode:
    """Return the best candidate: prefer a reply with these tool call ids, then success, then the newest."""

    def rank(node: CallNode) -> tuple[bool, bool]:
        return (tool_call_ids(node.reply) if node.reply else ()) == call_ids, node.is_ok

    return max(reversed(candidates), key=rank)


def matches_reply(message: Message, reply: Message) -> bool:
    """Return True if an agent's message is the reply, which has tool calls. Some agents add arguments to the
    calls or drop the text beside them."""
    received, sent = message.get("tool_calls", ()), reply.get("tool_calls", ())
    return (
        message["content"].strip() in ("", reply["content"].strip())
        and len(received) == len(sent)
        and all(_matches_call(*pair) for pair in zip(received, sent, strict=True))
    )


def _matches_call(received: ToolCall, sent: ToolCall) -> bool:
    same_id = normalize_call_id(received["id"]) == normalize_call_id(sent["id"])
    if received["name"] != sent["name"] or not same_id:
        return False
    received_arguments, sent_arguments = parse_arguments(received), parse_arguments(sent)
    if not isinstance(received_arguments, dict) or not isinstance(sent_arguments, dict):
        return received_arguments == sent_arguments
    return cast(Json, sent_arguments).items() <= cast(Json, received_arguments).items()


def common_prefix_length(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def extend_prompt(
    placement: Placement, parent: CallNode, messages: Messages, count: int, tools: Tools, renderer: Renderer
) -> Placement | None:
    """Return the placement with a prompt that continues the parent, or None if there is no exact
    continuation. ``messages[count:]`` follow the parent's reply."""
    if not parent.has_tokens:
        return None
    tokens = parent.sequence()
    prompt = tokens[: len(tokens) - len(parent.sampled)]
    prompt_end = (prompt if renderer.drops_reasoning else prompt[-_MAX_BRIDGE_TOKENS:]).tolist()
    sampled = parent.sampled.tolist()
    extended = renderer.extend(prompt_end, sampled, messages[count:], tools, messages[count - 1])
    if extended is not None:
        added = np.asarray(extended[len(prompt_end) + len(sampled) :], np.int32)
        prompt = np.concatenate([tokens, added])
    elif any(message["role"] == "assistant" for message in messages[count:]):
        return None  # the agent wrote one of the replies itself
    else:
        # The rendered conversation may still begin with exactly these tokens.
        prompt = np.asarray(renderer.render(messages, tools), np.int32)
        if not np.array_equal(prompt[: len(tokens)], tokens):
            return None
    return replace(placement, prompt_ids=prompt, base_tokens=len(tokens) if parent.is_stored else 0)
