"""Groups from outside: programs that the run did not start open groups, run the sessions and complete them.

The service opens a group together with a session for each slot, replaces failed sessions, fails sessions at
their deadline, and closes a group when all its slots have ended. All state is in the store, so a restarted
gateway continues every group. The key of a session is derived from its id and a secret in the store, so that
`GET /groups/{group}` can return it again.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from instar.config import GroupsConfig
from instar.errors import StoreError
from instar.gateway.auth import Caller
from instar.gateway.base import ApiError, FailSession, GroupView, OpenGroup, SlotView, invalid_value
from instar.gateway.context import GatewayContext
from instar.gateway.session_service import SessionService
from instar.gateway.session_states import SessionStates
from instar.http.auth import hash_key
from instar.registry import list_names
from instar.rollout.base import find_next_attempt
from instar.types import Channel, Group, GroupStatus, Json, Session, SessionStatus, Task, new_id

if TYPE_CHECKING:
    from instar.rollout.admission import Admission

logger = logging.getLogger(__name__)

SECRET_NAME = "group-keys"
"""The name of the store's secret from which the keys of the sessions are derived."""
POLL_INTERVAL_SECONDS = 0.2
RETRY_AFTER_SECONDS = 2
ANTHROPIC_DIALECT = "messages"


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The settings and the progress of a run on which its groups from outside depend."""

    admission: Admission
    config: GroupsConfig
    min_size: int
    has_scorers: bool
    """True if the sessions of a closed group are scored before it is used for training."""


@dataclass(slots=True, eq=False)
class GroupService:
    _context: GatewayContext
    _states: SessionStates
    _sessions: SessionService
    _options: GroupOptions
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while groups are opened or closed, so that admission counts all groups and a group closes once."""
    _secret: bytes | None = None

    async def open(self, body: OpenGroup, client_key: str | None) -> tuple[Group, bool]:
        """Open a group and return it with True. If ``client_key`` has opened it before, return it with False.

        Raise ApiError if the group is too small (400), if the run has trained all its steps or the key was
        used for a different group (409), or if there are enough groups ahead of the trainer (429).
        """
        if body.size < self._options.min_size:
            message = (
                f"'size' is {body.size}; it must be at least {self._options.min_size}, because the run's "
                "advantage estimator compares the sessions of a group."
            )
            raise invalid_value(message, "size")
        group = await self._make_group(body, client_key)
        async with self._lock:
            if (existing := await self._context.store.group(group.group_id)) is not None:
                if (existing.task, existing.size) == (group.task, group.size):
                    return existing, False
                message = "This idempotency key was used for a group with a different task or size."
                raise ApiError(409, message, code="conflict")
            await self._check_admission()
            sessions = [await self._make_session(group, slot, 0) for slot in range(group.size)]
            return await self._context.store.add_group(group, sessions), True

    async def get(self, group_id: str) -> Group:
        """Return the group. Raise ApiError (404) if it is not a group from outside in this run."""
        group = await self._context.store.group(group_id)
        if group is None or group.run_id != self._run_id or group.deadline_seconds is None:
            raise ApiError(404, f"This run has no group {group_id!r}.", code="group_not_found")
        return group

    async def abandon(self, group_id: str) -> Group:
        """Drop an open group and end its sessions. Raise ApiError (409) if its slots have all ended."""
        async with self._lock:
            group = await self.get(group_id)
            if group.status is GroupStatus.OPEN:
                await self._context.store.close_group(group_id, GroupStatus.DROPPED, "abandoned")
                for session in await self._read_sessions(group):
                    await self._states.refresh(session.session_id)
            elif group.status is not GroupStatus.DROPPED:
                message = f"The group {group_id!r} is {group.status}: all its slots have ended."
                raise ApiError(409, message, code="group_closed")
        return await self.get(group_id)

    async def view(self, group: Group, root_url: str) -> GroupView:
        assert group.deadline_seconds is not None
        latest = _select_latest(await self._read_sessions(group))
        ids = [session.session_id for session in latest.values()]
        rewards = await self._context.store.rewards_by_session(ids)
        slots: list[SlotView] = []
        for number, session in sorted(latest.items()):
            session_id = session.session_id
            agent_url = f"{root_url}/s/{session_id}"
            is_open = session.status is SessionStatus.OPEN
            values = [reward.value for reward in rewards[session_id] if reward.call_id is None]
            slots.append(
                SlotView(
                    slot=number,
                    session_id=session_id,
                    attempt=session.attempt,
                    status=session.status,
                    expires_at=session.created_at + group.deadline_seconds,
                    session_url=f"{root_url}/sessions/{session_id}",
                    base_url=f"{agent_url}/v1",
                    base_urls={
                        name: agent_url if name == ANTHROPIC_DIALECT else f"{agent_url}/v1"
                        for name in list_names("dialects")
                    },
                    api_key=await self._derive_key(session_id) if is_open else None,
                    reason=session.reason,
                    reward=values[-1] if values else None,
                )
            )
        return GroupView(
            group_id=group.group_id,
            index=group.index,
            status=group.status,
            size=group.size,
            task_id=group.task.task_id,
            task=group.task.data,
            deadline_s=group.deadline_seconds,
            created_at=group.created_at,
            slots=slots,
            reason=group.reason,
        )

    async def run(self) -> None:
        """Update the open groups until the task is cancelled."""
        is_resumed = False
        while True:
            try:
                if not is_resumed:
                    await self._resume()
                    is_resumed = True
                async with self._lock:
                    for group in await self._read_groups(GroupStatus.OPEN):
                        await self._update(group)
            except (StoreError, ApiError) as error:
                logger.warning("Could not update the groups, will retry: %s", error)
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _resume(self) -> None:
        """Drop the groups that a rollout left open before the config was changed, and release those that wait
        for scorers that are no longer configured."""
        store = self._context.store
        for group in await self._read_groups(GroupStatus.OPEN):
            if group.deadline_seconds is None:
                await store.close_group(group.group_id, GroupStatus.DROPPED, "interrupted")
        if not self._options.has_scorers:
            for group in await self._read_groups(GroupStatus.SCORING):
                await store.close_group(group.group_id, GroupStatus.READY)

    async def _update(self, group: Group) -> None:
        """Fail expired sessions and replace failed ones, or close the group if all its slots have ended."""
        sessions = await self._read_sessions(group)
        has_open_slots = False
        for slot in range(group.size):
            attempts = [session for session in sessions if session.slot == slot]
            open_sessions = [session for session in attempts if session.status is SessionStatus.OPEN]
            for session in open_sessions:
                await self._fail_if_expired(group, session)
            next_attempt = find_next_attempt(attempts, self._options.config)
            if open_sessions or next_attempt is not None:
                has_open_slots = True
            if not open_sessions and next_attempt is not None:
                session, key_hash = await self._make_session(group, slot, next_attempt[0])
                await self._context.store.open_session(session, key_hash)
        if has_open_slots:
            return
        latest = _select_latest(sessions).values()
        has_failed = any(session.status is SessionStatus.FAILED for session in latest)
        if has_failed and self._options.config.group_policy == "drop":
            await self._context.store.close_group(group.group_id, GroupStatus.DROPPED, "session_failed")
        else:
            status = GroupStatus.SCORING if self._options.has_scorers else GroupStatus.READY
            await self._context.store.close_group(group.group_id, status)

    async def _fail_if_expired(self, group: Group, session: Session) -> None:
        seconds = group.deadline_seconds
        if seconds is not None and time.time() >= session.created_at + seconds:
            body = FailSession(reason=f"the session was not completed within {seconds:g} s")
            await self._sessions.end(session.session_id, Caller("admin"), body)

    async def _check_admission(self) -> None:
        state = await self._options.admission.read_state()
        if state.is_finished:
            message = "The run has trained all its steps (trainer.steps), so it accepts no more groups."
            raise ApiError(409, message, code="run_finished")
        if not state.startable_groups:
            message = (
                "The run has enough groups for the steps that it may prepare (trainer.max_staleness); retry "
                "when the trainer has used some of them."
            )
            raise ApiError(429, message, code="too_many_groups", retry_after=RETRY_AFTER_SECONDS)

    async def _make_group(self, body: OpenGroup, client_key: str | None) -> Group:
        data: Json = self._context.redactor.redact_value(body.task)
        digest = blake2b(msgspec.json.encode(data, order="sorted"), digest_size=8).hexdigest()
        group_id = secrets.token_hex(16)
        if client_key is not None:
            group_id = (await self._compute_mac(f"group/{self._run_id}/{client_key}")).hex()[:32]
        return Group(
            group_id=f"grp-{group_id}",
            run_id=self._run_id,
            channel=Channel.TRAIN,
            index=0,  # the store sets the index
            size=body.size,
            task=Task(f"task-{digest}" if body.task_id is None else body.task_id, data),
            created_at=time.time(),
            deadline_seconds=body.deadline_s or self._options.config.deadline,
        )

    async def _make_session(self, group: Group, slot: int, attempt: int) -> tuple[Session, str]:
        """Return a new session and the hash of its key."""
        session = Session(
            session_id=new_id("sess"),
            run_id=self._run_id,
            agent_id=self._context.identity.default_agent_id,
            policy_id=self._context.identity.get_policy_id(None),
            channel=Channel.TRAIN,
            group_id=group.group_id,
            slot=slot,
            attempt=attempt,
            task_id=group.task.task_id,
            seed=secrets.randbits(31),  # replaces the agents' own seed, so that a group's sessions differ
            created_at=time.time(),
        )
        return session, hash_key(await self._derive_key(session.session_id))

    async def _derive_key(self, session_id: str) -> str:
        mac = await self._compute_mac(f"session/{session_id}")
        return f"sk-instar-{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"

    async def _compute_mac(self, text: str) -> bytes:
        if self._secret is None:
            self._secret = await self._context.store.secret(SECRET_NAME)
        return hmac.digest(self._secret, text.encode("utf-8", "surrogatepass"), "sha256")

    @property
    def _run_id(self) -> str:
        return self._context.identity.run_id

    async def _read_groups(self, status: GroupStatus) -> list[Group]:
        return await self._context.store.groups(self._run_id, Channel.TRAIN, status)

    async def _read_sessions(self, group: Group) -> list[Session]:
        """Return the group's sessions in the order of their attempts."""
        agent_id = self._context.identity.default_agent_id
        sessions = (await self._context.store.group_sessions([group], agent_id))[group.group_id]
        return sorted(sessions, key=lambda session: session.attempt)


def _select_latest(sessions: Iterable[Session]) -> dict[int, Session]:
    """Return the last session of each slot, by slot. ``sessions`` are in the order of their attempts."""
    return {session.slot: session for session in sessions}
