"""Samples the built-in reference set: replies of version 0 to fixed prompts, which training replays.

The replies are sampled once per run and stored as groups of the data channel, so they are the same for all
later versions.
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from instar.config import RunConfig
from instar.config.data import group_id_prefix
from instar.config.live_data import BASE_REFERENCE
from instar.engines.base import Engine
from instar.errors import EngineError, EngineUnavailable, PolicyNotFound, RenderError
from instar.live.base import MayRun, wait_until_allowed
from instar.live.reference_prompts import REFERENCE_PROMPTS
from instar.live.resample import sample_reply
from instar.record.base import Renderer
from instar.store.base import SessionRecord, Store
from instar.types import (
    Call,
    Channel,
    Group,
    GroupStatus,
    Message,
    PolicyRef,
    SamplingParams,
    Session,
    SessionStatus,
    Task,
)

logger = logging.getLogger(__name__)

MAX_REPLY_TOKENS = 96
RETRY_SECONDS = 1.0


async def sample_reference_set(
    store: Store, config: RunConfig, engine: Engine, renderer: Renderer, may_run: MayRun
) -> None:
    """Sample the replies that are missing, one at a time, while ``may_run`` allows it and the engine is
    available. If the engine cannot sample from version 0, log a warning, and replay no reference set."""
    if config.reference_label != BASE_REFERENCE:
        return
    prefix = group_id_prefix(config.name, BASE_REFERENCE)
    existing = {group.group_id for group in await store.groups(config.name, Channel.DATA)}
    for index, prompt in enumerate(REFERENCE_PROMPTS):
        group_id = f"{prefix}{index:06d}"
        if group_id in existing:
            continue
        try:
            record = await _sample_when_possible(config, engine, renderer, group_id, prompt, may_run)
        except (EngineError, RenderError) as error:
            logger.warning("the reference set of live.replay is incomplete: %s", error)
            return
        task = Task(f"{BASE_REFERENCE}-{index}", {})
        group = Group(group_id, config.name, Channel.DATA, index, 1, task, GroupStatus.READY)
        await store.put_records([group], [record])


async def _sample_when_possible(
    config: RunConfig, engine: Engine, renderer: Renderer, group_id: str, prompt: str, may_run: MayRun
) -> SessionRecord:
    while True:
        await wait_until_allowed(may_run)
        try:
            return await _sample(config, engine, renderer, group_id, prompt)
        except EngineUnavailable as error:  # it may be restarting
            logger.info("the reference set of live.replay waits for the engine: %s", error)
            await asyncio.sleep(RETRY_SECONDS)


async def _sample(
    config: RunConfig, engine: Engine, renderer: Renderer, group_id: str, prompt: str
) -> SessionRecord:
    messages = (Message(role="user", content=prompt),)
    policy = PolicyRef(config.policy_ids[0], 0)
    session_id = group_id.replace("/", "-")
    empty = np.empty(0, np.float32)
    identity = (config.name, BASE_REFERENCE, policy.policy_id)  # it is deleted with no agent's sessions
    prompt_call = Call(
        f"{session_id}-call",
        session_id,
        *identity,
        request_id=f"{session_id}-call",
        prompt_ids=np.asarray(renderer.render(messages), np.int32),
        sampled_ids=empty.astype(np.int32),
        logprobs=empty,
        versions=empty.astype(np.int32),
        messages=messages,
        reply=Message(role="assistant", content=""),
        finish_reason="stop",
        params=SamplingParams(max_tokens=MAX_REPLY_TOKENS, stop_token_ids=tuple(renderer.stop_token_ids)),
    )
    try:
        call = await sample_reply(engine, prompt_call, policy, renderer)
    except PolicyNotFound:  # the run starts from an adapter, which replies if no version is named
        call = await sample_reply(engine, prompt_call, None, renderer)
    session = Session(
        session_id,
        *identity,
        Channel.DATA,
        SessionStatus.COMPLETED,
        group_id,
        created_at=call.started_at,
        ended_at=call.ended_at,
    )
    return SessionRecord(session, (call,))
