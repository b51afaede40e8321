"""A provider as the source of replies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from instar.config import SamplingConfig
from instar.gateway.auth import GATEWAY_KEY_HEADER, SDK_KEY_HEADERS
from instar.gateway.base import ApiError, TokenCount
from instar.gateway.context import GatewayContext
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, ReplyChoices
from instar.gateway.pipeline.record import MODEL_UNTRAINABLE_REASON, SampledReply
from instar.gateway.pipeline.sample import ModelCall, SampledResult, SamplingRun, Source
from instar.gateway.request_settings import RequestSettings
from instar.record.base import Placement
from instar.record.graph import MessageGraph
from instar.types import OPTIONAL_SAMPLING_FIELDS, Call, Channel, SamplingParams

if TYPE_CHECKING:
    from instar.gateway.pipeline.respond import Responder
    from instar.gateway.upstream.http import HttpUpstream


class ProviderSource(Source):
    name = "provider"

    def __init__(self, context: GatewayContext, upstream: HttpUpstream) -> None:
        self._upstream = upstream
        self._train_sampling = context.train_sampling
        self._ignores_unsupported = context.config.unsupported_fields == "ignore"

    def resolve_settings(self, request: ModelRequest, dialect: Dialect) -> ModelRequest:
        target = self._upstream.get_target(dialect.name)
        if target == dialect.name:  # The provider receives all fields.
            return replace(request, ignored_fields=()) if request.ignored_fields else request
        if not request.has_optional_settings:
            return request
        settings = RequestSettings(request)
        supported = OPTIONAL_SAMPLING_FIELDS if target == "chat" else ()
        settings.restrict_sampling(supported, "Anthropic's API, which serves this model", None)
        settings.ignore_reasoning()
        return settings.apply(ignore=self._ignores_unsupported)

    def start(self, call: ModelCall, graph: MessageGraph, placement: Placement) -> SamplingRun:
        return _ProviderSamplingRun(self._upstream, call, graph, placement, self._train_sampling)

    def replay(
        self, call: ModelCall, graph: MessageGraph, placement: Placement, recorded: Sequence[Call]
    ) -> list[ReplyChoice]:
        return [
            ReplyChoice(row.reply, row.finish_reason, len(row.prompt_ids), graph.count_sampled_tokens(row))
            for row in recorded
        ]

    async def count_tokens(
        self, dialect: Dialect, request: ModelRequest, body: bytes, headers: Mapping[str, str]
    ) -> bytes:
        provider_headers = _remove_gateway_keys(headers)
        response = await self._upstream.count_tokens(request, dialect.name, body, provider_headers)
        if dialect.name == "messages":
            return response
        try:
            return dialect.format_count(msgspec.json.decode(response, type=TokenCount).input_tokens)
        except msgspec.DecodeError as error:
            raise ApiError(502, f"The provider sent an invalid token count: {error}") from error


class _ProviderSamplingRun(SamplingRun):
    def __init__(
        self,
        upstream: HttpUpstream,
        call: ModelCall,
        graph: MessageGraph,
        placement: Placement,
        train_sampling: SamplingConfig,
    ) -> None:
        self.placement = placement
        self._call = call
        self._graph = graph
        session = call.state.session
        self._overrides: dict[str, Any] = dict(session.sampling)
        if session.channel is Channel.TRAIN:
            train = {"temperature": train_sampling.temperature, "top_p": train_sampling.top_p}
            self._overrides = train | self._overrides
        headers = _remove_gateway_keys(call.headers)
        self._response = upstream.send(
            call.request, call.dialect.name, call.body, headers, self._overrides or None
        )
        self._first_chunk_at: float | None = None

    async def run(self, responder: Responder | None) -> SampledResult:
        async with aclosing(self._response.chunks) as chunks:
            async for chunk in chunks:
                self._first_chunk_at = self._first_chunk_at or time.time()
                if chunk.choices is not None:
                    response_id = chunk.response_id
                    # Record the provider's id, which clients refer to, unless an earlier call already has it.
                    if response_id is not None and not self._graph.has_successful_request(response_id):
                        self._call.meta.request_id = response_id
                    replies = self._build_replies(chunk.choices)
                    return SampledResult(replies, chunk.choices, chunk.deltas, chunk.raw, chunk.content_type)
                assert responder is not None, "only streamed responses have several chunks"
                if chunk.raw:
                    await responder.send_raw(chunk.raw, chunk.content_type)
                else:
                    await responder.send_indexed_deltas(chunk.deltas)
        raise AssertionError("the response ended without choices")

    def partial_replies(self) -> list[SampledReply]:
        return self._build_replies(self._response.partial_choices())

    def _build_replies(self, choices: ReplyChoices) -> list[SampledReply]:
        if choices and choices[0].prompt_ids is not None:
            self.placement = self._graph.attach_prompt(self.placement, choices[0].prompt_ids)
        return [self._build_reply(choice) for choice in choices]

    def _build_reply(self, choice: ReplyChoice) -> SampledReply:
        request = self._call.request
        reply = SampledReply(
            SamplingParams(
                seed=request.seed,
                stop=request.stop,
                chat_template_kwargs=request.chat_template_kwargs,
                **request.merge_sampling_settings(self._overrides),
            ),
            choice.message,
            finish_reason=choice.finish_reason,
            stop=choice.stop_string,
            first_token_at=self._first_chunk_at,
            ended_at=time.time(),
        )
        if choice.sampled_ids is None or choice.sampled_logprobs is None:
            reply.source_untrainable_reason = "the provider returned no token ids"
            return reply
        reply.ids = choice.sampled_ids.tolist()
        reply.logprobs = choice.sampled_logprobs.tolist()
        reply.behavior_logprobs = [float("nan")] * len(reply.ids)
        # A provider's model does not change, so its tokens have the version that the run starts from.
        reply.versions = [0] * len(reply.ids)
        unsupported_error = request.unsupported_error
        if not self._call.is_trainable:
            reply.source_untrainable_reason = MODEL_UNTRAINABLE_REASON
        elif request.required_output is not None:
            reply.source_untrainable_reason = f"sampled with {request.required_output.param}"
        elif unsupported_error is not None:
            message = unsupported_error.message
            reply.source_untrainable_reason = f"sampled with unsupported settings: {message}"
        return reply


def _remove_gateway_keys(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without those that hold the gateway's key, which a provider must not receive."""
    key_headers = {GATEWAY_KEY_HEADER} if GATEWAY_KEY_HEADER in headers else SDK_KEY_HEADERS
    return {name: value for name, value in headers.items() if name not in key_headers}
