"""Samples more replies to the prompts of live calls, so that training can compare several replies to one.

Each selected session becomes a group of `live.resample` - 1 sessions on the channel ``resampled``, with one
call each: the prompt of the session's last call with a new reply of the serving version. The run's rules and
judges score them like live sessions. No agent can see them. A group is stored with all its sessions in one
transaction, so each live session is resampled once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np

from instar.config import RunConfig
from instar.engines.base import Engine
from instar.errors import (
    ConflictError,
    ConstraintError,
    EngineError,
    EngineUnavailable,
    PolicyNotFound,
    PromptTooLong,
)
from instar.live.base import POLL_SECONDS, MayRun, is_held_out, wait_until_allowed
from instar.record.base import Renderer
from instar.store.base import RESAMPLED_TAG, SessionRecord, Store, make_resampled_group_id
from instar.types import (
    FULL_SOFTMAX,
    UNTRAINABLE,
    Call,
    CallStatus,
    Channel,
    Group,
    GroupStatus,
    Policy,
    PolicyRef,
    Session,
    SessionStatus,
    Tag,
    Task,
    TokenChunk,
)

logger = logging.getLogger(__name__)

SESSIONS_PER_PAGE = 64


async def sample_reply(
    engine: Engine, prompt: Call, policy: PolicyRef | None, renderer: Renderer, *, number: int = 0
) -> Call:
    """Return a copy of a call with a new reply, sampled at temperature 1. Its seed depends only on the call
    and on ``number``. Raises EngineUnavailable if the engine does not finish the reply."""
    seed = zlib.crc32(f"{prompt.call_id}/{number}".encode())
    params = msgspec.structs.replace(prompt.params, **FULL_SOFTMAX, seed=seed, logprobs=True)
    started_at = time.time()
    ids = prompt.prompt_ids.tolist()
    chunks: list[TokenChunk] = [chunk async for chunk in engine.generate(ids, params, policy)]
    finish_reason = chunks[-1].finish_reason if chunks else None
    if finish_reason is None or finish_reason == "aborted":
        raise EngineUnavailable("the engine stopped before the end of a reply")
    sampled_ids = [token for chunk in chunks for token in chunk.token_ids]
    behavior = [v for chunk in chunks for v in chunk.behavior_logprobs or [math.nan] * len(chunk.token_ids)]
    return Call(
        prompt.call_id,
        prompt.session_id,
        prompt.run_id,
        prompt.agent_id,
        prompt.policy_id,
        request_id=prompt.call_id,
        prompt_ids=prompt.prompt_ids,
        sampled_ids=np.asarray(sampled_ids, np.int32),
        logprobs=np.asarray([value for chunk in chunks for value in chunk.logprobs], np.float32),
        behavior_logprobs=np.asarray(behavior, np.float32) if params.modifies_distribution else None,
        versions=np.asarray([value for chunk in chunks for value in chunk.versions], np.int32),
        messages=prompt.messages,
        reply=renderer.parse(sampled_ids, prompt.tools, params.stop, ids),
        finish_reason=finish_reason,
        tools=prompt.tools,
        model=prompt.model,
        params=params,
        started_at=started_at,
        ended_at=time.time(),
    )


class Resampler:
    def __init__(
        self,
        store: Store,
        config: RunConfig,
        renderer: Renderer,
        engine: Engine,
        may_run: MayRun,
    ) -> None:
        self._store = store
        self._config = config
        self._renderer = renderer
        self._engine = engine
        self._may_run = may_run
        self._skipped: set[str] = set()
        """Sessions that are not resampled."""

    async def run(self) -> None:
        """Resample live sessions while ``may_run`` allows it, until cancelled."""
        while True:
            await wait_until_allowed(self._may_run)
            if not await self.resample_next():
                await asyncio.sleep(POLL_SECONDS)

    async def resample_next(self) -> bool:
        """Resample the oldest session that was not resampled yet. Return False if there is none, or if the
        engine cannot sample now."""
        sessions = await self._store.unresampled_sessions(
            self._config.name,
            self._config.trained_agents,
            limit=SESSIONS_PER_PAGE + len(self._skipped),
        )
        for session in [session for session in sessions if session.session_id not in self._skipped]:
            call = await self._select_call(session)
            if call is None:
                self._skipped.add(session.session_id)
                continue
            try:
                await self._resample(session, call)
            # The session was deleted, the context is shorter now, or a redacted schema has no meaning.
            except (ConflictError, PromptTooLong, ConstraintError):
                self._skipped.add(session.session_id)
            except EngineError as error:
                logger.warning("session %s was not resampled: %s", session.session_id, error)
                return False
            return True
        return False

    async def _select_call(self, session: Session) -> Call | None:
        """Return the session's last complete call, or None if it cannot be resampled."""
        calls = await self._store.calls(session.session_id)
        tags = await self._store.tags([session.session_id])
        is_untrainable = any(tag.name == UNTRAINABLE for tag in tags[session.session_id])
        is_excluded = self._config.has_gate and bool(calls) and is_held_out(calls[0].messages)
        if not calls or is_excluded or is_untrainable:
            return None
        usable = [call for call in calls if call.trainable and call.status is CallStatus.OK]
        return usable[-1] if usable and len(usable[-1].prompt_ids) else None

    async def _resample(self, session: Session, call: Call) -> None:
        policy = await self._store.latest_policy(self._config.get_policy_id(session.agent_id))
        group_id = make_resampled_group_id(session.session_id)
        records: list[SessionRecord] = []
        for slot in range(self._config.live.resample - 1):
            await wait_until_allowed(self._may_run)
            reply = await self._sample(call, policy, slot)
            session_id = f"{session.session_id}.resampled-{slot}"
            copy = Session(
                session_id,
                session.run_id,
                session.agent_id,
                policy.policy_id,
                Channel.RESAMPLED,
                SessionStatus.COMPLETED,
                group_id,
                slot,
                task_id=session.task_id,
                metadata=session.metadata,
                created_at=reply.started_at,
                ended_at=reply.ended_at,
            )
            call_id = f"{call.call_id}.resampled-{slot}"
            ids = {"call_id": call_id, "session_id": session_id, "request_id": call_id}
            new_call = replace(reply, policy_id=policy.policy_id, **ids)
            tag = Tag(session_id, RESAMPLED_TAG, session.session_id)
            records.append(SessionRecord(copy, (new_call,), tags=(tag,)))
        task = Task(session.task_id or session.session_id, {})
        group = Group(
            group_id,
            session.run_id,
            Channel.RESAMPLED,
            0,
            len(records),
            task,
            GroupStatus.SCORING,
            created_at=time.time(),
        )
        await self._store.put_records([group], records)

    async def _sample(self, call: Call, policy: Policy, number: int) -> Call:
        sample = partial(sample_reply, self._engine, call, policy.ref, self._renderer, number=number)
        try:
            return await sample()
        except PolicyNotFound:  # the engine was restarted, or unloaded the version
            await self._engine.keep(policy)
            return await sample()
