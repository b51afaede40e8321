"""The message graph of one session: which recorded call does a request continue?

Requests are compared by chains of hashes over their messages, seeded with their tools. In the canonical
chain, an assistant's message counts by what it says: white space around its content, the ids of its tool
calls and the way their arguments are spaced do not matter, for agents change those in passing. The exact
chain sees every byte; it decides how much of its base's messages a call may leave to the store.

Memory is linear in what the session recorded: a call keeps its own tokens and hashes and refers to its
base for the rest.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import orjson

from instar.record.base import Graph, Placement, Renderer
from instar.types import Call, CallStatus, Ids, Link, Message, Tool

_RECENT = 8
"""Calls looked at for a shared prefix when the messages give no hint."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Hashes of every prefix of a message list; index k stands for the first k messages."""

    canonical: list[bytes]
    exact: list[bytes]

    def then(self, message: Message) -> Chain:
        return Chain(
            [*self.canonical, _hash(self.canonical[-1], canonical(message))],
            [*self.exact, _hash(self.exact[-1], message)],
        )

    @staticmethod
    def of(messages: Iterable[Message], tools: Sequence[Tool]) -> Chain:
        seed = _hash(b"", tools)
        loose, exact = [seed], [seed]
        for message in messages:
            loose.append(_hash(loose[-1], canonical(message)))
            exact.append(_hash(exact[-1], message))
        return Chain(loose, exact)


def canonical(message: Message) -> list[Any]:
    """What a message says, without what agents change in passing."""
    role = message["role"]
    if role == "assistant":
        calls = [[call["name"], _arguments(call["arguments"])] for call in message.get("tool_calls", ())]
        return [role, message["content"].strip(), calls]
    return [role, message["content"], message.get("name") if role != "tool" else None]


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _hash(before: bytes, value: Any) -> bytes:
    # Integers beyond 64 bits, which JSON allows and orjson does not, take the slow way.
    try:
        packed = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        packed = json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")
    return blake2b(before + packed, digest_size=16).digest()


@dataclass(slots=True)
class Node:
    call_id: str
    request_id: str
    parent_id: str | None
    ok: bool
    base: Node | None
    base_tokens: int
    base_messages: int
    prompt: Ids
    """Beyond the base's first ``base_tokens``."""
    sampled: Ids
    exact: list[bytes]
    """The exact chain beyond ``base_messages``, the reply included."""
    reply_ids: tuple[str, ...]
    messages: int

    def prompt_ids(self) -> Ids:
        if self.base is None:
            return self.prompt
        return np.concatenate([self.base.sequence(self.base_tokens), self.prompt])

    def sequence(self, length: int | None = None) -> Ids:
        """Prompt + sampled tokens, or the first ``length`` of them. Not recursive: sessions are long."""
        pieces: list[Ids] = []
        node: Node | None = self
        wanted = length
        while node is not None:
            own = np.concatenate([node.prompt, node.sampled])
            end = len(own) if wanted is None else wanted - node.base_tokens
            if end > 0:
                pieces.append(own[:end])
                wanted = node.base_tokens
            node = node.base
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)

    def shared_messages(self, exact: Sequence[bytes]) -> int:
        """How many leading messages equal those of this call and its reply, byte for byte."""
        node: Node | None = self
        limit = len(exact) - 1
        while node is not None:
            for i in range(min(len(node.exact), limit - node.base_messages) - 1, -1, -1):
                count = node.base_messages + i + 1
                if node.exact[i] == exact[count]:
                    return count
            limit = min(limit, node.base_messages)
            node = node.base
        return 0


class MessageGraph(Graph):
    def __init__(self, calls: Iterable[Call] = ()) -> None:
        """``calls``: those recorded already, in the order they were committed."""
        self._nodes: dict[str, Node] = {}
        self._asked: defaultdict[bytes, list[Node]] = defaultdict(list)
        self._answered: defaultdict[bytes, list[Node]] = defaultdict(list)
        self._said: dict[bytes, Node] = {}
        self._in_flight: Counter[bytes] = Counter()
        self._finished: set[str] = set()
        for call in calls:
            self.add(call)

    @staticmethod
    def keys(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
        return Chain.of(messages, tools).canonical[1:]

    @property
    def requests(self) -> int:
        return len(self._finished)

    def place(self, messages: Sequence[Message], tools: Sequence[Tool], renderer: Renderer) -> Placement:
        chain = Chain.of(messages, tools)
        placement = self._sibling(chain) or self._extension(chain, messages, tools, renderer)
        if placement is None:
            placement = self._branch(chain, messages, tools, renderer)
        self._in_flight[placement.key] += 1
        return placement

    def release(self, placement: Placement) -> None:
        self._in_flight[placement.key] -= 1
        if self._in_flight[placement.key] <= 0:
            del self._in_flight[placement.key]

    def recorded(self, key: bytes) -> list[str]:
        finished = [node for node in self._asked.get(key, ()) if node.ok]
        if not finished:
            return []
        return [node.call_id for node in finished if node.request_id == finished[-1].request_id]

    def add(self, call: Call) -> None:
        chain = Chain.of(call.messages, call.tools)
        key = chain.canonical[-1]
        whole = chain.then(call.reply)
        base = self._nodes[call.base_id] if call.base_id else None
        node = Node(
            call_id=call.call_id,
            request_id=call.request_id,
            parent_id=call.parent_id,
            ok=call.status is CallStatus.OK,
            base=base,
            base_tokens=call.base_tokens,
            base_messages=call.base_messages,
            # Copies: a slice would keep the whole prompt alive.
            prompt=call.prompt_ids[call.base_tokens :].copy(),
            sampled=call.sampled_ids,
            exact=whole.exact[1 + call.base_messages :],
            reply_ids=_call_ids(call.reply),
            messages=len(call.messages),
        )
        self._nodes[call.call_id] = node
        self._asked[key].append(node)
        self._answered[whole.canonical[-1]].append(node)
        for prefix in whole.canonical[1:]:
            self._said.setdefault(prefix, node)
        if node.ok:
            self._finished.add(call.request_id)

    def _sibling(self, chain: Chain) -> Placement | None:
        """The same messages again: the same prompt, beside the call that asked first."""
        key = chain.canonical[-1]
        if not (same := self._asked.get(key)):
            return None
        node = same[-1]
        prompt = node.prompt_ids()
        return Placement(
            prompt_ids=prompt,
            link=Link.SIBLING,
            parent_id=node.parent_id,
            base_id=node.call_id,
            base_tokens=len(prompt),
            base_messages=min(node.shared_messages(chain.exact), node.messages),
            key=key,
        )

    def _extension(
        self, chain: Chain, messages: Sequence[Message], tools: Sequence[Tool], renderer: Renderer
    ) -> Placement | None:
        """Behind the call whose messages and reply are the longest prefix of these."""
        key = chain.canonical[-1]
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] != "assistant":
                continue
            if not (candidates := self._answered.get(chain.canonical[count])):
                continue
            parent = _best(candidates, _call_ids(messages[count - 1]))
            before = parent.sequence()
            prompt = renderer.extend(
                before[: len(before) - len(parent.sampled)].tolist(),
                parent.sampled.tolist(),
                messages[count:],
                tools,
            )
            if prompt is None:
                return None
            return Placement(
                prompt_ids=np.asarray(prompt, np.int32),
                link=Link.SIBLING if self._in_flight[key] else Link.EXTENDS,
                parent_id=parent.call_id,
                base_id=parent.call_id,
                base_tokens=len(before),
                base_messages=parent.shared_messages(chain.exact),
                key=key,
            )
        return None

    def _branch(
        self, chain: Chain, messages: Sequence[Message], tools: Sequence[Tool], renderer: Renderer
    ) -> Placement:
        """Rendered anew. What it shares with a recorded call is left to that one in the store."""
        key = chain.canonical[-1]
        prompt = np.asarray(renderer.render(messages, tools), np.int32)
        if not self._nodes:
            link = Link.SIBLING if self._in_flight[key] else Link.ROOT
            return Placement(prompt_ids=prompt, link=link, key=key)
        said = next(
            (node for prefix in reversed(chain.canonical[1:]) if (node := self._said.get(prefix))), None
        )
        candidates = [said] if said else islice(reversed(self._nodes.values()), _RECENT)
        shared, base = max(
            ((_common_prefix(node.sequence(), prompt), node) for node in candidates), key=lambda pair: pair[0]
        )
        link = Link.SIBLING if self._in_flight[key] else Link.BRANCH
        return Placement(
            prompt_ids=prompt,
            link=link,
            base_id=base.call_id,
            base_tokens=shared,
            base_messages=base.shared_messages(chain.exact),
            key=key,
        )


def _best(candidates: Sequence[Node], ids: tuple[str, ...]) -> Node:
    """The newest, if possible a finished one with the very tool call ids."""
    return max(enumerate(candidates), key=lambda pair: (pair[1].reply_ids == ids, pair[1].ok, pair[0]))[1]


def _call_ids(message: Message) -> tuple[str, ...]:
    return tuple(call["id"] for call in message.get("tool_calls", ()))


def _common_prefix(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
