"""Place a call in its session's message graph, and find the recorded calls that a retry repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from instar.gateway.pipeline.sample import ModelCall
from instar.gateway.session_states import PendingRequest
from instar.record.base import Placement
from instar.record.graph import MessageGraph
from instar.store.base import Store
from instar.types import Call


def place(call: ModelCall, graph: MessageGraph) -> Placement:
    """Return the call's placement with the prompt's tokens, and set the call's number. The caller must
    release the placement."""
    meta, request, renderer = call.meta, call.request, call.source.renderer
    # The number is taken without an await before the placement, so that concurrent requests never share a
    # number or a seed.
    call.number = graph.next_request_number
    if request.prompt is not None and renderer is not None:
        meta.chain = None
        call.source.check_prompt(call)
        return graph.place_prompt(request.prompt, renderer)
    assert meta.chain is not None, "requests without a prompt have a chain"
    meta.chain = graph.match_replies(meta.chain, request.messages)
    return graph.place(meta.chain, request.messages, request.tools, renderer)


class ReplayLookup:
    """Finds the recorded calls that a request repeats. Later retries of the request wait for the original."""

    def __init__(
        self, store: Store, call: ModelCall, graph: MessageGraph, key: bytes, timeout: float
    ) -> None:
        """Create a lookup for a placement's key. ``timeout`` limits the wait for the original request."""
        self._store = store
        self._pending = call.state.pending
        self._retry = call.retry
        self._graph = graph
        self._key = key
        self._timeout = timeout

    async def find_calls(self, n: int) -> list[Call]:
        """Return the ``n`` recorded calls to replay, or an empty list if the replies must be sampled."""
        while (original := self._find_pending()) is not None:
            await asyncio.wait([original.done], timeout=self._timeout)
            if not original.done.done():
                break
        rows = [await self._store.call(call_id) for call_id in self._find_recorded_ids()]
        calls = [call for call in rows if call is not None and self._graph.is_reply_unredacted(call)]
        return calls if len(calls) == n else []

    @contextmanager
    def register(self) -> Generator[PendingRequest]:
        """Make retries of this request wait until the ``with`` block ends."""
        pending = PendingRequest(self._retry.client_key, asyncio.get_running_loop().create_future())
        same_key = self._pending.setdefault(self._key, [])
        same_key.append(pending)
        try:
            yield pending
        finally:
            pending.done.set_result(None)
            same_key.remove(pending)
            if not same_key:
                del self._pending[self._key]

    def _find_pending(self) -> PendingRequest | None:
        has_no_key = self._retry.client_key is None
        for pending in reversed(self._pending.get(self._key, ())):
            if self._retry.matches(pending.client_key) or (pending.is_client_gone and has_no_key):
                return pending
        return None

    def _find_recorded_ids(self) -> list[str]:
        graph, key, retry = self._graph, self._key, self._retry
        if retry.client_key is None:
            should_replay = graph.take_undelivered(key) or retry.is_retry
            return graph.find_recorded(key) if should_replay else []
        if ids := graph.find_by_idempotency_key(key, retry.client_key):
            graph.take_undelivered(key)
        return ids
