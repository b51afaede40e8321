"""The store: every session, call, annotation and training step of a run.

SQLite and PostgreSQL share the class `Store` and differ in the `Database` that they open. Each query is a
function of a `Database` in a module of this package; `Store` declares how the query is run, and the
function's docstring documents the method. Writes are durable when they return, and concurrent writes share a
commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from instar.errors import StoreError
from instar.store import annotations, leases, listing, policies
from instar.store import calls as call_queries
from instar.store import datasets as dataset_queries
from instar.store import keys as key_queries
from instar.store import sessions as session_queries
from instar.store import steps as step_queries
from instar.store.database import Database
from instar.store.models import (
    FEEDBACK_KEY_PREFIX,
    CallDelta,
    DatasetRow,
    KeyKind,
    KeyRow,
    Progress,
    Run,
    SessionFilter,
    SessionRecord,
    SessionRow,
    UnscoredSession,
    feedback_key,
)
from instar.store.reader import ReaderPool
from instar.store.writer import Writer
from instar.types import Call, Group, Session

__all__ = [
    "FEEDBACK_KEY_PREFIX",
    "CallDelta",
    "DatasetRow",
    "KeyKind",
    "KeyRow",
    "Progress",
    "Run",
    "SessionFilter",
    "SessionRecord",
    "SessionRow",
    "Store",
    "UnscoredSession",
    "feedback_key",
]

P = ParamSpec("P")
T = TypeVar("T")
Query = Callable[Concatenate[Database, P], T]

SESSIONS_PER_READ = 64
"""The number of sessions whose calls are read in one snapshot, so that no snapshot is held for long."""


class _Method(Generic[P, T]):
    """A method of `Store` that runs a query."""

    def __init__(self, query: Query[P, T]) -> None:
        self.query = query
        self.__doc__ = query.__doc__

    def run(self, store: Store, work: Callable[[Database], T]) -> Coroutine[Any, Any, T]:
        raise NotImplementedError

    @overload
    def __get__(self, store: None, owner: type[Store]) -> Callable[..., Coroutine[Any, Any, T]]: ...

    @overload
    def __get__(self, store: Store, owner: type[Store]) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, store: Store | None, owner: type[Store]) -> Callable[..., Coroutine[Any, Any, T]]:
        if store is None:
            return self._call_unbound
        query = self.query

        def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
            return self.run(store, lambda db: query(db, *args, **kwargs))

        return call

    async def _call_unbound(self, store: Store, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the query for ``Store.method(store, ...)``, as a function of a class is called."""
        return await self.run(store, lambda db: self.query(db, *args, **kwargs))


class _Write(_Method[P, T]):
    """A method that runs its query in a transaction of the writer."""

    def run(self, store: Store, work: Callable[[Database], T]) -> Coroutine[Any, Any, T]:
        return store.write(work)


class _Read(_Method[P, T]):
    """A method that runs a query of any number of statements on one snapshot."""

    def run(self, store: Store, work: Callable[[Database], T]) -> Coroutine[Any, Any, T]:
        return store.read(work)


class _LookUp(_Method[P, T]):
    """A method that runs a query of a single statement, which needs no transaction."""

    def run(self, store: Store, work: Callable[[Database], T]) -> Coroutine[Any, Any, T]:
        return store.look_up(work)


class Store:
    """A store, usable from any event loop.

    If a caller is cancelled while its write is being executed, the write may still be committed. If the
    caller is cancelled earlier, the write is skipped.
    """

    def __init__(self, name: str, writer: Writer | None, readers: ReaderPool) -> None:
        """``name`` identifies the store in messages. A store without a writer is read-only."""
        self._name = name
        self._writer = writer
        self._readers = readers
        self.base_call_cache = call_queries.BaseCallCache()

    @property
    def commits(self) -> int:
        """The number of transactions that this process has committed."""
        return self._writer.commits if self._writer else 0

    async def close(self) -> None:
        """Commit the queued writes and close the store. Closing it twice is allowed."""
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)
        await asyncio.to_thread(self._readers.close)

    async def write(self, work: Callable[[Database], T]) -> T:
        if self._writer is None:
            raise StoreError(f"{self._name} was opened for reading only.")
        return await self._writer.submit(work)

    async def read(self, fetch: Callable[[Database], T]) -> T:
        return await asyncio.wrap_future(self._readers.submit(lambda: self._readers.snapshot(fetch)))

    async def look_up(self, fetch: Callable[[Database], T]) -> T:
        return await asyncio.wrap_future(self._readers.submit(lambda: self._readers.look_up(fetch)))

    # runs
    put_run = _Write(session_queries.put_run)
    run = _Read(session_queries.get_run)
    runs = _Read(session_queries.get_runs)
    progress = _Read(step_queries.get_progress)

    # groups and sessions
    open_group = _Write(session_queries.open_group)
    close_group = _Write(session_queries.close_group)
    group = _LookUp(session_queries.get_group)
    groups = _Read(session_queries.get_groups)
    open_session = _Write(session_queries.open_session)
    end_session = _Write(annotations.end_session)
    session = _LookUp(session_queries.get_session)
    session_by_key = _LookUp(session_queries.get_session_by_key)
    session_by_external_id = _LookUp(session_queries.get_session_by_external_id)
    session_by_tail = _LookUp(call_queries.get_session_by_tail)
    idle_sessions = _LookUp(session_queries.get_idle_sessions)
    last_ended_seq = _Read(annotations.get_last_ended_seq)
    sessions = _Read(listing.get_sessions)
    sessions_by_group = _Read(listing.get_sessions_by_group)

    # calls
    async def add_calls(
        self,
        calls: Sequence[Call],
        *,
        opening: Session | None = None,
        key_hash: str | None = None,
        tail_keys: Mapping[str, bytes] | None = None,
    ) -> None:
        """Store all of the calls or none. A call's base must already be stored or precede the call in
        ``calls``. Calls may be added to a session that has ended, because they did happen.

        ``opening`` is a session to open first, in the same transaction, with ``key_hash`` as its key. Raises
        ConflictError if its id is taken. ``tail_keys`` maps call ids to the keys of `session_by_tail`.
        """
        await self.write(
            call_queries.AddCalls(calls, opening, key_hash, tail_keys or {}, self.base_call_cache)
        )

    async def call(self, call_id: str) -> Call | None:
        calls = await self._read_calls(lambda db: call_queries.fetch_call(db, call_id))
        return calls[0] if calls else None

    async def calls(self, session_id: str) -> list[Call]:
        """Return the calls of a session in commit order, with complete prompts and messages."""
        return await self._read_calls(lambda db: call_queries.fetch_calls(db, "session_id", session_id))

    async def calls_by_session(self, session_ids: Sequence[str]) -> dict[str, list[Call]]:
        """Return the calls of several sessions; the list is empty for a session without calls."""
        by_session: dict[str, list[Call]] = {session_id: [] for session_id in session_ids}
        for start in range(0, len(session_ids), SESSIONS_PER_READ):
            part = session_ids[start : start + SESSIONS_PER_READ]
            for call in await self._read_calls(
                lambda db, part=part: call_queries.fetch_calls(db, "session_id", *part)
            ):
                by_session[call.session_id].append(call)
        return by_session

    async def calls_by_request(self, request_id: str) -> list[Call]:
        """Return the calls of a request. There are several calls if the request asked for several replies."""
        return await self._read_calls(lambda db: call_queries.fetch_calls(db, "request_id", request_id))

    async def call_deltas(self, session_id: str) -> list[CallDelta]:
        """Return the calls of a session in commit order, without the prefixes that they share with their base
        calls. The cost grows with the stored tokens, not with the sum of the prompts."""

        def read() -> list[CallDelta]:
            return self._readers.snapshot(
                lambda db: call_queries.fetch_deltas(db, session_id)
            ).decode_deltas()

        return await asyncio.wrap_future(self._readers.submit(read))

    async def _read_calls(self, fetch: Callable[[Database], call_queries.FetchedCalls]) -> list[Call]:
        """Return the fetched calls. They are decoded in the reader's thread, after the snapshot is
        released."""
        return await asyncio.wrap_future(self._readers.submit(lambda: self._readers.snapshot(fetch).decode()))

    async def put_records(self, groups: Sequence[Group], records: Sequence[SessionRecord]) -> None:
        """Store all of the imported sessions and groups, or none. Raises ConflictError if the id of a session
        or group, or of anything in it, is taken."""
        await self.write(call_queries.PutRecords(groups, records))

    # rewards and other annotations
    add_rewards = _Write(session_queries.add_rewards)
    rewards = _Read(session_queries.get_rewards)
    rewards_by_session = _Read(annotations.get_rewards_by_session)
    unscored_sessions = _Read(annotations.get_unscored_sessions)
    record_scores = _Write(annotations.record_scores)
    scores = _Read(annotations.get_scores)
    score_counts = _Read(annotations.get_score_counts)
    add_tags = _Write(annotations.add_tags)
    remove_tags = _Write(annotations.remove_tags)
    tags = _Read(annotations.get_tags)
    add_feedback = _Write(annotations.add_feedback)
    feedback = _Read(annotations.get_feedback)
    corrections = _Read(annotations.get_corrections)
    judgment = _LookUp(annotations.get_judgment)
    put_judgment = _Write(annotations.put_judgment)
    judgment_totals = _Read(annotations.get_judgment_totals)

    # datasets
    put_dataset = _Write(dataset_queries.put_dataset)
    dataset = _Read(dataset_queries.get_dataset)
    datasets = _Read(dataset_queries.get_datasets)
    remove_dataset = _Write(dataset_queries.remove_dataset)

    # policy versions; version 0 is the base model and always exists
    reserve_version = _Write(policies.reserve_version)
    publish = _Write(policies.publish)
    tombstone = _Write(policies.tombstone)
    reserved_versions = _Read(policies.get_reserved_versions)
    steps_by_version = _Read(policies.get_steps_by_version)
    latest_policy = _Read(policies.get_latest_policy)
    published_policies = _Read(policies.get_published_policies)

    # training steps
    claim_step = _Write(step_queries.claim_step)
    drop_samples = _Write(step_queries.drop_samples)
    advance_step = _Write(step_queries.advance_step)
    release_steps = _Write(step_queries.release_steps)
    claims = _Read(step_queries.get_claims)
    recent_claims = _Read(step_queries.get_recent_claims)
    steps = _Read(step_queries.get_steps)

    # API keys
    put_key = _Write(key_queries.put_key)
    key = _LookUp(key_queries.get_key)
    keys = _Read(key_queries.get_keys)
    revoke_key = _Write(key_queries.revoke_key)

    async def secret(self, name: str) -> bytes:
        """Return the 32 random bytes with this name, which are created on first use."""
        value = await self.look_up(lambda db: key_queries.get_secret(db, name))
        return value or await self.write(lambda db: key_queries.create_secret(db, name))

    # processes of a run
    take_lease = _Write(leases.take_lease)
    put_endpoint = _Write(session_queries.put_endpoint)
    endpoints = _Read(session_queries.get_endpoints)
    remove_endpoint = _Write(session_queries.remove_endpoint)

    async def hold_lease(self, run_id: str, name: str, lease: int) -> None:
        """Hold this lease for all later writes. This call and every later write raise LeaseLost once a later
        lease has been taken."""
        check = leases.make_lease_check(run_id, name, lease)
        await self.write(check)
        assert self._writer is not None
        self._writer.lease_check = check
