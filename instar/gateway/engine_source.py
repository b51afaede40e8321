"""The run's own engine as the source of replies."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec.structs

from instar.async_utils import gather_or_cancel
from instar.config import SamplingConfig
from instar.engines.base import Engine, EngineStatus
from instar.errors import ConstraintError, EngineError, EngineUnavailable, PolicyNotFound, PromptTooLong
from instar.gateway import required_output
from instar.gateway.auth import Caller, extract_key
from instar.gateway.base import ApiError, invalid_value
from instar.gateway.context import GatewayContext
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, TokenLogprob
from instar.gateway.dialects.common import check_token_ids
from instar.gateway.pipeline.record import MODEL_UNTRAINABLE_REASON, SampledReply
from instar.gateway.pipeline.sample import ModelCall, SampledResult, SamplingRun, Source, derive_seed
from instar.gateway.request_settings import RequestSettings
from instar.gateway.shadow import ShadowSampler
from instar.gateway.tokenizing import MIN_LARGE_PROMPT, TokenizerPool
from instar.record.base import Placement, Renderer, StreamParser
from instar.record.graph import MessageGraph
from instar.types import FULL_SOFTMAX, Call, Channel, PolicyRef, SamplingParams

if TYPE_CHECKING:
    from instar.gateway.pipeline.respond import Responder

T = TypeVar("T")
STATUS_TIMEOUT_SECONDS = 2.0
_PARSER_PROMPT_TOKENS = 64
"""The parser looks for the start of the reasoning in this many tokens at the end of the prompt."""
_VERSION_PATTERN = re.compile("[0-9]{1,18}")


class EngineSource(Source):
    name = "engine"

    def __init__(
        self,
        context: GatewayContext,
        engine: Engine,
        renderer: Renderer,
        shadow: ShadowSampler | None = None,
    ) -> None:
        self.engine = engine
        self.live = context.live
        self.shadow = shadow
        self._identity, self._store = context.identity, context.store
        self._renderer = renderer
        self._ignores_unsupported = context.config.unsupported_fields == "ignore"
        self._train_sampling = context.train_sampling
        self._tokenizer_pool = TokenizerPool(context.config)

    def get_renderer(self, request: ModelRequest) -> Renderer:
        return self._renderer.with_template_kwargs(request.chat_template_kwargs)

    async def tokenize(self, headers: Mapping[str, str], function: Callable[[], T]) -> T:
        self._renderer.max_prompt_tokens = self.engine.info.max_context
        return await self._tokenizer_pool.run(extract_key(headers), function)

    async def list_models(self, caller: Caller) -> list[str]:
        """Return the name of the caller's model and, if the engine responds, its name with each version that
        the caller can name: NAME@3. The admin gets those of all agents."""
        try:
            status = await self.get_status()
        except EngineError:
            status = None
        names: list[str] = []
        for policy_id in self._list_policy_ids(caller):
            refs = [] if status is None else await self._list_versions(status, policy_id, caller)
            names += [policy_id, *map(str, refs)]
        return names

    async def check_version(self, model: str, caller: Caller) -> None:
        """Raise ApiError (404) if the name is NAME@VERSION and the engine does not have this version, or the
        caller may not use it."""
        policy = self.parse_policy(model)
        if policy is None:
            return
        own_ids = self._list_policy_ids(caller)
        if policy.policy_id not in own_ids:
            message = f"{model!r} is not a model of this agent; its own versions are {own_ids[0]}@VERSION."
            raise ApiError(404, message, code="model_not_found", param="model")
        refs = await self._list_versions(await self.get_status(), policy.policy_id, caller)
        initial = PolicyRef(policy.policy_id, 0)
        if self.engine.info.serves_several_policies and initial not in refs:
            refs.insert(0, initial)
        if policy not in refs:
            names = ", ".join(map(str, refs)) or "no version of this policy"
            message = f"The engine does not have {policy}; it has {names}."
            raise ApiError(404, message, code="model_not_found", param="model")

    def get_served_version(self, status: EngineStatus) -> int:
        """Return the version that replies to the default agent."""
        if self.live is None:
            return status.version
        serving = self.live.get(self._identity.get_policy_id(None)).serving
        return 0 if serving is None else serving.version

    def _list_policy_ids(self, caller: Caller) -> list[str]:
        is_admin = caller.kind == "admin"
        return self._identity.policy_ids if is_admin else [self._identity.get_policy_id(caller.agent_id)]

    async def _list_versions(self, status: EngineStatus, policy_id: str, caller: Caller) -> list[PolicyRef]:
        """Return the loaded versions that the caller may name. Only the admin may name versions that were
        never promoted, which are also loaded to evaluate them."""
        versions = {ref.version for ref in status.policies if ref.policy_id == policy_id}
        if self.live is None:
            versions |= {status.version} if policy_id == self._identity.policy_id else set()
        else:
            served = self.live.get(policy_id)
            versions |= {served.serving.version} if served.serving is not None else set()
            if caller.kind != "admin":
                rows = await self._store.policy_versions(policy_id)
                versions &= {0, *(row.policy.version for row in rows if row.was_served)}
        return [PolicyRef(policy_id, version) for version in sorted(versions) if version >= 0]

    @property
    def default_policy_id(self) -> str:
        return self._identity.policy_id

    def get_policy_id(self, agent_id: str) -> str:
        return self._identity.get_policy_id(agent_id)

    async def get_status(self) -> EngineStatus:
        """Return the engine's status. Raise EngineUnavailable if it does not respond in time."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_SECONDS):
                return await self.engine.status()
        except TimeoutError as error:
            message = f"The engine did not respond within {STATUS_TIMEOUT_SECONDS:g} s; retry later."
            raise EngineUnavailable(message) from error

    def resolve_settings(self, request: ModelRequest, dialect: Dialect) -> ModelRequest:
        if not request.has_optional_settings:
            return request
        info, settings = self.engine.info, RequestSettings(request)
        settings.restrict_sampling(info.sampling_fields, f"the {info.kind} engine", info.vocab_size)
        settings.choose_template_kwargs(self._renderer)
        return settings.apply(ignore=self._ignores_unsupported)

    def check_request(self, request: ModelRequest) -> None:
        if request.unsupported_error is not None:
            raise request.unsupported_error
        if request.required_output is not None:
            required_output.check_support(request, self.engine.info)
        self.parse_policy(request.model)

    def parse_policy(self, model: str) -> PolicyRef | None:
        """Return the policy version that the model name NAME@VERSION selects, if NAME is a policy of the run.
        Return None for other names, which select the served version. Raise ApiError (404) if VERSION is not a
        number."""
        name, separator, version = model.rpartition("@")
        if not separator or name not in self._identity.policy_ids:
            return None
        if not _VERSION_PATTERN.fullmatch(version):
            message = f"The version in {model!r} must be a number, for example {name}@3."
            raise ApiError(404, message, code="model_not_found", param="model")
        return PolicyRef(name, int(version))

    def check_size(self, request: ModelRequest) -> None:
        self.check_request(request)  # This error says more.
        max_context = self.engine.info.max_context
        if (count := len(request.messages)) > max_context:  # Every message has at least one token.
            raise PromptTooLong(f"the prompt's {count} messages do not fit into {max_context} tokens")
        self._renderer.max_prompt_tokens = max_context
        self._renderer.check_messages(request.messages)

    def check_prompt(self, call: ModelCall) -> None:
        request = call.request
        if request.prompt is not None and not isinstance(request.prompt, str):
            check_token_ids(request.prompt, self.engine.info.vocab_size, call.dialect.prompt_param)
        check_token_ids(request.stop_token_ids, self.engine.info.vocab_size, "stop_token_ids")

    def start(self, call: ModelCall, graph: MessageGraph, placement: Placement) -> SamplingRun:
        return _EngineSamplingRun(self, call, placement, self._train_sampling)

    def on_recorded(self, call: ModelCall, recorded: Sequence[Call]) -> None:
        if self.shadow is not None and self.parse_policy(call.request.model) is None:
            self.shadow.offer(call.state.session, call.request, recorded[0])

    def replay(
        self, call: ModelCall, graph: MessageGraph, placement: Placement, recorded: Sequence[Call]
    ) -> list[ReplyChoice]:
        choices: list[ReplyChoice] = []
        for row in recorded:
            behavior = row.behavior_logprobs
            reply = SampledReply(
                params=row.params,
                message=row.reply,
                ids=row.sampled_ids.tolist(),
                logprobs=row.logprobs.tolist(),
                behavior_logprobs=[] if behavior is None else behavior.tolist(),
                versions=row.versions.tolist(),
                finish_reason=row.finish_reason,
            )
            choices.append(self.build_choice(call, reply, placement, graph.count_sampled_tokens(row)))
        return choices

    def build_choice(
        self, call: ModelCall, reply: SampledReply, placement: Placement, sampled_tokens: int
    ) -> ReplyChoice:
        return ReplyChoice(
            message=reply.message,
            finish_reason=reply.finish_reason or "aborted",
            prompt_tokens=len(placement.prompt_ids),
            sampled_tokens=sampled_tokens,
            logprobs=self.build_token_logprobs(call.request, reply.ids, reply.logprobs),
            stop_string=reply.stop,
            tokens=reply.tokens if call.dialect.is_token_level else None,
        )

    def build_token_logprobs(
        self, request: ModelRequest, ids: Sequence[int], logprobs: Sequence[float]
    ) -> list[TokenLogprob]:
        """Return the tokens' texts and logprobs, or an empty list if no logprobs were requested. The
        model's stop tokens are left out, because they are not in the text."""
        if not request.logprobs:
            return []
        stop_ids = self._renderer.stop_token_ids
        decode = self._renderer.decode_token
        return [TokenLogprob(decode(i), p) for i, p in zip(ids, logprobs, strict=True) if i not in stop_ids]

    async def count_tokens(
        self, dialect: Dialect, request: ModelRequest, body: bytes, headers: Mapping[str, str]
    ) -> bytes:
        self.check_request(request)
        render = partial(self.get_renderer(request).render, request.messages, request.tools)
        ids = await self.tokenize(headers, render) if len(body) >= MIN_LARGE_PROMPT else render()
        return dialect.format_count(len(ids))


class _EngineSamplingRun(SamplingRun):
    def __init__(
        self, source: EngineSource, call: ModelCall, placement: Placement, train_sampling: SamplingConfig
    ) -> None:
        self.placement = placement
        self._source = source
        self._call = call
        self._train_sampling = train_sampling
        self._replies: list[SampledReply] = []
        self._parsers: list[StreamParser] = []

    async def run(self, responder: Responder | None) -> SampledResult:
        call, source = self._call, self._source
        self._prepare_replies(is_streamed=responder is not None and not call.dialect.is_token_level)
        samplings = [self._sample_reply(i, reply, responder) for i, reply in enumerate(self._replies)]
        with nullcontext() if source.shadow is None else source.shadow.track_live_call():
            # The task of a single reply would only cost time.
            await (samplings[0] if len(samplings) == 1 else gather_or_cancel(samplings))
        choices = [
            source.build_choice(call, reply, self.placement, len(reply.ids)) for reply in self._replies
        ]
        return SampledResult(self._replies, choices)

    def partial_replies(self) -> list[SampledReply]:
        partial_replies: list[SampledReply] = []
        for reply, parser in zip(self._replies, self._parsers, strict=True):
            if reply.ids:
                parser.finish()
                reply.message = parser.message
                partial_replies.append(reply)
        return partial_replies

    def _prepare_replies(self, *, is_streamed: bool) -> None:
        request, renderer = self._call.request, self._source.get_renderer(self._call.request)
        params = self._build_params()
        session = self._call.state.session
        # On the train channel, the session's seed replaces the agent's, so that a group's sessions differ.
        has_forced_seed = session.channel is Channel.TRAIN and session.seed is not None
        request_seed = None if has_forced_seed else request.seed
        prompt_end = self.placement.prompt_ids[-_PARSER_PROMPT_TOKENS:].tolist()
        for index in range(request.n):
            if request.prompt is not None:
                parser = renderer.stream_text(request.stop)
            else:
                parser = renderer.stream(request.tools, request.stop, prompt_end, eager=is_streamed)
            self._parsers.append(parser)
            seed = request_seed
            if request_seed is not None and index > 0:
                seed = derive_seed(request_seed, index)
            elif request_seed is None and session.seed is not None:
                seed = derive_seed(session.seed, self._call.number, index)
            reply = SampledReply(msgspec.structs.replace(params, seed=seed))
            reply.source_untrainable_reason = None if self._call.is_trainable else MODEL_UNTRAINABLE_REASON
            self._replies.append(reply)

    def _build_params(self) -> SamplingParams:
        """Return the sampling parameters. The session's settings override those of the train channel, which
        override the agent's. Raise ApiError (400) if the prompt is empty, PromptTooLong if it is too long."""
        request, session = self._call.request, self._call.state.session
        overrides: dict[str, Any] = {}
        if session.channel is Channel.TRAIN:
            train = self._train_sampling
            overrides = FULL_SOFTMAX | {"temperature": train.temperature, "top_p": train.top_p}
        settings = request.merge_sampling_settings(overrides | session.sampling)
        prompt_tokens = len(self.placement.prompt_ids)
        if not prompt_tokens:
            raise invalid_value("The prompt is empty; send at least one token.", "prompt")
        info = self._source.engine.info
        max_tokens = info.max_context - prompt_tokens
        if max_tokens < 1:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens; at most {info.max_context - 1} fit in the context"
            )
        settings["max_tokens"] = min(settings.get("max_tokens") or max_tokens, max_tokens)
        renderer = self._source.get_renderer(request)
        if request.required_output is not None:
            constraint = required_output.constrain(request, info, renderer, self.placement)
            settings["constraint"] = constraint
        return SamplingParams(
            seed=request.seed,
            stop=request.stop,
            stop_token_ids=(*renderer.stop_token_ids, *request.stop_token_ids),
            chat_template_kwargs=request.chat_template_kwargs,
            logprobs=request.logprobs or session.channel is not Channel.VAL,
            **settings,
        )

    async def _sample_reply(self, index: int, reply: SampledReply, responder: Responder | None) -> None:
        parser = self._parsers[index]
        delta_stream = None if self._call.dialect.is_token_level else responder
        try:
            await self._generate(index, reply, responder)
        except ConstraintError as error:
            raise required_output.unsupported_error(self._call.request, str(error)) from error
        reply.ended_at = time.time()
        if reply.finish_reason is None or reply.finish_reason == "aborted":
            raise EngineUnavailable("the engine stopped before the end of a reply")
        deltas = parser.finish()
        reply.message = parser.message
        if delta_stream is not None and deltas:
            await delta_stream.send_deltas(index, deltas, ())

    async def _generate(self, index: int, reply: SampledReply, responder: Responder | None) -> None:
        """Sample from the version that the request names, or else from the one that serves its session."""
        source, session = self._source, self._call.state.session
        # An engine with one version was checked to serve the named one.
        can_name = source.engine.info.serves_several_policies
        named = source.parse_policy(self._call.request.model) if can_name else None
        if named is not None or source.live is None:
            reply.policy_id = None if named is None else named.policy_id
            return await self._stream(index, reply, responder, named)
        policy_id = source.get_policy_id(session.agent_id)
        policy = await source.live.choose(policy_id, session)
        reply.policy_id = policy_id
        try:
            await self._stream(index, reply, responder, policy.ref)
        except PolicyNotFound:
            policy = await source.live.restore(policy)
            try:
                await self._stream(index, reply, responder, policy.ref)
            except PolicyNotFound as error:  # not a mistake of the client, which named no version
                raise EngineUnavailable(str(error)) from error

    async def _stream(
        self, index: int, reply: SampledReply, responder: Responder | None, policy: PolicyRef | None
    ) -> None:
        call, source, parser = self._call, self._source, self._parsers[index]
        request = call.request
        token_stream = responder if call.dialect.is_token_level else None
        delta_stream = None if call.dialect.is_token_level else responder
        engine = source.engine.for_session(call.state.session.session_id)
        async with aclosing(engine.generate(self.placement.prompt_ids, reply.params, policy)) as chunks:
            async for chunk in chunks:
                reply.append(chunk)
                if token_stream is not None:
                    await token_stream.send_tokens(index, chunk)
                deltas = parser.feed(chunk.token_ids)
                if delta_stream is not None and (deltas or request.logprobs):
                    logprobs = source.build_token_logprobs(request, chunk.token_ids, chunk.logprobs)
                    await delta_stream.send_deltas(index, deltas, logprobs)
