"""The message graph of one session, which finds the recorded call that a request continues.

Requests are compared by their hash chains (`record.hashing`), and prompts without messages by text or tokens.
The memory use of a graph is linear in the size of the recorded session.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from instar.record import hashing, nodes
from instar.record.base import Messages, Placement, Renderer, Tools
from instar.record.hashing import DIGEST_SIZE, HashChain, MessageHasher, normalize_call_id, tool_call_ids
from instar.record.nodes import EMPTY_IDS, CallNode, common_prefix_length
from instar.record.redact import parse_redaction_reason
from instar.store.base import CallDelta
from instar.types import Call, CallStatus, Ids, Link

_CALL_BYTES, _MESSAGE_BYTES = 700, 150
"""The memory of a call without its tokens, and of the hashes of a message."""
_RECENT_CALLS = 8
"""The number of recent calls to search for a shared prefix if all messages are new."""
_RECENT_PROMPTS = 64
"""The number of recent calls to compare with a prompt without messages."""


class MessageGraph:
    def __init__(self, hasher: MessageHasher, recorded: Iterable[CallDelta] = ()) -> None:
        """Create a graph from the calls that are already in the store, in commit order."""
        self._hasher = hasher
        self._nodes: dict[str, CallNode] = {}
        self._by_request: defaultdict[bytes, list[CallNode]] = defaultdict(list)
        self._by_conversation: defaultdict[bytes, list[CallNode]] = defaultdict(list)
        """Calls by the canonical hash of their messages and reply."""
        self._by_prefix: dict[bytes, CallNode] = {}
        self._by_tool_call: dict[str, CallNode] = {}
        self._in_flight: Counter[bytes] = Counter()
        self._successful_requests: set[str] = set()
        self.undelivered: set[bytes] = set()
        """The keys of requests whose clients disconnected before they received the reply."""
        self.size = 0
        """The approximate memory in bytes."""
        self._restore(recorded)

    @property
    def next_request_number(self) -> int:
        """The number of the next request, which is the number of requests that succeeded or are in flight."""
        return self.successful_request_count + self._in_flight.total()

    @property
    def successful_request_count(self) -> int:
        return len(self._successful_requests)

    def count_known(self, chain: HashChain) -> int:
        """Count the leading messages of a request that are already recorded. Return 0 if its tools differ."""
        known = self._count_recorded(chain)
        node = self._by_prefix.get(chain.canonical[known])
        return known if node is not None and node.tools_digest == chain.tools_digest else 0

    def _count_recorded(self, chain: HashChain) -> int:
        known = len(chain)
        while known and chain.canonical[known] not in self._by_prefix:
            known -= 1
        return known

    def match_replies(self, chain: HashChain, messages: Messages) -> HashChain:
        """Return the chain with the recorded digests of replies that the agent changed (`matches_reply`)."""
        known = self._count_recorded(chain)
        digests = chain.digests[known:]
        for i, message in enumerate(messages[known:]):
            node = self._by_tool_call.get(next(map(normalize_call_id, tool_call_ids(message)), ""))
            if node and node.reply and nodes.matches_reply(message, node.reply):
                digests[i] = node.reply_digest[:DIGEST_SIZE] + digests[i][DIGEST_SIZE:]
        return chain if digests == chain.digests[known:] else chain.prefix(known).extend(digests)

    def place(
        self, chain: HashChain, messages: Messages, tools: Tools, renderer: Renderer | None
    ) -> Placement:
        """Find the position of a request in the graph. The placement has no tokens if ``renderer`` is None.
        The graph is not changed, so a thread can place a request while calls are added."""
        placement = self._place_sibling(chain, messages, tools, renderer)
        placement = placement or self._place_extension(chain, messages, tools, renderer)
        return placement or self._place_root_or_branch(chain, messages, tools, renderer)

    def place_prompt(self, prompt: str | Sequence[int], renderer: Renderer) -> Placement:
        """Find the position of a prompt without messages. It is a sibling of a call with the same prompt, or
        else extends the recent call whose prompt and reply are its longest prefix."""
        parent = self._find_text_parent(prompt) if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            rest = prompt[parent.prompt_and_reply[0] :] if parent and parent.prompt_and_reply else prompt
            ids = np.asarray(renderer.encode(rest), np.int32)
            ids = np.concatenate([parent.sequence(), ids]) if parent else ids
        else:
            ids = np.asarray(prompt, np.int32)
            parent = self._find_token_parent(ids)
        key = self._prompt_key(prompt if isinstance(prompt, str) else ids)
        if recorded := self._by_request.get(key):
            node = recorded[-1]
            ids = node.prompt_ids() if node.has_tokens else ids
            return _create_placement(node, Link.SIBLING, key, ids, len(ids) if node.is_stored else 0)
        if parent is None:
            return Placement(ids, Link.BRANCH if self._nodes else Link.ROOT, key=key)
        shared = len(parent.sequence()) if parent.is_stored else 0
        return _create_placement(parent, Link.EXTENDS, key, ids, shared)

    def attach_prompt(self, placement: Placement, prompt_ids: Ids) -> Placement:
        """Add the prompt that a provider returned. An extension becomes a branch if its tokens differ."""
        base = self._nodes.get(placement.base_id or "")
        shared = _stored_prefix_length(base, prompt_ids) if base else 0
        link = placement.link
        if link is Link.EXTENDS and (base is None or shared < len(base.sequence())):
            link = Link.BRANCH
        return replace(placement, prompt_ids=prompt_ids, link=link, base_tokens=shared)

    def register(self, placement: Placement) -> Placement:
        """Count a request as in flight until `release`. It becomes a sibling if an equal one is in flight."""
        if self._in_flight[placement.key]:
            placement = replace(placement, link=Link.SIBLING)
        self._in_flight[placement.key] += 1
        return placement

    def release(self, placement: Placement) -> None:
        self._in_flight[placement.key] -= 1
        if self._in_flight[placement.key] <= 0:
            del self._in_flight[placement.key]

    def _place_sibling(
        self, chain: HashChain, messages: Messages, tools: Tools, renderer: Renderer | None
    ) -> Placement | None:
        if not (recorded := self._by_request.get(chain.key)):
            return None
        node = recorded[-1]
        shared = min(node.count_shared_messages(chain.exact), node.message_count)
        if renderer is None:
            prompt = EMPTY_IDS
        elif node.has_tokens:
            prompt = node.prompt_ids()
        else:  # The earlier request contained a secret, or a provider rendered its prompt.
            prompt = np.asarray(renderer.render(messages, tools), np.int32)
        base_tokens = len(prompt) if node.is_stored and node.has_tokens else 0
        return _create_placement(node, Link.SIBLING, chain.key, prompt, base_tokens, shared)

    def _place_extension(
        self, chain: HashChain, messages: Messages, tools: Tools, renderer: Renderer | None
    ) -> Placement | None:
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] != "assistant":
                continue
            recorded = self._by_conversation.get(chain.canonical[count], ())
            if not (candidates := [node for node in recorded if node.tools_digest == chain.tools_digest]):
                continue
            parent = nodes.choose_parent(candidates, tool_call_ids(messages[count - 1]))
            shared = parent.count_shared_messages(chain.exact)
            placement = _create_placement(parent, Link.EXTENDS, chain.key, EMPTY_IDS, 0, shared)
            if renderer is None:
                return placement
            return nodes.extend_prompt(placement, parent, messages, count, tools, renderer)
        return None

    def _place_root_or_branch(
        self, chain: HashChain, messages: Messages, tools: Tools, renderer: Renderer | None
    ) -> Placement:
        prompt = np.asarray(renderer.render(messages, tools), np.int32) if renderer else EMPTY_IDS
        if not self._nodes:
            return Placement(prompt_ids=prompt, link=Link.ROOT, key=chain.key)
        prefix_nodes = map(self._by_prefix.get, reversed(chain.canonical[1:]))
        longest = next(filter(None, prefix_nodes), None)
        candidates = [longest] if longest else self._newest_nodes(_RECENT_CALLS)
        shared_tokens, base = max(
            ((_stored_prefix_length(node, prompt), node) for node in candidates), key=lambda pair: pair[0]
        )
        shared_messages = base.count_shared_messages(chain.exact)
        return _create_placement(base, Link.BRANCH, chain.key, prompt, shared_tokens, shared_messages)

    def _find_text_parent(self, prompt: str) -> CallNode | None:
        recent = self._newest_nodes(_RECENT_PROMPTS)
        candidates = [
            (node, *node.prompt_and_reply) for node in recent if node.prompt_and_reply and node.has_tokens
        ]
        for node, length, digest in sorted(candidates, key=lambda candidate: -candidate[1]):
            if length <= len(prompt) and self._hasher.hash_text(prompt[:length]) == digest:
                return node
        return None

    def _find_token_parent(self, prompt: Ids) -> CallNode | None:
        best: CallNode | None = None
        longest = 0
        for node in self._newest_nodes(_RECENT_PROMPTS):
            if not node.is_stored:
                continue
            sequence = node.sequence()
            fits = longest < len(sequence) <= len(prompt)
            if fits and np.array_equal(sequence, prompt[: len(sequence)]):
                best, longest = node, len(sequence)
        return best

    def _newest_nodes(self, count: int) -> list[CallNode]:
        # The list is built in one step, because calls may be added while a thread places a request.
        return list(islice(reversed(self._nodes.values()), count))

    def match_strength(self, chain: HashChain, messages: Messages) -> tuple[bool, int]:
        """Return how well a request matches this session: True if one of the request's latest tool calls was
        made in the session, and the number of identical leading messages."""
        ids = map(normalize_call_id, hashing.latest_tool_call_ids(messages))
        has_tool_call = any(call_id in self._by_tool_call for call_id in ids)
        for prefix in reversed(chain.canonical[1:]):
            if recorded := self._by_conversation.get(prefix):
                return has_tool_call, max(node.count_shared_messages(chain.exact) for node in recorded)
        return has_tool_call, 0

    def find_recorded(self, key: bytes, client_key: str | None = None) -> list[str]:
        """Return the call ids of the newest successful request with this key and, if it is not None, this
        idempotency key, ordered by choice index."""
        matching = [
            node
            for node in self._by_request.get(key, ())
            if node.is_ok and client_key in (None, node.client_key)
        ]
        return [node.call_id for node in matching if node.request_id == matching[-1].request_id]

    def has_call(self, call_id: str) -> bool:
        return call_id in self._nodes

    def has_successful_request(self, request_id: str) -> bool:
        return request_id in self._successful_requests

    def is_reply_unredacted(self, call: Call) -> bool:
        if parse_redaction_reason(call.reason) is None:
            return True
        node = self._nodes.get(call.call_id)
        return node is not None and node.reply_digest == self._hasher.hash_message(call.reply)

    def count_sampled_tokens(self, call: Call) -> int:
        node = self._nodes.get(call.call_id)
        return len(call.sampled_ids) or (len(node.sampled) if node else 0)

    def take_undelivered(self, key: bytes) -> bool:
        """Return True if the key is in ``undelivered``, and remove it."""
        is_undelivered = key in self.undelivered
        self.undelivered.discard(key)
        return is_undelivered

    def add(
        self,
        call: Call,
        placement: Placement,
        chain: HashChain | None,
        *,
        sampled_ids: Ids | None = None,
        first_redacted_message: int | None = None,
    ) -> None:
        """Add a recorded call. ``chain`` covers the call's messages and reply; it is None for a prompt
        without messages. ``sampled_ids`` is set if the call was stored without its tokens."""
        base = self._nodes[call.base_id] if call.base_id else None
        base_tokens = placement.base_tokens
        if sampled_ids is not None and base and base.has_tokens:
            # The call shares no tokens with its base in the store, but it does in memory.
            base_tokens = common_prefix_length(base.sequence(), placement.prompt_ids)
        node = self._create_node(
            call,
            has_tokens=len(placement.prompt_ids) > 0,
            is_stored=len(call.prompt_ids) > 0,
            base_tokens=base_tokens,
            # A slice without a copy would keep the complete prompt in memory.
            prompt=placement.prompt_ids[base_tokens:].copy(),
            sampled=call.sampled_ids if sampled_ids is None else sampled_ids,
            message_count=len(call.messages),
            first_redacted_message=first_redacted_message,
        )
        if chain is None:
            self._add_node(node, placement.key)
            node.prompt_and_reply = hashing.unpack_prompt_digest(call.digests)[1] if call.digests else None
        else:
            self._add_chain(node, chain)

    def _create_node(self, call: Call | CallDelta, **fields: Any) -> CallNode:
        return CallNode(
            call_id=call.call_id,
            request_id=call.request_id,
            parent_id=call.parent_id,
            client_key=call.client_key,
            is_ok=call.status is CallStatus.OK,
            base=self._nodes[call.base_id] if call.base_id else None,
            base_messages=call.base_messages,
            reply=call.reply if call.reply.get("tool_calls") else None,
            **fields,
        )

    def _add_node(self, node: CallNode, key: bytes) -> None:
        self._nodes[node.call_id] = node
        self._by_request[key].append(node)
        self.size += _CALL_BYTES + node.prompt.nbytes + node.sampled.nbytes
        if node.is_ok:
            self._successful_requests.add(node.request_id)

    def _add_chain(self, node: CallNode, chain: HashChain) -> None:
        node.tools_digest, node.reply_digest = chain.tools_digest, chain.digests[-1]
        node.exact = chain.exact[1 + node.base_messages :]
        self.size += _MESSAGE_BYTES * len(node.exact)
        self._add_node(node, chain.canonical[-2] + chain.tools_digest)
        self._by_conversation[chain.canonical[-1]].append(node)
        for prefix in chain.canonical[1 + node.base_messages :]:
            self._by_prefix.setdefault(prefix, node)
        for call_id in tool_call_ids(node.reply) if node.reply else ():
            self._by_tool_call[normalize_call_id(call_id)] = node

    def _restore(self, recorded: Iterable[CallDelta]) -> None:
        chains: dict[str, HashChain] = {}
        for delta in recorded:
            has_tokens = delta.base_tokens + len(delta.prompt_tail) > 0
            node = self._create_node(
                delta,
                has_tokens=has_tokens,
                is_stored=has_tokens,
                base_tokens=delta.base_tokens,
                prompt=delta.prompt_tail,
                sampled=delta.sampled_ids,
                message_count=delta.message_count,
                first_redacted_message=parse_redaction_reason(delta.reason),
            )
            if delta.message_count == 0:
                self._add_node(node, self._prompt_key(node.prompt_ids()))
                continue
            if hashing.is_prompt_digest(delta.digests):
                key, node.prompt_and_reply = hashing.unpack_prompt_digest(delta.digests)
                self._add_node(node, key)
                continue
            if delta.digests:
                tools, digests = hashing.unpack_digests(delta.digests)
            else:
                tools = self._hasher.hash_tools(delta.tools)
                digests = [self._hasher.hash_message(message) for message in (*delta.messages, delta.reply)]
            # A base call without a chain is a prompt without messages, which shares only its tokens.
            base_chain = chains.get(delta.base_id or "") or self._hasher.empty_chain()
            shared = base_chain.prefix(delta.base_messages)
            chains[delta.call_id] = chain = shared.with_tools(tools).extend(digests)
            self._add_chain(node, chain)

    def _prompt_key(self, prompt: str | Ids) -> bytes:
        if isinstance(prompt, str):
            return self._hasher.hash_text(prompt)
        return self._hasher.hash_bytes(prompt.tobytes())


def _create_placement(
    base: CallNode, link: Link, key: bytes, prompt: Ids, base_tokens: int, base_messages: int = 0
) -> Placement:
    parent_id = {Link.EXTENDS: base.call_id, Link.SIBLING: base.parent_id}.get(link)
    redacted = base.first_redacted_within(base_messages)
    return Placement(prompt, link, parent_id, base.call_id, base_tokens, base_messages, key, redacted)


def _stored_prefix_length(node: CallNode, prompt: Ids) -> int:
    return common_prefix_length(node.sequence(), prompt) if node.is_stored else 0
