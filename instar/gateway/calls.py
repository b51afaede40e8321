"""One model call: placed in its session's graph, sampled, recorded, and only then said to have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec.structs

from instar.config import GatewayConfig, SamplingConfig
from instar.engines.base import Engine
from instar.errors import EngineUnavailable, PromptTooLong
from instar.gateway.base import ApiError, bad_request
from instar.gateway.client_headers import RetryEvidence
from instar.gateway.deadline import Deadline
from instar.gateway.dialects.base import ModelRequest, ReplyChoice, TokenLogprob
from instar.gateway.recording import Recorder, RequestMeta, SampledReply, reply_from_call
from instar.gateway.replay import ReplayLookup
from instar.gateway.sessions import Pending, Sessions, SessionState
from instar.record.base import Placement, Renderer, ReplyDelta, StreamParser, ToolCallDelta
from instar.record.graph import MessageGraph
from instar.record.hashing import HashChain
from instar.store.base import Store
from instar.types import Call, Channel, Message, SamplingParams, TokenChunk

OnChunk = Callable[[int, TokenChunk], Awaitable[None]]
Emit = Callable[[int, Sequence[ReplyDelta], Sequence[TokenLogprob]], Awaitable[None]]


class Calls:
    """What every request shares."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        renderer: Renderer,
        sessions: Sessions,
        recorder: Recorder,
        config: GatewayConfig,
        train_sampling: SamplingConfig,
    ) -> None:
        self.store = store
        self.engine = engine
        self.renderer = renderer
        self.sessions = sessions
        self.recorder = recorder
        self.timeout = config.request_timeout
        self._train_sampling = train_sampling

    def params(
        self,
        state: SessionState,
        request: ModelRequest,
        prompt_tokens: int,
        stop_token_ids: tuple[int, ...] = (),
    ) -> SamplingParams:
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
        if not prompt_tokens:
            raise bad_request("The prompt is empty.", "prompt", "invalid_value")
        context = self.engine.info.max_context
        room = context - prompt_tokens
        if room < 1:
            raise PromptTooLong(f"the prompt has {prompt_tokens} tokens; the context is {context} tokens")
        wanted["max_tokens"] = min(wanted["max_tokens"] or room, room)
        return SamplingParams(
            seed=request.seed,
            stop=request.stop,
            stop_token_ids=(*self.renderer.stop_token_ids, *stop_token_ids),
            score=request.logprobs or state.session.channel is not Channel.VAL,
            **{name: value for name, value in wanted.items() if value is not None},
        )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        size = self.engine.info.vocab_size
        wrong = next((i for i, token in enumerate(ids) if not 0 <= token < size), None)
        if wrong is not None:
            message = f"Token id {ids[wrong]} is not in the vocabulary of {size}."
            raise bad_request(message, f"{param}[{wrong}]", "invalid_value")


class EngineCall:
    """One request and its ``n`` replies."""

    def __init__(
        self,
        calls: Calls,
        state: SessionState,
        request: ModelRequest,
        chain: HashChain | None,
        *,
        request_id: str,
        dialect: str,
        evidence: RetryEvidence = RetryEvidence(),  # noqa: B008 — frozen
        trainable: bool = True,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        """``stop_token_ids``: end a reply beside the model's own."""
        self.request_id = request_id
        self.request = request
        self._calls = calls
        self._state = state
        self._chain = chain
        self._dialect = dialect
        self._evidence = evidence
        self._trainable = trainable
        self._stop_token_ids = stop_token_ids
        self._on_chunk: OnChunk | None = None
        self._started_at = time.time()
        self.replies: list[SampledReply] = []
        self._parsers: list[StreamParser] = []
        self._committing = False

    @property
    def session_id(self) -> str:
        return self._state.session.session_id

    async def run(self, emit: Emit | None = None, on_chunk: OnChunk | None = None) -> list[ReplyChoice]:
        """Sample, tell ``emit`` what it says and ``on_chunk`` the tokens as it goes, record, return."""
        state = self._state
        self._on_chunk = on_chunk
        with self._calls.sessions.answering(state):
            graph = await self._calls.sessions.graph_of(state)
            # Taken together with its place: requests at once must not draw the same seed.
            ordinal, placement = graph.next_request_number, self._place(graph)
            try:
                return await self._answer(graph, placement, ordinal, emit)
            finally:
                graph.release(placement)

    def _place(self, graph: MessageGraph) -> Placement:
        request, renderer = self.request, self._calls.renderer
        if request.prompt is not None:
            if not isinstance(request.prompt, str):
                self._calls.check_ids(request.prompt, "prompt")
            return graph.place_prompt(request.prompt, renderer)
        assert self._chain is not None
        self._chain = graph.match_replies(self._chain, request.messages)
        return graph.place(self._chain, request.messages, request.tools, renderer)

    async def _answer(
        self, graph: MessageGraph, placement: Placement, ordinal: int, emit: Emit | None
    ) -> list[ReplyChoice]:
        shared = self._calls
        replay = ReplayLookup(shared.store, self._state, graph, placement.key, self._evidence, shared.timeout)
        if calls := await replay.calls(self.request.n):
            return await self._replay(graph, placement, calls, emit)
        with replay.answering() as pending:
            self._prepare(placement, ordinal, eager=emit is not None)
            await self._sample(placement, graph, emit, pending)
        return [self._choice(reply, placement) for reply in self.replies]

    def _prepare(self, placement: Placement, ordinal: int, *, eager: bool) -> None:
        request, calls = self.request, self._calls
        params = calls.params(self._state, request, len(placement.prompt_ids), self._stop_token_ids)
        session = self._state.session
        # A group's sessions must differ, whatever the agent asks for.
        forced = session.channel is Channel.TRAIN and session.seed is not None
        end = placement.prompt_ids[-_PARSED_PROMPT:].tolist()
        for index in range(request.n):
            seed = _seed(None if forced else request.seed, session.seed, ordinal, index)
            if request.prompt is not None:
                parser = calls.renderer.stream_text(request.stop)
            else:
                parser = calls.renderer.stream(request.tools, request.stop, end, eager=eager)
            self._parsers.append(parser)
            reply = SampledReply(msgspec.structs.replace(params, seed=seed))
            reply.untrainable = None if self._trainable else "this model is not to be trained on"
            self.replies.append(reply)

    async def _sample(
        self, placement: Placement, graph: MessageGraph, emit: Emit | None, pending: Pending
    ) -> None:
        try:
            with Deadline(self._calls.timeout):
                works = [self._one(i, reply, placement, emit) for i, reply in enumerate(self.replies)]
                await _all(works)
            await self._record(placement, graph)
        except asyncio.CancelledError:
            if self._committing:
                # The reply is whole: its client may come back for it.
                pending.client_gone = True
                await self._calls.recorder.drain()
                graph.mark_undelivered(placement.key)
            else:
                await self._record_aborted(placement, graph, "the client went away")
            raise
        except TimeoutError as error:
            await self._record_aborted(placement, graph, "past its deadline")
            message = f"No reply within {self._calls.timeout:g} seconds."
            raise ApiError(504, message, code="timeout") from error
        except Exception as error:  # whatever an engine raises: what it sampled is kept all the same
            await self._record_aborted(placement, graph, f"the engine failed: {error}")
            raise

    async def _one(self, index: int, reply: SampledReply, placement: Placement, emit: Emit | None) -> None:
        parser = self._parsers[index]
        engine = self._calls.engine.for_session(self.session_id)
        stream = engine.generate(placement.prompt_ids, reply.params)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                reply.append(chunk)
                if self._on_chunk:
                    await self._on_chunk(index, chunk)
                deltas = parser.feed(chunk.token_ids)
                if emit and (deltas or self.request.logprobs):
                    await emit(index, deltas, self._shown(chunk.token_ids, chunk.logprobs))
        reply.ended_at = time.time()
        if reply.finish_reason is None or reply.finish_reason == "aborted":
            raise EngineUnavailable("the engine ended a reply before its end")
        deltas = parser.finish()
        reply.message = parser.message
        if emit and deltas:
            await emit(index, deltas, ())

    def _shown(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[TokenLogprob]:
        if not self.request.logprobs:
            return []
        stops = self._calls.renderer.stop_token_ids
        text = self._calls.renderer.token_text
        return [TokenLogprob(text(i), p) for i, p in zip(ids, logprobs, strict=True) if i not in stops]

    def _choice(self, reply: SampledReply, placement: Placement) -> ReplyChoice:
        return ReplyChoice(
            message=reply.message,
            finish_reason=reply.finish_reason or "aborted",
            prompt_tokens=len(placement.prompt_ids),
            sampled_tokens=len(reply.ids),
            logprobs=self._shown(reply.ids, reply.logprobs),
            stop_string=reply.stop,
        )

    # --- recording --------------------------------------------------------------------------------

    @property
    def _asked(self) -> RequestMeta:
        return RequestMeta(
            self.request_id,
            self.request,
            self._chain if self.request.prompt is None else None,
            self._dialect,
            self._evidence.client_key,
            self._started_at,
        )

    async def _record(self, placement: Placement, graph: MessageGraph) -> None:
        self._committing = True
        await self._calls.recorder.record(self._state, graph, self._asked, placement, self.replies)

    async def _record_aborted(self, placement: Placement, graph: MessageGraph, reason: str) -> None:
        """What was sampled before the end. Once the commit of the whole has begun, that one stands."""
        if self._committing:
            return
        self._committing = True
        begun: list[SampledReply] = []
        for reply, parser in zip(self.replies, self._parsers, strict=True):
            if reply.ids:
                parser.finish()
                reply.message = parser.message
                begun.append(reply)
        if begun:
            await self._calls.recorder.record(
                self._state, graph, self._asked, placement, begun, aborted=reason
            )

    # --- replay -----------------------------------------------------------------------------------

    async def _replay(
        self, graph: MessageGraph, placement: Placement, calls: Sequence[Call], emit: Emit | None
    ) -> list[ReplyChoice]:
        """The recorded answer, told as if it came now."""
        self.request_id = calls[0].request_id
        self.replies = [reply_from_call(call) for call in calls]
        choices = [
            replace(self._choice(reply, placement), sampled_tokens=graph.sampled_tokens(call))
            for reply, call in zip(self.replies, calls, strict=True)
        ]
        for index, (reply, choice) in enumerate(zip(self.replies, choices, strict=True)):
            if self._on_chunk:
                await self._on_chunk(index, reply.complete_chunk)
            if emit:
                await emit(index, whole_deltas(choice.message), choice.logprobs)
        return choices


_PARSED_PROMPT = 64
"""How much of a prompt's end a parser is shown: whether it opens the reasoning stands there."""


def whole_deltas(message: Message) -> list[ReplyDelta]:
    """A whole reply as the pieces of a stream."""
    deltas = [ReplyDelta(reasoning=message["reasoning"])] if "reasoning" in message else []
    deltas += [ReplyDelta(text=message["content"])] if message["content"] else []
    for index, call in enumerate(message.get("tool_calls", ())):
        deltas.append(ReplyDelta(call=ToolCallDelta(index, call["id"], call["name"])))
        deltas.append(ReplyDelta(call=ToolCallDelta(index, arguments=call["arguments"])))
    return deltas


def _seed(asked: int | None, session: int | None, ordinal: int, index: int) -> int | None:
    """The agent's own, made different for each choice; else one made from the session's."""
    if asked is not None:
        return asked if index == 0 else _derived(asked, index)
    return None if session is None else _derived(session, ordinal, index)


def _derived(*parts: int) -> int:
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def _all(works: Sequence[Any]) -> None:
    """Together; the first failure ends the others before it is raised."""
    if len(works) == 1:
        await works[0]
        return
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:  # cancelled too: none of them may go on alone
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
