"""The message graph of one session: which recorded call does a request continue?

Requests are compared by their chains (`record.hashing`), prompts without messages by their text or tokens.

Memory is linear in what the session recorded: a call keeps its own tokens and hashes and refers to its
base for the rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from instar.record.base import Placement, Renderer
from instar.record.hashing import (
    DIGEST_SIZE,
    HashChain,
    MessageHasher,
    is_prompt_digest,
    unpack_digests,
    unpack_prompt_digest,
)
from instar.record.nodes import (
    EMPTY_IDS,
    REDACTED,
    CallNode,
    choose_parent,
    common_prefix_length,
    matches_reply,
    normalize_call_id,
    parse_redaction_reason,
    redacted_within,
    tool_call_ids,
)
from instar.store.base import CallDelta
from instar.types import Call, CallStatus, Ids, Link, Message, Tool

_RECENT = 8
"""Calls looked at for a shared prefix when the messages give no hint."""
_REMEMBERED_PROMPTS = 64
"""Calls without messages that a prompt is compared with, the newest."""
_BRIDGE_TOKENS = 1024
"""How much of a prompt's end a renderer is shown to continue it: the last turn's opening lies in it."""


class MessageGraph:
    """The calls of one session, by their messages."""

    def __init__(self, hasher: MessageHasher, recorded: Iterable[CallDelta] = ()) -> None:
        """``recorded``: what the store holds already, in the order of its commits."""
        self._hasher = hasher
        self._nodes: dict[str, CallNode] = {}
        self._asked: defaultdict[bytes, list[CallNode]] = defaultdict(list)
        self._answered: defaultdict[bytes, list[CallNode]] = defaultdict(list)
        self._said: dict[bytes, CallNode] = {}
        self._by_tool_call: dict[str, CallNode] = {}
        self._in_flight: Counter[bytes] = Counter()
        self._finished: set[str] = set()
        self._undelivered: set[bytes] = set()
        self._restore(recorded)

    @property
    def next_request_number(self) -> int:
        """What number the next request has: behind those that are finished and those that are placed."""
        return self.finished_requests + self._in_flight.total()

    @property
    def finished_requests(self) -> int:
        """Finished requests so far."""
        return len(self._finished)

    # --- placing a request --------------------------------------------------------------------------

    def match_replies(self, chain: HashChain, messages: Sequence[Message]) -> HashChain:
        """With replies of ours known again that the agent gave back changed: the ids of the tool calls are
        those we gave, and the arguments hold all that was generated (agents fill in defaults)."""
        known = len(chain)
        while known and chain.canonical[known] not in self._said:
            known -= 1
        digests = chain.digests[known:]
        for i, message in enumerate(messages[known:]):
            node = self._by_tool_call.get(next(map(normalize_call_id, tool_call_ids(message)), ""))
            if node and node.reply and matches_reply(message, node.reply):
                digests[i] = node.digest[:DIGEST_SIZE] + digests[i][DIGEST_SIZE:]
        return chain if digests == chain.digests[known:] else chain.prefix(known).extend(digests)

    def place(
        self, chain: HashChain, messages: Sequence[Message], tools: Sequence[Tool], renderer: Renderer | None
    ) -> Placement:
        """Without a ``renderer``, the tokens are another's business. Each placement is released once."""
        placement = self._sibling(chain, messages, tools, renderer)
        placement = placement or self._extension(chain, messages, tools, renderer)
        return self._placed(placement or self._branch(chain, messages, tools, renderer))

    def place_prompt(self, prompt: str | Sequence[int], renderer: Renderer) -> Placement:
        """A prompt without messages. It continues the call whose prompt and reply it begins with."""
        parent = self._continued_text(prompt) if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            rest = prompt[parent.prompt_and_reply[0] :] if parent and parent.prompt_and_reply else prompt
            ids = np.asarray(renderer.encode(rest), np.int32)
            ids = np.concatenate([parent.sequence(), ids]) if parent else ids
        else:
            ids = np.asarray(prompt, np.int32)
            parent = self._continued_tokens(ids)
        key = self._prompt_key(prompt if isinstance(prompt, str) else ids)
        if same := self._asked.get(key):
            node = same[-1]
            return self._placed(self._beside(node, node.prompt_ids() if node.has_tokens else ids, 0, key))
        if parent is None:
            link = self._link(key, Link.BRANCH if self._nodes else Link.ROOT)
            return self._placed(Placement(ids, link, key=key))
        before = len(parent.sequence()) if parent.is_stored else 0
        return self._placed(
            Placement(ids, self._link(key, Link.EXTENDS), parent.call_id, parent.call_id, before, 0, key)
        )

    def attach_prompt(self, placement: Placement, prompt_ids: Ids) -> Placement:
        """A placement without tokens, once its prompt is known from elsewhere."""
        base = self._nodes.get(placement.base_id or "")
        shared = common_prefix_length(base.sequence(), prompt_ids) if base and base.is_stored else 0
        link = placement.link
        if link is Link.EXTENDS and (base is None or shared < len(base.sequence())):
            link = Link.BRANCH
        return replace(placement, prompt_ids=prompt_ids, link=link, base_tokens=shared)

    def release(self, placement: Placement) -> None:
        """The placed request has ended, recorded or not. Once per placement."""
        self._in_flight[placement.key] -= 1
        if self._in_flight[placement.key] <= 0:
            del self._in_flight[placement.key]

    def _placed(self, placement: Placement) -> Placement:
        self._in_flight[placement.key] += 1
        return placement

    def _link(self, key: bytes, otherwise: Link) -> Link:
        return Link.SIBLING if self._in_flight[key] else otherwise

    def _sibling(
        self, chain: HashChain, messages: Sequence[Message], tools: Sequence[Tool], renderer: Renderer | None
    ) -> Placement | None:
        """The same messages again: the same prompt, beside the call that asked first."""
        if not (same := self._asked.get(chain.key)):
            return None
        node = same[-1]
        shared = min(node.shared_messages(chain.exact), node.messages)
        if renderer is None or node.has_tokens:
            return self._beside(node, node.prompt_ids() if renderer else EMPTY_IDS, shared, chain.key)
        prompt = np.asarray(renderer.render(messages, tools), np.int32)
        return replace(self._beside(node, prompt, shared, chain.key), base_tokens=0)

    def _beside(self, node: CallNode, prompt: Ids, shared: int, key: bytes) -> Placement:
        return Placement(
            prompt_ids=prompt,
            link=Link.SIBLING,
            parent_id=node.parent_id,
            base_id=node.call_id,
            base_tokens=len(prompt) if node.is_stored else 0,
            base_messages=shared,
            key=key,
            first_redacted_message=redacted_within(node, shared),
        )

    def _extension(
        self, chain: HashChain, messages: Sequence[Message], tools: Sequence[Tool], renderer: Renderer | None
    ) -> Placement | None:
        """Behind the call whose messages and reply are the longest prefix of these."""
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] != "assistant":
                continue
            candidates = [
                n for n in self._answered.get(chain.canonical[count], ()) if n.tools == chain.tools_digest
            ]
            if not candidates:
                continue
            parent = choose_parent(candidates, tool_call_ids(messages[count - 1]))
            shared = parent.shared_messages(chain.exact)
            placement = Placement(
                prompt_ids=EMPTY_IDS,
                link=self._link(chain.key, Link.EXTENDS),
                parent_id=parent.call_id,
                base_id=parent.call_id,
                base_messages=shared,
                key=chain.key,
                first_redacted_message=redacted_within(parent, shared),
            )
            if renderer is None:
                return placement
            return _extended(placement, parent, messages, count, tools, renderer)
        return None

    def _branch(
        self, chain: HashChain, messages: Sequence[Message], tools: Sequence[Tool], renderer: Renderer | None
    ) -> Placement:
        """Rendered anew. What it shares with a recorded call is left to that one in the store."""
        key = chain.key
        prompt = np.asarray(renderer.render(messages, tools), np.int32) if renderer else EMPTY_IDS
        if not self._nodes:
            return Placement(prompt_ids=prompt, link=self._link(key, Link.ROOT), key=key)
        said = next((n for prefix in reversed(chain.canonical[1:]) if (n := self._said.get(prefix))), None)
        candidates = [said] if said else islice(reversed(self._nodes.values()), _RECENT)
        shared, base = max(
            (
                (common_prefix_length(node.sequence(), prompt) if node.is_stored else 0, node)
                for node in candidates
            ),
            key=lambda pair: pair[0],
        )
        same = base.shared_messages(chain.exact)
        return Placement(
            prompt_ids=prompt,
            link=self._link(key, Link.BRANCH),
            base_id=base.call_id,
            base_tokens=shared,
            base_messages=same,
            key=key,
            first_redacted_message=redacted_within(base, same),
        )

    def _continued_text(self, prompt: str) -> CallNode | None:
        found = [
            node for node in self._newest(_REMEMBERED_PROMPTS) if node.prompt_and_reply and node.has_tokens
        ]
        for node in sorted(found, key=lambda node: -(node.prompt_and_reply or (0, b""))[0]):
            length, digest = node.prompt_and_reply or (0, b"")
            if length <= len(prompt) and self._hasher.hash_text(prompt[:length]) == digest:
                return node
        return None

    def _continued_tokens(self, prompt: Ids) -> CallNode | None:
        best: CallNode | None = None
        longest = 0
        for node in self._newest(_REMEMBERED_PROMPTS):
            if not node.is_stored:
                continue
            sequence = node.sequence()
            fits = longest < len(sequence) <= len(prompt)
            if fits and np.array_equal(sequence, prompt[: len(sequence)]):
                best, longest = node, len(sequence)
        return best

    def _newest(self, count: int) -> Iterator[CallNode]:
        return islice(reversed(self._nodes.values()), count)

    # --- what was recorded --------------------------------------------------------------------------

    def find_recorded(self, key: bytes) -> list[str]:
        """Call ids of the newest finished request with this key, in the order of its choices."""
        return _newest_request(node for node in self._asked.get(key, ()) if node.is_ok)

    def has_call(self, call_id: str) -> bool:
        return call_id in self._nodes

    def has_request(self, request_id: str) -> bool:
        """Whether a finished request is called so."""
        return request_id in self._finished

    def is_reply_unredacted(self, call: Call) -> bool:
        """Whether its reply was stored as it was given: nothing was cut out of it."""
        if not (call.reason or "").startswith(REDACTED):
            return True
        node = self._nodes.get(call.call_id)
        return node is not None and node.digest == self._hasher.hash_message(call.reply)

    def sampled_tokens(self, call: Call) -> int:
        node = self._nodes.get(call.call_id)
        return len(call.sampled_ids) or (len(node.sampled) if node else 0)

    def find_by_idempotency_key(self, key: bytes, client_key: str) -> list[str]:
        """The same, of the request that the client gave this idempotency key."""
        return _newest_request(n for n in self._asked.get(key, ()) if n.is_ok and n.client_key == client_key)

    def mark_undelivered(self, key: bytes) -> None:
        """The reply to this request was recorded, and its client was gone."""
        self._undelivered.add(key)

    def is_undelivered(self, key: bytes) -> bool:
        return key in self._undelivered

    def take_undelivered(self, key: bytes) -> bool:
        """Whether a reply waits for a client that asks again; it is given out once."""
        if key not in self._undelivered:
            return False
        self._undelivered.discard(key)
        return True

    def add(
        self,
        call: Call,
        placement: Placement,
        chain: HashChain | None,
        *,
        sampled_ids: Ids | None = None,
        first_redacted_message: int | None = None,
    ) -> None:
        """A recorded call. ``whole``: the chain of its messages and reply; None for a prompt without
        messages. ``sampled_ids``: the real ones, where the call was stored without its tokens."""
        withheld = sampled_ids is not None
        base = self._nodes[call.base_id] if call.base_id else None
        at = placement.base_tokens
        if withheld and base and base.has_tokens:
            # Not in the store, and yet no second time in memory.
            at = common_prefix_length(base.sequence(), placement.prompt_ids)
        node = CallNode(
            call_id=call.call_id,
            request_id=call.request_id,
            parent_id=call.parent_id,
            client_key=call.client_key,
            is_ok=call.status is CallStatus.OK,
            has_tokens=len(placement.prompt_ids) > 0,
            is_stored=len(call.prompt_ids) > 0,
            base=base,
            base_tokens=at,
            base_messages=call.base_messages,
            # Copies: a slice would keep the whole prompt alive.
            prompt=placement.prompt_ids[at:].copy(),
            sampled=call.sampled_ids if sampled_ids is None else sampled_ids,
            tools=chain.tools_digest if chain else b"",
            exact=[],
            reply=call.reply if call.reply.get("tool_calls") else None,
            digest=chain.digests[-1] if chain else b"",
            messages=len(call.messages),
            first_redacted_message=first_redacted_message,
        )
        if chain is None:
            self._enter(node, placement.key)
            node.prompt_and_reply = unpack_prompt_digest(call.digests)[1] if call.digests else None
        else:
            self._enter_chain(node, chain)

    def _enter(self, node: CallNode, key: bytes) -> None:
        self._nodes[node.call_id] = node
        self._asked[key].append(node)
        if node.is_ok:
            self._finished.add(node.request_id)

    def _enter_chain(self, node: CallNode, whole: HashChain) -> None:
        """``whole``: with the reply."""
        node.exact = whole.exact[1 + node.base_messages :]
        self._enter(node, whole.canonical[-2] + whole.tools_digest)
        self._answered[whole.canonical[-1]].append(node)
        for prefix in whole.canonical[1 + node.base_messages :]:
            self._said.setdefault(prefix, node)
        for call_id in tool_call_ids(node.reply) if node.reply else ():
            self._by_tool_call[normalize_call_id(call_id)] = node

    def _restore(self, parts: Iterable[CallDelta]) -> None:
        chains: dict[str, HashChain] = {}
        for part in parts:
            base = self._nodes[part.base_id] if part.base_id else None
            tokens = part.base_tokens + len(part.prompt_tail)
            node = CallNode(
                call_id=part.call_id,
                request_id=part.request_id,
                parent_id=part.parent_id,
                client_key=part.client_key,
                is_ok=part.status is CallStatus.OK,
                has_tokens=tokens > 0,
                is_stored=tokens > 0,
                base=base,
                base_tokens=part.base_tokens,
                base_messages=part.base_messages,
                prompt=part.prompt_tail,
                sampled=part.sampled_ids,
                tools=b"",
                exact=[],
                reply=part.reply if part.reply.get("tool_calls") else None,
                digest=b"",
                messages=part.message_count,
                first_redacted_message=parse_redaction_reason(part.reason),
            )
            if part.message_count == 0:
                self._enter(node, self._prompt_key(node.prompt_ids()))
                continue
            if is_prompt_digest(part.digests):
                key, node.prompt_and_reply = unpack_prompt_digest(part.digests)
                self._enter(node, key)
                continue
            if part.digests:
                tools, digests = unpack_digests(part.digests)
            else:
                tools = self._hasher.hash_tools(part.tools)
                digests = [self._hasher.hash_message(message) for message in (*part.messages, part.reply)]
            node.tools, node.digest = tools, digests[-1]
            before = (
                chains[part.base_id].prefix(part.base_messages)
                if part.base_id
                else self._hasher.empty_chain()
            )
            chains[part.call_id] = whole = before.with_tools(tools).extend(digests)
            self._enter_chain(node, whole)

    def _prompt_key(self, prompt: str | Ids) -> bytes:
        if isinstance(prompt, str):
            return self._hasher.hash_text(prompt)
        return self._hasher.hash_bytes(prompt.tobytes())


def _extended(
    placement: Placement,
    parent: CallNode,
    messages: Sequence[Message],
    count: int,
    tools: Sequence[Tool],
    renderer: Renderer,
) -> Placement | None:
    """The parent's tokens, and the messages from ``count`` on behind them."""
    if not parent.has_tokens:
        return None
    before = parent.sequence()
    end = before[: len(before) - len(parent.sampled)][-_BRIDGE_TOKENS:].tolist()
    sampled = parent.sampled.tolist()
    prompt = renderer.extend(end, sampled, messages[count:], tools)
    if prompt is None:
        if any(message["role"] == "assistant" for message in messages[count:]):
            return None  # words that were put into its mouth: a rewritten history
        # The whole conversation may begin with these very tokens all the same.
        whole = np.asarray(renderer.render(messages, tools), np.int32)
        if not np.array_equal(whole[: len(before)], before):
            return None
    else:
        added = np.asarray(prompt[len(end) + len(sampled) :], np.int32)
        whole = np.concatenate([before, added])
    return replace(placement, prompt_ids=whole, base_tokens=len(before) if parent.is_stored else 0)


def _newest_request(nodes: Iterable[CallNode]) -> list[str]:
    finished = list(nodes)
    return [node.call_id for node in finished if node.request_id == finished[-1].request_id]
