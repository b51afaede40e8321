"""Place a call in its session's message graph, and find the recorded calls to replay for a retry."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from instar.errors import PromptTooLong
from instar.gateway.pipeline.sample import ModelCall
from instar.gateway.session_states import PendingRequest
from instar.gateway.tokenizing import MIN_LARGE_PROMPT
from instar.record.base import Placement
from instar.record.graph import MessageGraph
from instar.record.hashing import MessageHasher, tool_call_ids
from instar.store.base import Store
from instar.types import Call, Message


async def place(
    call: ModelCall, graph: MessageGraph, hasher: MessageHasher, max_context: int | None = None
) -> Placement:
    """Place the call, and set its number and hash chain. The caller must release the placement. Its
    ``prompt_ids`` are empty if a provider tokenizes the prompt. If ``max_context`` is not None, drop as many
    of the oldest turns as necessary for a prompt and its reply to fit into this number of tokens."""
    if max_context is None or call.request.prompt is not None:
        placement = await _find_position(call, graph)
    else:
        placement = await _fit_position(call, graph, hasher, max_context)
    # No await may come between the next two lines, or concurrent requests could share a number and a seed.
    call.number = graph.next_request_number
    return graph.register(placement)


async def _fit_position(
    call: ModelCall, graph: MessageGraph, hasher: MessageHasher, max_context: int
) -> Placement:
    request, turns = call.request, list_droppable_turns(call.request.messages)
    max_tokens = call.state.session.sampling.get("max_tokens") or request.max_tokens or max_context // 4
    limit = max_context - min(max_tokens, max_context // 2)

    async def find_position(turn_count: int) -> Placement:
        dropped = {index for turn in turns[:turn_count] for index in turn}
        if len(dropped) != call.dropped_messages:
            kept = tuple(message for i, message in enumerate(request.messages) if i not in dropped)
            call.meta.request = replace(request, messages=kept)
            call.meta.chain = hasher.hash_messages(kept, request.tools, request.chat_template_kwargs)
            call.dropped_messages = len(dropped)
        return await _find_position(call, graph)

    async def try_position(turn_count: int) -> Placement | None:
        try:
            placement = await find_position(turn_count)
        except PromptTooLong:
            return None
        return placement if len(placement.prompt_ids) <= limit else None

    if turns and (placement := await try_position(0)) is not None:
        return placement
    low, high = 1, len(turns)
    while low < high:  # The fewest turns are found by bisection, because each attempt tokenizes the prompt.
        count = (low + high) // 2
        if await try_position(count) is None:
            low = count + 1
        else:
            high = count
    return await find_position(low)


def list_droppable_turns(messages: Sequence[Message]) -> list[list[int]]:
    """Return the indices of the messages of each turn that may be dropped, oldest first: the turns before the
    newest user message, and the replies after it except the newest. Results belong to the turn of their call.
    """
    newest_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    turns: list[list[int]] = []
    turn_by_call: dict[str, list[int]] = {}
    for i, message in enumerate(messages):
        if message["role"] == "system" or i == newest_user:
            continue
        is_start = message["role"] == ("user" if i < newest_user else "assistant")
        if is_start or not turns or turns[-1][0] < newest_user < i:
            turns.append([])
        turn = turn_by_call.get(message.get("tool_call_id", ""), turns[-1])
        turn.append(i)
        turn_by_call |= dict.fromkeys(tool_call_ids(message), turn)
    if turns and newest_user < len(messages) - 1:
        turns.pop()
    return [turn for turn in turns if turn]


async def _find_position(call: ModelCall, graph: MessageGraph) -> Placement:
    meta, request, renderer = call.meta, call.request, call.source.get_renderer(call.request)
    size = len(call.body)
    if (prompt := request.prompt) is not None and renderer is not None:
        meta.chain = None
        call.source.check_prompt(call)
        compute = partial(graph.place_prompt, prompt, renderer)
        size = len(prompt) if isinstance(prompt, str) else 0
    else:
        assert meta.chain is not None, "a call that is placed by its messages has a chain"
        meta.chain = graph.match_replies(meta.chain, request.messages)
        compute = partial(graph.place, meta.chain, request.messages, request.tools, renderer)
        if size >= MIN_LARGE_PROMPT and (known_count := graph.count_known(meta.chain)):
            size = sum(map(_count_characters, request.messages[known_count:]))
    is_large = renderer is not None and size >= MIN_LARGE_PROMPT
    return await call.source.tokenize(call.headers, compute) if is_large else compute()


def _count_characters(message: Message) -> int:
    arguments = sum(len(tool_call["arguments"]) for tool_call in message.get("tool_calls", ()))
    return len(message["content"]) + len(message.get("reasoning", "")) + arguments


class ReplayLookup:
    """Finds the recorded calls that a request repeats. Retries of a pending request wait for its reply."""

    def __init__(
        self, store: Store, call: ModelCall, graph: MessageGraph, key: bytes, timeout: float
    ) -> None:
        """Create a lookup for a placement's key. ``timeout`` limits each wait for a pending request."""
        self._store = store
        self._pending = call.state.pending
        self._retry = call.retry
        self._graph = graph
        self._key = key
        self._timeout = timeout

    async def find_calls(self, n: int) -> list[Call]:
        """Wait for pending requests that this request retries. Return the ``n`` recorded calls to replay, or
        an empty list if the replies must be sampled."""
        while (original := self._find_pending()) is not None:
            await asyncio.wait([original.done], timeout=self._timeout)
            if not original.done.done():
                break
        recorded = [await self._store.call(call_id) for call_id in self._find_recorded_ids()]
        calls = [call for call in recorded if call is not None and self._graph.is_reply_unredacted(call)]
        return calls if len(calls) == n else []

    @contextmanager
    def register(self) -> Generator[PendingRequest]:
        """Make retries of this request wait until the ``with`` block ends."""
        pending = PendingRequest(self._retry.client_key, asyncio.get_running_loop().create_future())
        requests_with_key = self._pending.setdefault(self._key, [])
        requests_with_key.append(pending)
        try:
            yield pending
        finally:
            pending.done.set_result(None)
            requests_with_key.remove(pending)
            if not requests_with_key:
                del self._pending[self._key]

    def _find_pending(self) -> PendingRequest | None:
        has_no_key = self._retry.client_key is None
        for pending in reversed(self._pending.get(self._key, ())):
            if self._retry.matches(pending.client_key) or (pending.client_disconnected and has_no_key):
                return pending
        return None

    def _find_recorded_ids(self) -> list[str]:
        graph, key, retry = self._graph, self._key, self._retry
        if retry.client_key is None:
            should_replay = graph.take_undelivered(key) or retry.is_retry
            return graph.find_recorded(key) if should_replay else []
        if ids := graph.find_recorded(key, retry.client_key):
            graph.take_undelivered(key)
        return ids
