"""Samples replies of versions in the stage `shadow` to live requests, after their replies were sent.

Nobody sees these replies. They have the lowest priority: they wait until few live calls are in progress, a
new live call interrupts them, and requests that cannot wait are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Generator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from instar.async_utils import cancel_and_wait
from instar.config import CanaryConfig
from instar.engines.base import Engine
from instar.errors import InstarError, PolicyNotFound, SessionNotFound
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.live_policies import LivePolicies, is_selected
from instar.gateway.pipeline.record import SampledReply
from instar.record.base import Renderer
from instar.record.redact import Redactor
from instar.store.base import ShadowReply, Store
from instar.types import Call, Channel, Ids, Session

logger = logging.getLogger(__name__)

MAX_WAITING = 16
"""The maximum number of requests that wait for their shadow reply. More are dropped."""
MAX_ATTEMPTS = 3
"""A request is dropped after live calls have interrupted its shadow reply this many times."""
PROMPT_END_TOKENS = 64
"""The parser looks for the start of the reasoning in this many tokens at the end of the prompt."""


@dataclass(eq=False, slots=True)
class ShadowRequest:
    call: Call
    request: ModelRequest
    prompt_ids: Ids
    attempts: int = 0
    is_sampled: bool = False
    """True once the reply is complete. It is then stored, and not sampled again if a live call starts."""


class ShadowSampler:
    def __init__(
        self,
        store: Store,
        engine: Engine,
        renderer: Renderer,
        policies: LivePolicies,
        redactor: Redactor,
        config: CanaryConfig,
        timeout: float,
    ) -> None:
        self._store = store
        self._engine = engine
        self._renderer = renderer
        self._policies = policies
        self._redactor = redactor
        self._config = config
        self._timeout = timeout
        self._waiting: deque[ShadowRequest] = deque()
        self._live_calls = 0
        self._task: asyncio.Task[None] | None = None
        self._can_sample = asyncio.Event()

    @contextmanager
    def track_live_call(self) -> Generator[None]:
        """Count a live call. If there are now more than `live.canary.shadow_load`, interrupt the shadow
        reply."""
        self._live_calls += 1
        if self._live_calls > self._config.shadow_load and self._task is not None:
            self._task.cancel()
        self._refresh()
        try:
            yield
        finally:
            self._live_calls -= 1
            self._refresh()

    def offer(self, session: Session, request: ModelRequest, call: Call) -> None:
        """Sample a shadow reply to a recorded call later, if its policy has a version in this stage and the
        call belongs to the share. A call that was recorded without its tokens contains a secret."""
        if session.channel is not Channel.LIVE or call.policy_id != session.policy_id:
            return
        shadow = self._policies.get(call.policy_id).shadow
        if shadow is None or not len(call.prompt_ids) or len(self._waiting) >= MAX_WAITING:
            return
        if is_selected(self._config.shadow_share, call.call_id, shadow.version):
            self._waiting.append(ShadowRequest(call, request, np.array(call.prompt_ids)))
            self._refresh()

    def drop_sessions(self, session_ids: Collection[str]) -> None:
        """Drop the requests of deleted sessions."""
        self._waiting = deque(w for w in self._waiting if w.call.session_id not in session_ids)
        self._refresh()

    async def run(self) -> None:
        while True:
            await self._can_sample.wait()
            request = self._waiting.popleft()
            self._task = asyncio.create_task(self._sample(request))
            try:
                await asyncio.wait({self._task})
                self._on_finished(self._task, request)
            finally:
                await cancel_and_wait(self._task)
                self._task = None
                self._refresh()

    def _refresh(self) -> None:
        if self._waiting and self._live_calls <= self._config.shadow_load:
            self._can_sample.set()
        else:
            self._can_sample.clear()

    def _on_finished(self, task: asyncio.Task[None], request: ShadowRequest) -> None:
        if task.cancelled():
            request.attempts += 1
            if request.attempts < MAX_ATTEMPTS and not request.is_sampled:
                self._waiting.appendleft(request)
        elif (error := task.exception()) is not None:
            expected = isinstance(error, InstarError | TimeoutError)
            logger.warning("A shadow reply failed: %s", error, exc_info=None if expected else error)

    async def _sample(self, waiting: ShadowRequest) -> None:
        call, request = waiting.call, waiting.request
        policy = self._policies.get(call.policy_id).shadow
        if policy is None:
            return
        if request.prompt is not None:
            parser = self._renderer.stream_text(request.stop)
        else:
            prompt_end = waiting.prompt_ids[-PROMPT_END_TOKENS:].tolist()
            parser = self._renderer.stream(request.tools, request.stop, prompt_end, eager=False)
        reply = SampledReply(call.params)
        try:
            async with asyncio.timeout(self._timeout):
                generator = self._engine.generate(waiting.prompt_ids, call.params, policy.ref)
                async with aclosing(generator) as chunks:
                    async for chunk in chunks:
                        reply.append(chunk)
                        parser.feed(chunk.token_ids)
        except PolicyNotFound:
            await self._policies.load(policy)  # for the next request
            return
        parser.finish()
        message = parser.message
        if self._redactor.redact_message(message) is not message:
            return
        shadow = ShadowReply(
            session_id=call.session_id,
            call_id=call.call_id,
            policy_id=policy.policy_id,
            version=policy.version,
            reply=message,
            sampled_ids=np.asarray(reply.ids, np.int32),
            logprobs=np.asarray(reply.logprobs, np.float32),
            finish_reason=reply.finish_reason or "aborted",
        )
        waiting.is_sampled = True
        with suppress(SessionNotFound):  # its data was deleted
            await asyncio.shield(self._store.add_shadow_reply(shadow))
