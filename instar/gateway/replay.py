"""A client that asks again for what it asked already is given the recorded answer, on evidence alone."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from instar.gateway.client_headers import RetryEvidence
from instar.gateway.sessions import Pending, SessionState
from instar.record.graph import MessageGraph
from instar.store.base import Store
from instar.types import Call


class ReplayLookup:
    """Of one request: finds the answer that it asks for again, and lets others wait for its own."""

    def __init__(
        self,
        store: Store,
        state: SessionState,
        graph: MessageGraph,
        key: bytes,
        evidence: RetryEvidence,
        timeout: float,
    ) -> None:
        """``key``: of the request's placement. ``timeout``: for an answer that is still being made."""
        self._store = store
        self._state = state
        self._graph = graph
        self._key = key
        self._evidence = evidence
        self._timeout = timeout

    async def calls(self, n: int) -> list[Call]:
        """The recorded answer in its ``n`` choices; empty where none is asked for again, or there is none."""
        while (original := self._original()) is not None:
            await asyncio.wait([original.ended], timeout=self._timeout)
            if not original.ended.done():
                break
        found = [await self._store.call(call_id) for call_id in self._recorded()]
        calls = [call for call in found if call is not None and self._graph.is_reply_unredacted(call)]
        return calls if len(calls) == n else []

    @contextmanager
    def answering(self) -> Generator[Pending]:
        """While it is answered, others that ask for the same answer wait for it."""
        pending = Pending(self._evidence.client_key, asyncio.get_running_loop().create_future())
        waiting = self._state.pending.setdefault(self._key, [])
        waiting.append(pending)
        try:
            yield pending
        finally:
            pending.ended.set_result(None)
            waiting.remove(pending)
            if not waiting:
                del self._state.pending[self._key]

    def _original(self) -> Pending | None:
        unkeyed = self._evidence.client_key is None
        for pending in reversed(self._state.pending.get(self._key, ())):
            if self._evidence.matches(pending.client_key) or (pending.client_gone and unkeyed):
                return pending
        return None

    def _recorded(self) -> list[str]:
        graph, key, evidence = self._graph, self._key, self._evidence
        if evidence.client_key is None:
            again = graph.take_undelivered(key) or evidence.retried
            return graph.find_recorded(key) if again else []
        if ids := graph.find_by_idempotency_key(key, evidence.client_key):
            graph.take_undelivered(key)
        return ids
