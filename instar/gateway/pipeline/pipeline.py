"""The model call pipeline: parse → resolve session → place in graph → sample → record → respond."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from instar.gateway.auth import Action, Caller
from instar.gateway.base import SESSION_HEADER, ApiError
from instar.gateway.context import GatewayContext
from instar.gateway.dialects.base import Dialect, ModelRequest
from instar.gateway.engine_source import EngineSource
from instar.gateway.pipeline.parse import RequestParser, RequestReader, RetryHeaders, parse_external_id
from instar.gateway.pipeline.place import ReplayLookup, place
from instar.gateway.pipeline.record import Recorder, RequestMeta
from instar.gateway.pipeline.resolve import SessionHints, SessionResolver
from instar.gateway.pipeline.respond import JSON, Responder, error_response
from instar.gateway.pipeline.sample import Deadline, ModelCall
from instar.gateway.prompt_scores import score_prompt
from instar.gateway.routing import ModelRouter
from instar.gateway.session_states import PendingRequest, SessionStates
from instar.record.base import Placement
from instar.record.graph import MessageGraph
from instar.rewards.base import JUDGE_AGENT
from instar.types import Channel, Message, new_id

if TYPE_CHECKING:
    from instar.live.activity import ActivityRecorder


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """The dialect and the session that a URL path selects. ``session_id`` is None if the path names none."""

    dialect: Dialect
    session_id: str | None
    is_token_count: bool


@dataclass(eq=False)
class CallPipeline:
    _context: GatewayContext
    _reader: RequestReader
    _router: ModelRouter
    _states: SessionStates
    _resolver: SessionResolver
    _recorder: Recorder
    activity: ActivityRecorder | None = None
    """Announces live requests, if a trainer on this machine pauses for them."""

    def __post_init__(self) -> None:
        self._parser = RequestParser(self._context.config, self._context.hasher)
        self._timeout = self._context.config.request_timeout
        self._truncates = self._context.config.overflow == "truncate"
        self._rejections: dict[str, bytes] = {}
        """Complete responses with status 429, by dialect."""

    def drop_sessions(self, session_ids: Sequence[str]) -> None:
        """Remove deleted sessions, their keys, and the text of all earlier requests, from memory."""
        for session_id in session_ids:
            self._states.remove(session_id)
        self._parser.clear_cache()
        self._reader.drop_keys(frozenset(session_ids))

    def reject_early(self, dialect: Dialect) -> bytes | None:
        """Count an arriving call and return None, or, at capacity, return a complete HTTP response."""
        if not self._reader.is_full:
            self._reader.count_arrival()
            return None
        if (response := self._rejections.get(dialect.name)) is None:
            error = self._reader.capacity_error()
            body = dialect.format_error(error)
            head = (
                f"HTTP/1.1 429 Too Many Requests\r\ncontent-type: {JSON}\r\ncontent-length: {len(body)}\r\n"
                f"retry-after: {error.retry_after}\r\n\r\n"
            )
            response = self._rejections[dialect.name] = head.encode() + body
        return response

    async def handle(self, route: RouteMatch, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] != "POST":
                message = f"The method {scope['method']} is not allowed on this path; use POST."
                raise ApiError(405, message, code="method_not_allowed")
            self._reader.check_capacity()
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            caller = await self._reader.authenticate(headers, Action.CALL_MODEL)
            body = await self._reader.read_body(caller, headers, scope, receive)
            self._reader.check_capacity()
        except Exception as error:  # noqa: BLE001 - every failure is reported in the client's dialect
            await error_response(route.dialect, error)(scope, receive, send)
            return
        self._reader.in_flight += 1
        try:
            try:
                prepared = await self._prepare(route, caller, headers, body)
            except Exception as error:  # noqa: BLE001 - as above
                prepared = error_response(route.dialect, error)
            if isinstance(prepared, Response):
                await prepared(scope, receive, send)
                return
            responder = Responder(prepared, scope, receive, send, self._context.config.read_timeout)
            await responder.run(self._execute)
        finally:
            self._reader.in_flight -= 1

    async def _prepare(
        self, route: RouteMatch, caller: Caller, headers: Mapping[str, str], body: bytes
    ) -> ModelCall | Response:
        """Return the call to execute, or a response with a token count or with the logprobs of a prompt."""
        dialect, session_header = route.dialect, headers.get(SESSION_HEADER)
        if route.is_token_count:
            return await self._count_tokens(route, caller, headers, body)
        cache_key = route.session_id or session_header or caller.session_id or caller.agent_id
        select_source = partial(self._router.select, needs_engine=dialect.is_token_level)

        def check_size(request: ModelRequest) -> None:
            if not self._truncates:
                source, _ = select_source(request.model)
                source.check_size(source.resolve_settings(request, dialect))

        request, chain = self._parser.parse(dialect, cache_key, body, check_size)
        source, is_trainable = select_source(request.model)
        is_engine = isinstance(source, EngineSource)
        request = source.resolve_settings(request, dialect)
        if is_engine:
            await source.check_version(request.model, caller)
        if request.score_prompt and is_engine:
            await self._check_named_sessions(route, caller, headers)
            tokens = await score_prompt(source, request, headers, self._timeout)
            scores = dialect.format_scores(new_id(dialect.id_prefix), request, tokens)
            return Response(scores, media_type=JSON)
        expanded, previous_id, referenced_id = await self._resolver.expand_references(
            caller, dialect, request, allow_unknown=not is_engine
        )
        hasher, kwargs = self._context.hasher, request.chat_template_kwargs
        if expanded is not request:
            request = expanded
            chain = hasher.hash_messages(request.messages, request.tools, kwargs)
        elif kwargs:
            chain = chain.with_tools(hasher.hash_tools(request.tools, kwargs))
        text_prompt = request.prompt if isinstance(request.prompt, str) else None
        if request.prompt is not None and (text_prompt is not None or not is_engine):
            # For a provider, a token id prompt is recorded as a message with the list as its text.
            content = text_prompt if text_prompt is not None else str(list(request.prompt))
            message = Message(role="user", content=content)
            chain = self._context.hasher.hash_messages([message])
            if not is_engine:
                request = replace(request, messages=(message,))
        source.check_request(request)
        retry = RetryHeaders.parse(headers)
        external_id = parse_external_id(headers, request.session_hints)
        hints = SessionHints(
            route.session_id, session_header, external_id, previous_id, referenced_id, retry, text_prompt
        )
        # Clients that send token ids also name their session, so their prompts are not matched by content.
        content_chain = None if dialect.is_token_level else chain
        request_id, fields = new_id(dialect.id_prefix), dialect.build_response_fields(request)
        meta = RequestMeta(request_id, request, chain, dialect.name, retry.client_key, fields)
        self._recorder.redact_tools(meta)  # Invalid tools are rejected before anything is sampled.
        state = await self._resolver.resolve(caller, hints, content_chain, request.messages)
        return ModelCall(meta, dialect, source, state, retry, body, headers, is_trainable)

    async def _count_tokens(
        self, route: RouteMatch, caller: Caller, headers: Mapping[str, str], body: bytes
    ) -> Response:
        dialect = route.dialect
        await self._check_named_sessions(route, caller, headers)
        request = self._parser.parse_count(dialect, body)
        source, _ = self._router.select(request.model)
        request = source.resolve_settings(request, dialect)
        source.check_size(request)
        request, *_ = await self._resolver.expand_references(
            caller, dialect, request, allow_unknown=not isinstance(source, EngineSource)
        )
        count_body = await source.count_tokens(dialect, request, body, headers)
        return Response(count_body, media_type=JSON)

    async def _check_named_sessions(
        self, route: RouteMatch, caller: Caller, headers: Mapping[str, str]
    ) -> None:
        """Check the sessions named by a request that is not recorded. Raise ApiError if one does not exist
        (404) or the caller may not use it (403)."""
        for session_id in (route.session_id, headers.get(SESSION_HEADER)):
            if session_id is not None:
                await self._states.get(session_id, caller, Action.CALL_MODEL)

    async def _execute(self, call: ModelCall, responder: Responder) -> None:
        with self._states.track_call(call.state), self._announce(call):
            graph = await self._states.load_graph(call.state)
            source, max_context = call.source, None
            if self._truncates and isinstance(source, EngineSource):
                max_context = source.engine.info.max_context
            placement = await place(call, graph, self._context.hasher, max_context)
            try:
                lookup = ReplayLookup(self._context.store, call, graph, placement.key, self._timeout)
                if recorded := await lookup.find_calls(call.request.n):
                    call.meta.request_id = recorded[0].request_id
                    await responder.replay(call.source.replay(call, graph, placement, recorded))
                    return
                with lookup.register() as pending:
                    await self._sample(call, graph, placement, pending, responder)
            finally:
                graph.release(placement)

    def _announce(self, call: ModelCall) -> AbstractContextManager[None]:
        """Announce a request of a live session. Nobody waits for the reply to a judge's question."""
        is_live = call.state.session.channel is Channel.LIVE
        if self.activity is None or not is_live or call.request.model == JUDGE_AGENT:
            return nullcontext()
        return self.activity.track_request()

    async def _sample(
        self,
        call: ModelCall,
        graph: MessageGraph,
        placement: Placement,
        pending: PendingRequest,
        responder: Responder,
    ) -> None:
        """Sample, record and send the replies. If sampling fails, record the tokens sampled so far."""
        sampling_run = call.source.start(call, graph, placement)
        is_committing = False

        async def record_aborted(reason: str) -> None:
            # A call must not be recorded twice, even if the commit of its complete replies fails.
            if not is_committing and (replies := sampling_run.partial_replies()):
                await self._recorder.record(
                    call.state, graph, call.meta, sampling_run.placement, replies, abort_reason=reason
                )

        try:
            with Deadline(self._timeout):
                result = await sampling_run.run(responder if call.request.stream else None)
            is_committing = True
            recorded = await self._recorder.record(
                call.state, graph, call.meta, sampling_run.placement, result.replies
            )
            await responder.finish(result)
            call.source.on_recorded(call, recorded)
        except asyncio.CancelledError:
            if is_committing:
                # The replies are complete. Finish recording them, so that a retry can replay them.
                pending.client_disconnected = True
                await self._recorder.drain()
                graph.undelivered.add(placement.key)
            else:
                await record_aborted("the client disconnected")
            raise
        except TimeoutError as error:
            await record_aborted("the deadline was exceeded")
            message = f"The model did not reply within {self._timeout:g} seconds (gateway.request_timeout)."
            raise ApiError(504, message, code="timeout") from error
        except Exception as error:  # Record the sampled tokens, whatever the source raised.
            await record_aborted(f"the {call.source.name} failed: {error}")
            raise
