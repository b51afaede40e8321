"""The store: the sessions, calls, annotations and training steps of one or more runs.

SQLite and PostgreSQL share the class `Store` and differ in the `Database` that they open. Queries are
functions in other modules that take a `Database`. `Store` exposes each as an async method, which runs it as a
write, a snapshot read or a single-statement read. Writes are durable when they return and may share a commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from instar.errors import StoreError
from instar.store import annotations, forgetting, lineage, listing, live, policies
from instar.store import calls as call_queries
from instar.store import evaluations as evaluation_queries
from instar.store import sessions as session_queries
from instar.store import shared_rows as shared_queries
from instar.store import steps as step_queries
from instar.store.database import Database
from instar.store.group_members import is_member
from instar.store.models import JUDGED_TAG as JUDGED_TAG
from instar.store.models import RESAMPLED_PREFIX as RESAMPLED_PREFIX
from instar.store.models import RESAMPLED_TAG as RESAMPLED_TAG
from instar.store.models import ActiveVersion as ActiveVersion
from instar.store.models import CallDelta as CallDelta
from instar.store.models import DatasetRow as DatasetRow
from instar.store.models import Evaluation as Evaluation
from instar.store.models import EvaluationDecision as EvaluationDecision
from instar.store.models import EvaluationItem as EvaluationItem
from instar.store.models import ForgottenSession as ForgottenSession
from instar.store.models import KeyKind as KeyKind
from instar.store.models import KeyRow as KeyRow
from instar.store.models import PolicyVersion as PolicyVersion
from instar.store.models import Progress as Progress
from instar.store.models import ProgressDetails as ProgressDetails
from instar.store.models import Run as Run
from instar.store.models import SessionFilter as SessionFilter
from instar.store.models import SessionRecord as SessionRecord
from instar.store.models import SessionRow as SessionRow
from instar.store.models import ShadowPair as ShadowPair
from instar.store.models import ShadowReply as ShadowReply
from instar.store.models import StoredReply as StoredReply
from instar.store.models import TrainedSession as TrainedSession
from instar.store.models import UnscoredSession as UnscoredSession
from instar.store.models import is_correction_key as is_correction_key
from instar.store.models import make_feedback_reward_id as make_feedback_reward_id
from instar.store.models import make_resampled_group_id as make_resampled_group_id
from instar.store.reader import ReaderPool
from instar.store.writer import Writer
from instar.types import Call, Group, Json, Session

P = ParamSpec("P")
T = TypeVar("T")
Query = Callable[Concatenate[Database, P], T]
Method = Callable[Concatenate["Store", P], Coroutine[Any, Any, T]]

SESSIONS_PER_READ = 64
"""The maximum number of sessions whose calls are read in one snapshot, to keep snapshots short."""
SESSIONS_PER_WRITE = 500
"""The maximum number of sessions that are completed in one transaction, so that other writers do not wait."""


def _expose(query: Query[P, T], mode: Literal["write", "read", "read_statement"]) -> Method[P, T]:
    """Return a method of `Store` that runs the query with the method ``mode`` of `Store`."""

    async def run(store: Store, *args: P.args, **kwargs: P.kwargs) -> T:
        def work(db: Database) -> T:
            return query(db, *args, **kwargs)

        return await getattr(store, mode)(work)

    run.__doc__ = query.__doc__
    return run


def _write(query: Query[P, T]) -> Method[P, T]:
    return _expose(query, "write")


def _read(query: Query[P, T]) -> Method[P, T]:
    return _expose(query, "read")


def _read_statement(query: Query[P, T]) -> Method[P, T]:
    return _expose(query, "read_statement")


class Store:
    """A store, usable from any event loop.

    If a caller is cancelled before its write starts, the write is skipped. If the caller is cancelled during
    the write, the write may still be committed.
    """

    def __init__(self, name: str, writer: Writer | None, readers: ReaderPool) -> None:
        """``name`` identifies the store in messages. A store without a writer is read-only."""
        self._name = name
        self._writer = writer
        self._readers = readers
        self.base_call_cache = call_queries.BaseCallCache()

    @property
    def commit_count(self) -> int:
        return self._writer.commit_count if self._writer else 0

    async def close(self) -> None:
        """Commit the queued writes and close the store. Closing a closed store has no effect."""
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)
        await asyncio.to_thread(self._readers.close)

    async def write(self, work: Callable[[Database], T]) -> T:
        if self._writer is None:
            raise StoreError(f"cannot write to {self._name}: it was opened read-only")
        return await self._writer.submit(work)

    async def read(self, fetch: Callable[[Database], T]) -> T:
        """Run a query whose statements all see the same snapshot."""
        return await self._readers.submit(lambda: self._readers.read_snapshot(fetch))

    async def read_statement(self, fetch: Callable[[Database], T]) -> T:
        """Run a query that consists of a single statement, without a transaction."""
        return await self._readers.submit(lambda: self._readers.read(fetch))

    # runs
    put_run = _write(session_queries.put_run)
    run = _read(session_queries.get_run)
    runs = _read(session_queries.get_runs)
    progress = _read(step_queries.get_progress)
    progress_details = _read(session_queries.get_progress_details)

    # groups and sessions
    open_group = _write(session_queries.open_group)
    add_group = _write(session_queries.add_group)
    close_group = _write(session_queries.close_group)
    group = _read_statement(session_queries.get_group)
    groups = _read(session_queries.get_groups)
    open_session = _write(session_queries.open_session)
    end_session = _write(annotations.end_session)
    session = _read_statement(session_queries.get_session)
    session_by_key = _read_statement(session_queries.get_session_by_key)
    session_by_external_id = _read_statement(session_queries.get_session_by_external_id)
    sessions_by_tail = _read_statement(call_queries.get_sessions_by_tail)
    idle_sessions = _read_statement(session_queries.get_idle_sessions)
    seq_before_oldest_open = _read(annotations.get_seq_before_oldest_open)
    sessions = _read(listing.get_sessions)
    rewarded_live_sessions = _read(live.get_rewarded_live_sessions)
    newest_live_sessions = _read_statement(live.get_newest_live_sessions)
    completed_live_sessions = _read_statement(live.get_completed_live_sessions)
    replayable_sessions = _read(live.get_replayable_sessions)
    unresampled_sessions = _read(live.get_unresampled_sessions)
    sessions_by_group = _read(listing.get_sessions_by_group)

    async def group_sessions(self, groups: Sequence[Group], agent_id: str) -> dict[str, list[Session]]:
        """Return the sessions that belong to each group, by group id, oldest first. Sessions that have the
        group's id but do not belong to it are left out (see `is_member`)."""
        sessions = await self.sessions_by_group([group.group_id for group in groups])
        return {
            group.group_id: [s for s in sessions[group.group_id] if is_member(group, s, agent_id)]
            for group in groups
        }

    async def list_idle_sessions(self, run_id: str, before: float) -> list[str]:
        """Return the ids of the run's open live sessions without a call since the Unix time ``before``."""
        session_ids: list[str] = []
        last_seq = 0
        while page := await self.idle_sessions(run_id, before, after=last_seq):
            last_seq = page[-1].seq
            session_ids += [row.session_id for row in page]
        return session_ids

    async def complete_sessions(self, session_ids: Sequence[str], reason: str) -> int:
        """Complete the sessions that are still open, and return how many."""
        count = 0
        for start in range(0, len(session_ids), SESSIONS_PER_WRITE):
            page = session_ids[start : start + SESSIONS_PER_WRITE]
            count += await self.write(partial(annotations.complete_sessions, session_ids=page, reason=reason))
        return count

    # calls
    async def add_calls(
        self,
        calls: Sequence[Call],
        *,
        new_session: Session | None = None,
        key_hash: str | None = None,
        tail_keys: Mapping[str, bytes] | None = None,
        users: Sequence[str] = (),
        response_fields: Json | None = None,
    ) -> None:
        """Store the calls atomically. A call's base must already be stored or precede the call in ``calls``.
        Calls may be added to a session that has ended.

        ``new_session`` is opened first, in the same transaction, with an API key that has the hash
        ``key_hash``. ``tail_keys`` maps call ids to tail keys, by which `sessions_by_tail` finds the session
        of a request that continues the call. ``users`` are users whom the calls' sessions belong to, and
        ``response_fields`` is stored with each call for `replies`. Raises ConflictError if the id of the new
        session or of a call is taken, and StoreError if a session or base call is missing.
        """
        cache = self.base_call_cache
        await self.write(
            call_queries.AddCalls(
                calls, new_session, key_hash, tail_keys or {}, cache, users, response_fields
            )
        )

    async def call(self, call_id: str) -> Call | None:
        calls = await self._read_calls(lambda db: call_queries.fetch_call(db, call_id))
        return calls[0] if calls else None

    async def calls(self, session_id: str) -> list[Call]:
        """Return the calls of a session in commit order, with complete prompts and messages."""
        return await self._read_calls(lambda db: call_queries.fetch_calls(db, "session_id", session_id))

    async def calls_by_session(self, session_ids: Sequence[str]) -> dict[str, list[Call]]:
        by_session: dict[str, list[Call]] = {session_id: [] for session_id in session_ids}
        for start in range(0, len(session_ids), SESSIONS_PER_READ):
            page = session_ids[start : start + SESSIONS_PER_READ]
            calls = await self._read_calls(
                lambda db, page=page: call_queries.fetch_calls(db, "session_id", *page)
            )
            for call in calls:
                by_session[call.session_id].append(call)
        return by_session

    async def calls_by_request(self, request_id: str) -> list[Call]:
        """Return the calls of a request. A request for several replies has several calls."""
        return await self._read_calls(lambda db: call_queries.fetch_calls(db, "request_id", request_id))

    replies = _read_statement(call_queries.get_replies)

    async def first_call(self, session_id: str) -> Call | None:
        """Return the first call of the session, or None if it has no calls."""
        call_id = await self.read_statement(lambda db: call_queries.get_first_call_id(db, session_id))
        return None if call_id is None else await self.call(call_id)

    async def call_deltas(self, session_id: str) -> list[CallDelta]:
        """Return the calls of a session in commit order, without the prefixes that they share with their base
        calls. The cost is linear in the stored tokens, not in the total length of the prompts."""
        fetch = partial(call_queries.fetch_deltas, session_id=session_id)
        return await self._readers.submit(lambda: self._readers.read_snapshot(fetch).decode_deltas())

    async def _read_calls(self, fetch: Callable[[Database], call_queries.FetchedCalls]) -> list[Call]:
        # The calls are decoded after the snapshot, to keep it short.
        return await self._readers.submit(lambda: self._readers.read_snapshot(fetch).decode())

    first_messages = _read_statement(call_queries.get_first_messages)
    first_prompts = _read_statement(call_queries.get_first_prompts)
    put_records = _write(call_queries.put_records)

    # rewards and other annotations
    add_rewards = _write(session_queries.add_rewards)
    rewards = _read(session_queries.get_rewards)
    rewards_by_session = _read(annotations.get_rewards_by_session)
    unscored_sessions = _read(annotations.get_unscored_sessions)
    record_scores = _write(annotations.record_scores)
    scores = _read(annotations.get_scores)
    reward_counts = _read(annotations.get_reward_counts)
    score_counts = _read(annotations.get_score_counts)
    add_tags = _write(annotations.add_tags)
    remove_tags = _write(annotations.remove_tags)
    tags = _read(annotations.get_tags)
    add_feedback = _write(annotations.add_feedback)
    feedback = _read(annotations.get_feedback)
    corrections = _read(annotations.get_corrections)
    preferences = _read(annotations.get_preferences)
    judgment = _read_statement(annotations.get_judgment)
    put_judgment = _write(annotations.put_judgment)
    judgment_totals = _read(annotations.get_judgment_totals)

    # deletion of sessions
    session_ids = _read(forgetting.get_session_ids)
    expired_sessions = _read(forgetting.get_expired_sessions)
    forget_sessions = _write(forgetting.forget_sessions)
    forgotten_sessions = _read(forgetting.get_forgotten_sessions)
    forgotten_after = _read_statement(forgetting.get_forgotten_after)
    trained_sessions = _read(forgetting.get_trained_sessions)

    async def erase_deleted(self, *, rewrite: bool) -> bool:
        """Erase what was deleted from the store's files. Without ``rewrite``, remnants may stay in parts of
        the files that are not in use. With it, everything is rewritten, and other processes wait with their
        writes. Return False if it must be repeated, because another process used the store for too long."""
        raise NotImplementedError

    # datasets
    put_dataset = _write(shared_queries.put_dataset)
    dataset = _read(shared_queries.get_dataset)
    datasets = _read(shared_queries.get_datasets)
    remove_dataset = _write(shared_queries.remove_dataset)

    # policy versions; version 0 always exists, and is the base model unless the run starts from an adapter
    put_initial_policy = _write(policies.put_initial_policy)
    reserve_version = _write(policies.reserve_version)
    publish = _write(policies.publish)
    tombstone = _write(policies.tombstone)
    reserved_versions = _read(policies.get_reserved_versions)
    steps_by_version = _read(policies.get_steps_by_version)
    latest_policy = _read(policies.get_latest_policy)
    policy_ids = _read(policies.get_policy_ids)
    published_policies = _read(policies.get_published_policies)
    policy_versions = _read(lineage.get_policy_versions)
    rejected_versions = _read_statement(lineage.get_rejected_versions)
    active_versions = _read_statement(live.get_active_versions)
    add_shadow_reply = _write(live.add_shadow_reply)
    shadow_pairs = _read_statement(live.get_shadow_pairs)
    advance_version = _write(lineage.advance_version)
    promote_version = _write(lineage.promote_version)
    reject_version = _write(lineage.reject_version)
    roll_back = _write(lineage.roll_back)

    # evaluations of candidates
    promotable_versions = _read_statement(evaluation_queries.get_promotable_versions)
    evaluations = _read_statement(evaluation_queries.get_evaluations)
    begin_evaluation = _write(evaluation_queries.begin_evaluation)
    evaluation_items = _read_statement(evaluation_queries.get_evaluation_items)
    add_evaluation_item = _write(evaluation_queries.add_evaluation_item)
    record_evaluation = _write(evaluation_queries.record_evaluation)
    move_version = _write(evaluation_queries.move_version)

    # training steps
    claim_step = _write(step_queries.claim_step)
    drop_samples = _write(step_queries.drop_samples)
    advance_step = _write(step_queries.advance_step)
    release_steps = _write(step_queries.release_steps)
    claims = _read(step_queries.get_claims)
    recent_claims = _read(step_queries.get_recent_claims)
    steps = _read(step_queries.get_steps)
    steps_to_commit = _read(step_queries.get_steps_to_commit)

    # API keys
    put_key = _write(shared_queries.put_key)
    key = _read_statement(shared_queries.get_key)
    keys = _read(shared_queries.get_keys)
    revoke_key = _write(shared_queries.revoke_key)

    async def secret(self, name: str) -> bytes:
        """Return the secret with this name: 32 random bytes that are created on first use."""
        value = await self.read_statement(lambda db: shared_queries.get_secret(db, name))
        return value or await self.write(lambda db: shared_queries.create_secret(db, name))

    # processes of a run
    take_lease = _write(session_queries.take_lease)
    lease = _read_statement(session_queries.get_lease)
    put_endpoint = _write(session_queries.put_endpoint)
    endpoints = _read(session_queries.get_endpoints)
    remove_endpoint = _write(session_queries.remove_endpoint)

    async def hold_lease(self, run_id: str, name: str, lease: int) -> None:
        """Check the lease now and in every later write. Raises LeaseLost if a later lease was taken."""
        lease_check = session_queries.make_lease_check(run_id, name, lease)
        await self.write(lease_check)
        assert self._writer is not None
        self._writer.lease_check = lease_check
