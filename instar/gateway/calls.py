"""One model call: placed in its session's graph, sampled, recorded, and only then said to have ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast

import msgspec.structs
import numpy as np

from instar.config import GatewayConfig, SamplingConfig
from instar.engines.base import Engine
from instar.errors import EngineError, EngineUnavailable, PromptTooLong
from instar.gateway.base import ApiError
from instar.gateway.dialects.base import Choice, Request, TokenLogprob
from instar.gateway.sessions import Sessions, SessionState
from instar.record.base import Delta, Graph, Placement, Renderer, StreamParser
from instar.store.base import Store
from instar.types import (
    Call,
    CallStatus,
    Channel,
    FinishReason,
    Link,
    SamplingParams,
    TokenChunk,
    new_id,
)

Emit = Callable[[int, Sequence[Delta], Sequence[TokenLogprob]], Awaitable[None]]


@dataclass(slots=True)
class Reply:
    """One choice while it is being sampled."""

    parser: StreamParser
    params: SamplingParams
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    behavior: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    first_token_at: float | None = None
    ended_at: float = 0.0

    def take(self, chunk: TokenChunk) -> None:
        if chunk.token_ids and self.first_token_at is None:
            self.first_token_at = time.time()
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions
        self.behavior += chunk.behavior_logprobs or [math.nan] * len(chunk.token_ids)
        self.finish_reason = chunk.finish_reason


class Calls:
    """What every request shares."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        renderer: Renderer,
        sessions: Sessions,
        config: GatewayConfig,
        train_sampling: SamplingConfig,
    ) -> None:
        self.store = store
        self.engine = engine
        self.renderer = renderer
        self.sessions = sessions
        self.timeout = config.request_timeout
        self._train_sampling = train_sampling
        self._commits: set[asyncio.Task[None]] = set()

    def params(self, state: SessionState, request: Request, prompt_tokens: int) -> SamplingParams:
        """What is sampled with: the agent's wishes, under the channel's and the session's settings."""
        wanted: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "max_tokens": request.max_tokens,
        }
        if state.session.channel is Channel.TRAIN:
            forced = self._train_sampling
            wanted |= {"temperature": forced.temperature, "top_p": forced.top_p, "top_k": None}
        wanted |= state.session.sampling
        context = self.engine.info.max_context
        room = context - prompt_tokens
        if room < 1:
            raise PromptTooLong(f"the prompt has {prompt_tokens} tokens; the context is {context} tokens")
        wanted["max_tokens"] = min(wanted["max_tokens"] or room, room)
        return SamplingParams(
            seed=request.seed,
            stop=request.stop,
            stop_token_ids=self.renderer.stop_token_ids,
            **{name: value for name, value in wanted.items() if value is not None},
        )

    async def commit(self, record: Callable[[], Awaitable[None]]) -> None:
        """Runs to its end even if the request that waits for it is cancelled."""

        async def run() -> None:
            await record()

        task = asyncio.create_task(run())
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)
        await asyncio.shield(task)

    async def drain(self) -> None:
        await asyncio.gather(*self._commits, return_exceptions=True)


class Exchange:
    """One request and its ``n`` replies."""

    def __init__(self, calls: Calls, state: SessionState, request: Request, dialect: str) -> None:
        self.request_id = new_id("chatcmpl")
        self.request = request
        self._calls = calls
        self._state = state
        self._dialect = dialect
        self._started_at = time.time()
        self._replies: list[Reply] = []
        self._committing = False

    async def run(self, emit: Emit | None = None, *, replay: bool = False) -> list[Choice]:
        """Sample, tell ``emit`` as it goes, record, return. ``replay``: the client says that it asks again
        for what it has asked already, so a recorded reply is the answer."""
        state = self._state
        graph = await self._calls.sessions.graph_of(state)
        placement = graph.place(self.request.messages, self.request.tools, self._calls.renderer)
        ordinal = graph.requests + state.in_flight
        state.in_flight += 1
        try:
            if replay and (choices := await self._recorded(graph, placement)):
                await self._emit_whole(choices, emit)
                return choices
            self._prepare(placement, ordinal)
            await self._sample(placement, graph, emit)
            return [self._choice(reply, placement) for reply in self._replies]
        finally:
            state.in_flight -= 1
            graph.release(placement)

    def _prepare(self, placement: Placement, ordinal: int) -> None:
        request, calls = self.request, self._calls
        params = calls.params(self._state, request, len(placement.prompt_ids))
        prompt = placement.prompt_ids.tolist()
        session = self._state.session
        # A group's sessions must differ, whatever the agent asks for.
        forced = session.channel is Channel.TRAIN and session.seed is not None
        for index in range(request.n):
            seed = _seed(None if forced else request.seed, session.seed, ordinal, index)
            parser = calls.renderer.stream(request.tools, request.stop, prompt)
            self._replies.append(Reply(parser, _with_seed(params, seed)))

    async def _sample(self, placement: Placement, graph: Graph, emit: Emit | None) -> None:
        prompt = placement.prompt_ids.tolist()
        try:
            async with asyncio.timeout(self._calls.timeout):
                await _all([self._one(i, reply, prompt, emit) for i, reply in enumerate(self._replies)])
            await self._record(placement, graph)
        except asyncio.CancelledError:
            await self._record_aborted(placement, graph, "the client went away")
            raise
        except TimeoutError as error:
            await self._record_aborted(placement, graph, "past its deadline")
            message = f"No reply within {self._calls.timeout:g} seconds."
            raise ApiError(504, message, code="timeout") from error
        except (EngineError, ApiError) as error:
            await self._record_aborted(placement, graph, f"the engine failed: {error}")
            raise

    async def _one(self, index: int, reply: Reply, prompt: list[int], emit: Emit | None) -> None:
        stream = self._calls.engine.generate(prompt, reply.params)
        async with aclosing(cast(AsyncGenerator[TokenChunk, None], stream)) as chunks:
            async for chunk in chunks:
                reply.take(chunk)
                deltas = reply.parser.feed(chunk.token_ids)
                if emit and (deltas or self.request.logprobs):
                    await emit(index, deltas, self._shown(chunk.token_ids, chunk.logprobs))
        reply.ended_at = time.time()
        if reply.finish_reason is None or reply.finish_reason == "aborted":
            raise EngineUnavailable("the engine ended a reply before its end")
        deltas = reply.parser.finish()
        if emit and deltas:
            await emit(index, deltas, ())

    def _shown(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[TokenLogprob]:
        if not self.request.logprobs:
            return []
        stops = self._calls.renderer.stop_token_ids
        text = self._calls.renderer.token_text
        return [TokenLogprob(text(i), p) for i, p in zip(ids, logprobs, strict=True) if i not in stops]

    def _choice(self, reply: Reply, placement: Placement) -> Choice:
        return Choice(
            message=reply.parser.message,
            finish_reason=reply.finish_reason or "aborted",
            prompt_tokens=len(placement.prompt_ids),
            sampled_tokens=len(reply.ids),
            logprobs=self._shown(reply.ids, reply.logprobs),
        )

    # --- recording --------------------------------------------------------------------------------

    async def _record(self, placement: Placement, graph: Graph) -> None:
        self._committing = True
        calls: list[Call] = []
        for reply in self._replies:
            calls.append(self._call(reply, placement, calls, CallStatus.OK, None))
        await self._calls.commit(lambda: self._commit(calls, graph))

    async def _record_aborted(self, placement: Placement, graph: Graph, reason: str) -> None:
        """What was sampled before the end. Once the commit of the whole has begun, that one stands."""
        if self._committing:
            return
        self._committing = True
        calls: list[Call] = []
        for reply in self._replies:
            if reply.ids:
                reply.parser.finish()
                calls.append(self._call(reply, placement, calls, CallStatus.ABORTED, reason))
        if calls:
            await self._calls.commit(lambda: self._commit(calls, graph))

    async def _commit(self, calls: Sequence[Call], graph: Graph) -> None:
        await self._calls.store.add_calls(calls)
        for call in calls:
            graph.add(call)
            if self._state.session.channel is Channel.LIVE:
                key = graph.keys([*call.messages, call.reply], call.tools)[-1]
                self._calls.sessions.remember_live(self._state, key)

    def _call(
        self,
        reply: Reply,
        placement: Placement,
        before: Sequence[Call],
        status: CallStatus,
        reason: str | None,
    ) -> Call:
        session, request = self._state.session, self.request
        if reason is None:
            reason = _untrainable(reply)
        first = before[0] if before else None
        return Call(
            call_id=new_id("call"),
            session_id=session.session_id,
            run_id=session.run_id,
            agent_id=session.agent_id,
            policy_id=session.policy_id,
            request_id=self.request_id,
            prompt_ids=placement.prompt_ids,
            sampled_ids=np.asarray(reply.ids, np.int32),
            logprobs=np.asarray(reply.logprobs, np.float32),
            versions=np.asarray(reply.versions, np.int32),
            behavior_logprobs=np.asarray(reply.behavior, np.float32) if reply.params.truncates else None,
            messages=request.messages,
            tools=request.tools,
            reply=reply.parser.message,
            finish_reason=reply.finish_reason or "aborted" if status is CallStatus.OK else "aborted",
            parent_id=placement.parent_id,
            link=Link.SIBLING if first else placement.link,
            base_id=first.call_id if first else placement.base_id,
            base_tokens=len(placement.prompt_ids) if first else placement.base_tokens,
            base_messages=len(request.messages) if first else placement.base_messages,
            status=status,
            trainable=reason is None,
            reason=reason,
            dialect=self._dialect,
            params=reply.params,
            started_at=self._started_at,
            first_token_at=reply.first_token_at,
            ended_at=reply.ended_at or time.time(),
        )

    # --- replay -----------------------------------------------------------------------------------

    async def _recorded(self, graph: Graph, placement: Placement) -> list[Choice]:
        ids = graph.recorded(placement.key)
        found = [await self._calls.store.call(call_id) for call_id in ids]
        calls = [call for call in found if call is not None]
        if len(calls) != self.request.n:
            return []
        self.request_id = calls[0].request_id
        return [
            Choice(
                message=call.reply,
                finish_reason=call.finish_reason,
                prompt_tokens=len(call.prompt_ids),
                sampled_tokens=len(call.sampled_ids),
                logprobs=self._shown(call.sampled_ids.tolist(), call.logprobs.tolist()),
            )
            for call in calls
        ]

    async def _emit_whole(self, choices: Sequence[Choice], emit: Emit | None) -> None:
        if emit is None:
            return
        for index, choice in enumerate(choices):
            message = choice.message
            deltas = [Delta(reasoning=message["reasoning"])] if "reasoning" in message else []
            deltas += [Delta(text=message["content"])] if message["content"] else []
            deltas += [Delta(call=call) for call in message.get("tool_calls", ())]
            await emit(index, deltas, choice.logprobs)


def _untrainable(reply: Reply) -> str | None:
    if any(map(math.isnan, reply.logprobs)):
        return "logprobs are missing"
    if reply.params.truncates and any(map(math.isnan, reply.behavior)):
        return "sampled otherwise than at temperature 1, and the logprobs of that are missing"
    return None


def _seed(asked: int | None, session: int | None, ordinal: int, index: int) -> int | None:
    """The agent's own, made different for each choice; else one made from the session's."""
    if asked is not None:
        return asked if index == 0 else _derived(asked, index)
    return None if session is None else _derived(session, ordinal, index)


def _derived(*parts: int) -> int:
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _with_seed(params: SamplingParams, seed: int | None) -> SamplingParams:
    return msgspec.structs.replace(params, seed=seed)


async def _all(works: Sequence[Any]) -> None:
    """Together; the first failure ends the others before it is raised."""
    if len(works) == 1:
        await works[0]
        return
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
