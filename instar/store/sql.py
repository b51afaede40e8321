"""A store over SQL: every method as a function of the database, which the variants open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from instar.errors import StoreError
from instar.store import annotations, leases, listing, policies, sessions, steps
from instar.store import calls as call_queries
from instar.store import datasets as dataset_queries
from instar.store import keys as key_queries
from instar.store import session_records as record_queries
from instar.store.base import (
    CallDelta,
    DatasetRow,
    KeyRow,
    Progress,
    Run,
    SessionFilter,
    SessionRecord,
    SessionRow,
    Store,
    UnscoredSession,
)
from instar.store.database import Database
from instar.store.reader import ReaderPool
from instar.store.rows import encode_claim, encode_group, encode_reward, encode_session
from instar.store.writer import Writer
from instar.types import (
    Call,
    Channel,
    Claim,
    ClaimOutcome,
    Endpoint,
    Feedback,
    Group,
    GroupStatus,
    Json,
    Policy,
    Reward,
    Score,
    Session,
    SessionStatus,
    Step,
    StepState,
    Tag,
)

T = TypeVar("T")

SESSIONS_AT_ONCE = 64
"""Whose calls one read takes: no snapshot is held for long."""


class SqlStore(Store):
    """Usable from any event loop. A caller that is cancelled while its write is under way may find it
    written; cancelled before, not."""

    def __init__(self, name: str, writer: Writer | None, readers: ReaderPool) -> None:
        """``name`` tells people which store it is. Without a writer it is for reading only."""
        self._name = name
        self._writer = writer
        self._readers = readers
        self._bases = call_queries.BaseCallCache()

    @property
    def commits(self) -> int:
        """Transactions committed by this process, each one wait for the disk."""
        return self._writer.commits if self._writer else 0

    async def close(self) -> None:
        """Finish what is queued. Closing twice is allowed."""
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)
        await asyncio.to_thread(self._readers.close)

    def _write(self, work: Callable[[Database], T]) -> asyncio.Future[T]:
        if self._writer is None:
            raise StoreError(f"{self._name} was opened for reading only")
        return self._writer.submit(work)

    async def _read(self, fetch: Callable[[Database], T]) -> T:
        return await asyncio.wrap_future(self._readers.submit(lambda: self._readers.snapshot(fetch)))

    async def _look_up(self, fetch: Callable[[Database], T]) -> T:
        return await asyncio.wrap_future(self._readers.submit(lambda: self._readers.look_up(fetch)))

    async def _decoded(
        self,
        fetch: Callable[[Database], call_queries.FetchedCalls],
        decode: Callable[[call_queries.FetchedCalls], T],
    ) -> T:
        return await asyncio.wrap_future(self._readers.submit(lambda: decode(self._readers.snapshot(fetch))))

    # runs

    async def put_run(self, run: Run) -> None:
        await self._write(lambda db: sessions.put_run(db, run))

    async def run(self, run_id: str) -> Run | None:
        return await self._read(lambda db: sessions.get_run(db, run_id))

    async def runs(self) -> list[Run]:
        return await self._read(sessions.get_runs)

    # groups and sessions

    async def open_group(self, group: Group) -> None:
        row = encode_group(group)
        await self._write(lambda db: sessions.open_group(db, row))

    async def close_group(self, group_id: str, status: GroupStatus, reason: str | None = None) -> None:
        await self._write(lambda db: sessions.close_group(db, group_id, status, reason))

    async def group(self, group_id: str) -> Group | None:
        return await self._look_up(lambda db: sessions.get_group(db, group_id))

    async def groups(
        self,
        run_id: str,
        channel: Channel,
        status: GroupStatus | None = None,
        *,
        unclaimed_in_epoch: int | None = None,
    ) -> list[Group]:
        return await self._read(
            lambda db: sessions.get_groups(db, run_id, channel, status, unclaimed_in_epoch)
        )

    async def open_session(self, session: Session, key_hash: str | None = None) -> None:
        row = encode_session(session, key_hash)
        await self._write(lambda db: sessions.open_session(db, row))

    async def session(self, session_id: str) -> Session | None:
        return await self._look_up(lambda db: sessions.get_session(db, "session_id", session_id))

    async def session_by_key(self, key_hash: str) -> Session | None:
        return await self._look_up(lambda db: sessions.get_session(db, "key_hash", key_hash))

    async def session_by_external_id(self, run_id: str, agent_id: str, external_id: str) -> Session | None:
        return await self._look_up(
            lambda db: sessions.get_session_by_external(db, run_id, agent_id, external_id)
        )

    async def session_by_tail(self, run_id: str, agent_id: str, keys: Sequence[bytes]) -> str | None:
        return await self._look_up(lambda db: call_queries.session_by_tail(db, run_id, agent_id, keys))

    async def idle_sessions(self, run_id: str, before: float) -> list[str]:
        return await self._look_up(lambda db: sessions.silent_sessions(db, run_id, before))

    async def end_session(
        self,
        session_id: str,
        status: SessionStatus,
        reason: str | None = None,
        rewards: Sequence[Reward] = (),
        metadata: Json | None = None,
        scores: Sequence[Score] = (),
    ) -> bool:
        if status is SessionStatus.OPEN:
            raise StoreError(f"session {session_id} cannot end as open")
        rows = [encode_reward(reward) for reward in rewards]

        def end(db: Database) -> bool:
            return sessions.end_session(db, session_id, status, reason, rows, metadata)

        return await self._write(lambda db: annotations.end_scored(db, end, scores))

    async def last_ended_seq(self, run_id: str, channels: Sequence[Channel]) -> int:
        return await self._read(lambda db: annotations.settled(db, run_id, channels))

    async def sessions(
        self,
        run_id: str | None = None,
        *,
        group_id: str | None = None,
        channel: Channel | None = None,
        status: SessionStatus | None = None,
        where: SessionFilter | None = None,
        before: int | None = None,
        after: int | None = None,
        limit: int | None = None,
    ) -> list[SessionRow]:
        wanted = where or SessionFilter()
        wanted = replace(wanted, channel=channel or wanted.channel, status=status or wanted.status)
        page = listing.Page(run_id, group_id, wanted, before, after, limit)
        return await self._read(lambda db: listing.get_sessions(db, page))

    async def sessions_by_group(self, group_ids: Sequence[str]) -> dict[str, list[Session]]:
        return await self._read(lambda db: listing.get_sessions_in(db, group_ids))

    # calls

    async def add_calls(
        self,
        calls: Sequence[Call],
        *,
        opening: Session | None = None,
        key_hash: str | None = None,
        tail_keys: Mapping[str, bytes] | None = None,
    ) -> None:
        await self._write(call_queries.AddCalls(calls, opening, key_hash, tail_keys or {}, self._bases))

    async def call(self, call_id: str) -> Call | None:
        decoded = await self._decoded(
            lambda db: call_queries.fetch_call(db, call_id), call_queries.FetchedCalls.decode
        )
        return decoded[0] if decoded else None

    async def calls(self, session_id: str) -> list[Call]:
        return await self._decoded(
            lambda db: call_queries.fetch_calls(db, "session_id", session_id),
            call_queries.FetchedCalls.decode,
        )

    async def calls_by_session(self, session_ids: Sequence[str]) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = {session_id: [] for session_id in session_ids}
        for start in range(0, len(session_ids), SESSIONS_AT_ONCE):
            part = session_ids[start : start + SESSIONS_AT_ONCE]
            calls = await self._decoded(
                lambda db, part=part: call_queries.fetch_calls(db, "session_id", *part),
                call_queries.FetchedCalls.decode,
            )
            for call in calls:
                found[call.session_id].append(call)
        return found

    async def calls_by_request(self, request_id: str) -> list[Call]:
        return await self._decoded(
            lambda db: call_queries.fetch_calls(db, "request_id", request_id),
            call_queries.FetchedCalls.decode,
        )

    async def call_deltas(self, session_id: str) -> list[CallDelta]:
        return await self._decoded(
            lambda db: call_queries.fetch_deltas(db, session_id), call_queries.FetchedCalls.decode_deltas
        )

    # rewards and what was said of sessions

    async def add_rewards(self, rewards: Sequence[Reward]) -> None:
        rows = [encode_reward(reward) for reward in rewards]
        await self._write(lambda db: sessions.add_rewards(db, rows))

    async def rewards(self, session_id: str) -> list[Reward]:
        return await self._read(lambda db: sessions.get_rewards(db, session_id))

    async def rewards_by_session(self, session_ids: Sequence[str]) -> dict[str, list[Reward]]:
        return await self._read(lambda db: annotations.get_rewards_of(db, session_ids))

    async def unscored_sessions(
        self,
        run_id: str,
        scorer: str,
        channels: Sequence[Channel],
        *,
        after: int = 0,
        limit: int = 256,
        pending_only: bool = False,
    ) -> list[UnscoredSession]:
        return await self._read(
            lambda db: annotations.unscored(db, run_id, scorer, channels, after, limit, pending_only)
        )

    async def record_scores(self, scores: Sequence[Score], rewards: Sequence[Reward]) -> bool:
        rows = [encode_reward(reward) for reward in rewards]
        return await self._write(lambda db: annotations.record_scores(db, scores, rows))

    async def scores(self, session_ids: Sequence[str]) -> dict[str, list[Score]]:
        return await self._read(lambda db: annotations.get_scores(db, session_ids))

    async def score_counts(self, run_id: str) -> dict[str, dict[str, int]]:
        return await self._read(lambda db: annotations.score_counts(db, run_id))

    async def add_tags(self, tags: Sequence[Tag]) -> None:
        await self._write(lambda db: annotations.add_tags(db, tags))

    async def remove_tags(self, session_ids: Sequence[str], name: str) -> int:
        return await self._write(lambda db: annotations.remove_tags(db, session_ids, name))

    async def tags(self, session_ids: Sequence[str]) -> dict[str, list[Tag]]:
        return await self._read(lambda db: annotations.get_tags(db, session_ids))

    async def add_feedback(self, feedback: Feedback, rewards: Sequence[Reward] = ()) -> bool:
        rows = [encode_reward(reward) for reward in rewards]
        return await self._write(lambda db: annotations.add_feedback(db, feedback, rows))

    async def feedback(
        self, run_id: str, *, session_id: str | None = None, corrected: bool = False
    ) -> list[Feedback]:
        return await self._read(lambda db: annotations.get_feedback(db, run_id, session_id, corrected))

    async def corrections(self, run_id: str, epoch: int, limit: int) -> list[Feedback]:
        return await self._read(lambda db: annotations.get_lessons(db, run_id, epoch, limit))

    async def judgment(self, key: bytes) -> Json | None:
        return await self._look_up(lambda db: annotations.get_judgment(db, key))

    async def put_judgment(self, key: bytes, run_id: str, answer: Json, cost: float = 0.0) -> None:
        await self._write(lambda db: annotations.put_judgment(db, key, run_id, answer, cost))

    async def judgment_totals(self, run_id: str) -> tuple[int, float]:
        return await self._read(lambda db: annotations.judged(db, run_id))

    # data that was put aside, and known by name

    async def put_records(self, groups: Sequence[Group], records: Sequence[SessionRecord]) -> None:
        await self._write(record_queries.PutRecords(groups, records))

    async def put_dataset(self, name: str, path: str, hash: str, manifest: Json) -> DatasetRow:
        return await self._write(lambda db: dataset_queries.put_dataset(db, name, path, hash, manifest))

    async def dataset(self, name: str, version: int | None = None) -> DatasetRow | None:
        return await self._read(lambda db: dataset_queries.get_dataset(db, name, version))

    async def datasets(self) -> list[DatasetRow]:
        return await self._read(dataset_queries.get_datasets)

    async def remove_dataset(self, name: str, version: int | None = None) -> int:
        return await self._write(lambda db: dataset_queries.remove_dataset(db, name, version))

    # policies

    async def reserve_version(self, policy_id: str, run_id: str, step: int) -> int:
        return await self._write(lambda db: policies.reserve_version(db, policy_id, run_id, step))

    async def publish(self, policy: Policy) -> None:
        await self._write(lambda db: policies.publish(db, policy))

    async def tombstone(self, policy_id: str, version: int, reason: str) -> None:
        await self._write(lambda db: policies.tombstone(db, policy_id, version, reason))

    async def reserved_versions(self, policy_id: str) -> list[tuple[int, int]]:
        return await self._read(lambda db: policies.reserved_versions(db, policy_id))

    async def steps_by_version(self, policy_id: str) -> dict[int, int]:
        return await self._read(lambda db: policies.steps_of_versions(db, policy_id))

    async def latest_policy(self, policy_id: str) -> Policy:
        return await self._read(lambda db: policies.head(db, policy_id))

    async def published_policies(self, policy_id: str) -> list[tuple[Policy, int]]:
        return await self._read(lambda db: policies.published(db, policy_id))

    # training steps

    async def claim_step(self, run_id: str, step: int, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if claim.run_id != run_id or claim.step not in (None, step):
                raise StoreError(f"claim of {claim.sample_key} is not one of step {step} of run {run_id}")
        rows = [encode_claim(claim, step) for claim in claims]
        await self._write(lambda db: steps.claim_step(db, run_id, step, rows))

    async def drop_samples(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if claim.outcome is not ClaimOutcome.DROPPED or not claim.reason:
                raise StoreError(f"claim of {claim.sample_key} is no drop with a reason")
        rows = [encode_claim(claim, claim.step) for claim in claims]
        await self._write(lambda db: steps.add_claims(db, rows))

    async def advance_step(
        self,
        run_id: str,
        step: int,
        state: StepState,
        *,
        state_path: str | None = None,
        version: int | None = None,
        metrics: Json | None = None,
    ) -> None:
        await self._write(
            lambda db: steps.advance_step(db, run_id, step, state, state_path, version, metrics)
        )

    async def release_steps(self, run_id: str, after: int) -> list[int]:
        return await self._write(lambda db: steps.release_steps(db, run_id, after))

    async def steps(self, run_id: str) -> list[Step]:
        return await self._read(lambda db: steps.get_steps(db, run_id))

    async def claims(
        self, run_id: str, *, step: int | None = None, session_id: str | None = None
    ) -> list[Claim]:
        return await self._read(lambda db: steps.get_claims(db, run_id, step, session_id))

    async def recent_claims(self, run_id: str, epoch: int, groups: int) -> list[Claim]:
        return await self._read(lambda db: steps.get_settled_claims(db, run_id, epoch, groups))

    async def progress(self, run_id: str, channel: Channel = Channel.TRAIN) -> Progress:
        return await self._read(lambda db: steps.progress(db, run_id, channel))

    # keys and secrets

    async def put_key(self, key: KeyRow) -> None:
        await self._write(lambda db: key_queries.put_key(db, key))

    async def key(self, key_hash: str) -> KeyRow | None:
        return await self._look_up(lambda db: key_queries.get_key(db, key_hash))

    async def keys(self) -> list[KeyRow]:
        return await self._read(key_queries.get_keys)

    async def revoke_key(self, prefix_or_name: str) -> int:
        return await self._write(lambda db: key_queries.revoke_key(db, prefix_or_name))

    async def secret(self, name: str) -> bytes:
        found = await self._look_up(lambda db: key_queries.get_secret(db, name))
        return found or await self._write(lambda db: key_queries.make_secret(db, name))

    # who acts for a run

    async def take_lease(self, run_id: str, name: str) -> int:
        return await self._write(lambda db: leases.take_lease(db, run_id, name))

    async def hold_lease(self, run_id: str, name: str, lease: int) -> None:
        check = leases.make_lease_check(run_id, name, lease)
        await self._write(check)
        assert self._writer is not None
        self._writer.lease_check = check

    # roles that are up

    async def put_endpoint(self, endpoint: Endpoint) -> None:
        await self._write(lambda db: sessions.put_endpoint(db, endpoint))

    async def endpoints(self, run_id: str) -> list[Endpoint]:
        return await self._read(lambda db: sessions.get_endpoints(db, run_id))

    async def remove_endpoint(self, run_id: str, role: str, name: str) -> None:
        await self._write(lambda db: sessions.remove_endpoint(db, run_id, role, name))
