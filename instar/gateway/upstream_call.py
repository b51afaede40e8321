"""One model call that a provider answers: passed on, read on the side, recorded like any other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from instar.config import GatewayConfig, SamplingConfig
from instar.errors import EngineError
from instar.gateway.base import ApiError
from instar.gateway.calls import whole_deltas
from instar.gateway.client_headers import RetryEvidence
from instar.gateway.deadline import Deadline
from instar.gateway.dialects.base import ModelRequest, ReplyChoice
from instar.gateway.recording import Recorder, RequestMeta, SampledReply
from instar.gateway.replay import ReplayLookup
from instar.gateway.sessions import Pending, Sessions, SessionState
from instar.gateway.upstream.base import Upstream, UpstreamChunk, UpstreamResponse
from instar.record.base import Placement
from instar.record.graph import MessageGraph
from instar.record.hashing import HashChain
from instar.types import Call, Channel, Message, SamplingParams

Pass = Callable[[UpstreamChunk], Awaitable[None]]


class UpstreamCall:
    """One request and its answer."""

    def __init__(
        self,
        sessions: Sessions,
        recorder: Recorder,
        upstream: Upstream,
        state: SessionState,
        request: ModelRequest,
        chain: HashChain,
        *,
        request_id: str,
        dialect: str,
        body: bytes,
        headers: Mapping[str, str],
        config: GatewayConfig,
        evidence: RetryEvidence,
        trainable: bool = True,
        train_sampling: SamplingConfig,
    ) -> None:
        self.request = request
        self.request_id = request_id
        self._sessions = sessions
        self._recorder = recorder
        self._upstream = upstream
        self._state = state
        self._chain = chain
        self._dialect = dialect
        self._body = body
        self._headers = headers
        self._timeout = config.request_timeout
        self._evidence = evidence
        self._trainable = trainable
        self._forced = dict(state.session.sampling)
        if state.session.channel is Channel.TRAIN:
            forced = {"temperature": train_sampling.temperature, "top_p": train_sampling.top_p}
            self._forced = forced | self._forced
        self._started_at = time.time()
        self._first_at: float | None = None

    @property
    def session_id(self) -> str:
        return self._state.session.session_id

    async def run(self, forward: Pass) -> None:
        """Every piece goes to ``forward``, the last one when the call is recorded."""
        state = self._state
        with self._sessions.answering(state):
            graph = await self._sessions.graph_of(state)
            self._chain = graph.match_replies(self._chain, self.request.messages)
            placement = graph.place(self._chain, self.request.messages, self.request.tools, None)
            store = self._recorder.store
            replay = ReplayLookup(store, state, graph, placement.key, self._evidence, self._timeout)
            try:
                if calls := await replay.calls(self.request.n):
                    await forward(self._replayed(graph, calls))
                    return
                with replay.answering() as pending:
                    await self._pass(graph, placement, forward, pending)
            finally:
                graph.release(placement)

    def _replayed(self, graph: MessageGraph, calls: Sequence[Call]) -> UpstreamChunk:
        """A recorded answer, in the words of the dialect: the provider's own were not kept."""
        self.request_id = calls[0].request_id
        choices = [
            ReplyChoice(call.reply, call.finish_reason, len(call.prompt_ids), graph.sampled_tokens(call))
            for call in calls
        ]
        deltas = [(i, delta) for i, choice in enumerate(choices) for delta in whole_deltas(choice.message)]
        return UpstreamChunk(deltas=deltas, choices=choices)

    async def _pass(self, graph: MessageGraph, placement: Placement, forward: Pass, pending: Pending) -> None:
        answer = self._upstream.send(
            self.request, self._dialect, self._body, self._headers, self._forced or None
        )
        recorded = False
        try:
            with Deadline(self._timeout):
                async for piece in answer:
                    self._first_at = self._first_at or time.time()
                    if piece.choices is not None:
                        recorded = True
                        self._call_it(piece.response_id, graph)
                        await self._record(graph, placement, piece.choices)
                    await forward(piece)
        except asyncio.CancelledError:
            if recorded:
                pending.client_gone = True
                await self._recorder.drain()
                graph.mark_undelivered(placement.key)
            else:
                await self._record_partial(graph, placement, answer, "the client went away")
            raise
        except TimeoutError as error:
            if not recorded:
                await self._record_partial(graph, placement, answer, "past its deadline")
            raise ApiError(504, f"No reply within {self._timeout:g} seconds.", code="timeout") from error
        except (EngineError, ApiError) as error:
            if not recorded:
                await self._record_partial(graph, placement, answer, f"the provider failed: {error}")
            raise
        finally:
            await answer.aclose()

    def _call_it(self, answer_id: str | None, graph: MessageGraph) -> None:
        """As the provider does, unless it calls all its answers so."""
        if answer_id is not None and not graph.has_request(answer_id):
            self.request_id = answer_id

    async def _record_partial(
        self, graph: MessageGraph, placement: Placement, answer: UpstreamResponse, reason: str
    ) -> None:
        """What came before the end."""
        if choices := answer.partial_choices():
            await self._record(graph, placement, choices, aborted=reason)

    async def _record(
        self,
        graph: MessageGraph,
        placement: Placement,
        choices: Sequence[ReplyChoice],
        *,
        aborted: str | None = None,
    ) -> None:
        if choices[0].prompt_ids is not None:
            placement = graph.attach_prompt(placement, choices[0].prompt_ids)
        asked = RequestMeta(
            self.request_id,
            self.request,
            self._chain,
            self._dialect,
            self._evidence.client_key,
            self._started_at,
        )
        replies = [self._reply(choice) for choice in choices]
        await self._recorder.record(self._state, graph, asked, placement, replies, aborted=aborted)

    def _reply(self, choice: ReplyChoice) -> SampledReply:
        params = _params(self.request, self._forced)
        reply = SampledReply(
            params, choice.message, finish_reason=choice.finish_reason, stop=choice.stop_string
        )
        reply.first_token_at, reply.ended_at = self._first_at, time.time()
        if choice.sampled_ids is None or choice.sampled_logprobs is None:
            reply.untrainable = "the provider returned no token ids"
            return reply
        reply.ids = choice.sampled_ids.tolist()
        reply.logprobs = choice.sampled_logprobs.tolist()
        reply.behavior = [float("nan")] * len(reply.ids)
        # A provider's model is the base model: it has no versions of ours.
        reply.versions = np.zeros(len(reply.ids), np.int32).tolist()
        if not self._trainable:
            reply.untrainable = "this model is not to be trained on"
        elif self.request.unsupported_error is not None:
            reply.untrainable = (
                f"sampled by settings that are not ours: {self.request.unsupported_error.message}"
            )
        return reply


def _params(request: ModelRequest, forced: Mapping[str, Any]) -> SamplingParams:
    wanted: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_tokens": request.max_tokens,
        **forced,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    return SamplingParams(seed=request.seed, stop=request.stop, **given)


def as_message(prompt: str | Sequence[int]) -> Message:
    """A prompt without messages, as it is recorded where no tokenizer is at hand."""
    return Message(role="user", content=prompt if isinstance(prompt, str) else str(list(prompt)))
