"""Open, end and describe sessions."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from instar.async_utils import map_concurrently
from instar.errors import ConflictError, SessionNotFound
from instar.gateway import base
from instar.gateway.auth import Action, Caller, authorize, check_reward, new_key
from instar.gateway.base import ApiError, CallView, EndedSession, FailSession, RewardBody, SessionView
from instar.gateway.context import GatewayContext
from instar.gateway.session_states import SessionStates, session_not_found
from instar.http.auth import hash_key
from instar.types import Call, Channel, Json, Reward, RewardSource, Score, Session, SessionStatus, new_id

SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (1e-6, 1),
    "max_tokens": (1, math.inf),
}
"""The allowed minimum and maximum of each sampling setting. Settings without an entry must be at least 0."""

_DEFAULTS = base.OpenSession()
_IDLE_PAGE_SIZE = 128


@dataclass(slots=True, eq=False)
class SessionService:
    _context: GatewayContext
    _states: SessionStates

    async def open(self, caller: Caller, body: base.OpenSession) -> tuple[Session, str]:
        """Open a session and return it with its key. Raise ApiError if a sampling setting is invalid (400) or
        the caller may not set a field (403)."""
        for name in ("channel", "group_id", "slot", "attempt", "task"):
            if getattr(body, name) != getattr(_DEFAULTS, name):
                authorize(caller, Action.PLACE_SESSION, param=name)
        _check_task(caller, body.metadata)
        _check_sampling(body.sampling)
        key = new_key()
        fields = msgspec.structs.asdict(body)
        if (task := fields.pop("task")) is not None:
            fields["metadata"] = {**body.metadata, "task": task}
        fields["metadata"] = self._context.redactor.redact_value(fields["metadata"])
        identity = self._context.identity
        agent_id = caller.agent_id or identity.default_agent_id
        session_id, policy_id = new_id("sess"), identity.get_policy_id(agent_id)
        live = self._context.live if body.channel is Channel.LIVE else None
        session = Session(
            session_id=session_id,
            run_id=identity.run_id,
            agent_id=agent_id,
            policy_id=policy_id,
            created_at=time.time(),
            canary_version=None if live is None else live.assign_canary(policy_id, session_id),
            **fields,
        )
        try:
            await self._context.store.open_session(session, hash_key(key))
        except ConflictError as error:
            raise ApiError(409, str(error), code="conflict") from error
        self._states.add(session)
        return session, key

    async def end(
        self, session_id: str, caller: Caller, body: base.CompleteSession | FailSession
    ) -> EndedSession:
        """End a session and store its rewards. If the session has already ended, nothing is stored. Raise
        ApiError if a scorer has two scores (400), if there is no such session (404), or if its first call is
        in progress (409)."""
        state = await self._states.get(session_id, caller, Action.END_SESSION)
        if state.unsaved_session is not None:
            message = "The session's first call is still in progress; retry after it has finished."
            raise ApiError(409, message, code="conflict")
        scores = [] if isinstance(body, FailSession) else body.scores
        for name, values in (("rewards", body.rewards), ("scores", scores)):
            if values:
                authorize(caller, Action.SEND_REWARDS, param=name)
        _check_scores(scores)
        _check_task(caller, body.metadata)
        check_reward(caller, body.reward, self._context.config.reward_range, "reward")
        rewards = list(body.rewards)
        if body.reward is not None:
            rewards.insert(0, RewardBody(value=body.reward, source=RewardSource.AGENT))
        redactor = self._context.redactor
        status = SessionStatus.FAILED if isinstance(body, FailSession) else SessionStatus.COMPLETED
        reason = None if body.reason is None else redactor.redact_text(body.reason)
        try:
            changed = await self._context.store.end_session(
                session_id,
                status,
                reason,
                [self._to_reward(session_id, reward) for reward in rewards],
                redactor.redact_value(body.metadata),
                [self._to_score(session_id, score) for score in scores],
            )
        except SessionNotFound as error:  # its data was deleted, and it will soon be removed from memory
            raise session_not_found(session_id) from error
        if changed:
            state.session = replace(state.session, status=status, reason=reason, ended_at=time.time())
            if not state.in_flight:
                self._states.remove(session_id)
        else:
            session = await self._context.store.session(session_id)
            status = session.status if session else status
        return EndedSession(session_id=session_id, status=status, changed=changed)

    async def end_idle(self, seconds: float) -> int:
        """Complete live sessions that had no call in the last ``seconds``. Return how many."""
        ended = last_seq = 0
        store, run_id, before = self._context.store, self._context.identity.run_id, time.time() - seconds
        while page := await store.idle_sessions(run_id, before, after=last_seq, limit=_IDLE_PAGE_SIZE):
            last_seq = page[-1].seq
            # Concurrently, because the store commits concurrent writes together.
            ended += sum(await map_concurrently(lambda row: self._end_if_idle(row.session_id, seconds), page))
        return ended

    async def _end_if_idle(self, session_id: str, seconds: float) -> bool:
        """Complete a session, unless it was used in the meantime. Return True if it was completed."""
        state = await self._states.find_open(session_id)
        if state is None or state.in_flight or state.used_at > time.time() - seconds:
            return False
        reason = f"the session had no call for {seconds:g} seconds"
        # The status is set before the write, so that a call during the write opens a new session.
        state.session = replace(state.session, status=SessionStatus.COMPLETED, reason=reason)
        try:
            return await self._context.store.end_session(session_id, SessionStatus.COMPLETED, reason)
        finally:
            # Also if the write failed: the session may still be open, so it is read from the store again.
            self._states.remove(session_id)

    async def view(self, session_id: str, caller: Caller) -> SessionView:
        store, state = self._context.store, await self._states.get(session_id, caller, Action.READ_SESSION)
        session = await store.session(session_id)
        if session is None:
            if not state.in_flight:
                self._states.remove(session_id)  # its data was deleted
                state = await self._states.get(session_id, caller, Action.READ_SESSION)
            # A session that a model call created is not stored until that call is recorded.
            session = state.session
        view = msgspec.convert(session, SessionView, from_attributes=True)
        view.calls = [_to_call_view(call) for call in await store.calls(session_id)]
        view.rewards = [base.to_reward_body(reward) for reward in await store.rewards(session_id)]
        return view

    def _to_reward(self, session_id: str, body: RewardBody) -> Reward:
        fields = msgspec.structs.asdict(body)
        fields["detail"] = self._context.redactor.redact_value(body.detail)
        return Reward(session_id=session_id, created_at=time.time(), **fields)

    def _to_score(self, session_id: str, body: base.ScoreBody) -> Score:
        reason = None if body.reason is None else self._context.redactor.redact_text(body.reason)
        return Score(session_id, body.scorer, body.state, body.attempts, reason, time.time())


def _check_task(caller: Caller, metadata: Json) -> None:
    """Raise ApiError (403) if an agent sets the task. Rules compare its replies with the task's answer."""
    if "task" in metadata:
        authorize(caller, Action.PLACE_SESSION, param="metadata.task")


def _check_scores(scores: Sequence[base.ScoreBody]) -> None:
    scorers: set[str] = set()
    for index, score in enumerate(scores):
        if score.scorer in scorers:
            path = f"scores[{index}].scorer"
            raise base.bad_request(f"'{path}' is {score.scorer!r}, which already has a score.", path)
        scorers.add(score.scorer)


def _check_sampling(sampling: dict[str, Any]) -> None:
    for name, value in sampling.items():
        path = f"sampling.{name}"
        if name not in base.SAMPLING_KEYS:
            allowed = ", ".join(sorted(base.SAMPLING_KEYS))
            raise base.bad_request(f"'{path}' is not supported; supported settings: {allowed}.", path)
        number_type = int if name in ("top_k", "max_tokens") else int | float
        if isinstance(value, bool) or not isinstance(value, number_type):
            expected = "an integer" if number_type is int else "a number"
            raise base.bad_request(f"'{path}' is {value!r}; it must be {expected}.", path)
        low, high = SAMPLING_RANGES.get(name, (0, math.inf))
        if not low <= value <= high:
            raise base.bad_request(f"'{path}' is {value}; it must be {base.format_range(low, high)}.", path)


def _to_call_view(call: Call) -> CallView:
    return CallView(
        call_id=call.call_id,
        parent_id=call.parent_id,
        link=call.link,
        status=call.status,
        trainable=call.trainable,
        reason=call.reason,
        finish_reason=call.finish_reason,
        prompt_tokens=len(call.prompt_ids),
        sampled_tokens=len(call.sampled_ids),
        reply=dict(call.reply),
    )
