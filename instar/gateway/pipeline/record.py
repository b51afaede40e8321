"""Record replies: redact secrets, decide whether a call is trainable, and commit the call."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from instar.gateway.context import GatewayContext
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.pipeline.parse import encode_user_id
from instar.gateway.pipeline.resolve import SessionResolver
from instar.gateway.session_states import SessionState
from instar.record.base import Placement, Renderer
from instar.record.graph import MessageGraph
from instar.record.hashing import HashChain
from instar.record.redact import format_redaction_reason
from instar.types import (
    Call,
    CallStatus,
    FinishReason,
    Ids,
    Json,
    Link,
    Message,
    SamplingParams,
    TokenChunk,
    Tool,
    new_id,
)

_MAX_CACHED_TOOLS = 256
_REDACTION_OVERLAP_TOKENS = 128
"""This many tokens before a prompt's new tokens are searched again, because a secret may start there."""
MODEL_UNTRAINABLE_REASON = "training on this model is disabled by its route (trainable: false)"
_NO_IDS: Ids = np.empty(0, np.int32)


@dataclass(slots=True)
class SampledReply:
    """A complete or partial reply with its sampled tokens."""

    params: SamplingParams
    message: Message = field(default_factory=lambda: Message(role="assistant", content=""))
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    behavior_logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    stop: str | None = None
    first_token_at: float | None = None
    ended_at: float = 0.0
    source_untrainable_reason: str | None = None
    """Why the source excludes the reply from training. `untrainable_reason` also checks the logprobs."""
    policy_id: str | None = None
    """The policy that sampled the reply, or None if it is the session's."""

    def append(self, chunk: TokenChunk) -> None:
        if chunk.token_ids and self.first_token_at is None:
            self.first_token_at = time.time()
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions
        self.behavior_logprobs += chunk.behavior_logprobs or [math.nan] * len(chunk.token_ids)
        self.finish_reason = chunk.finish_reason
        self.stop = chunk.stop

    @property
    def tokens(self) -> TokenChunk:
        return TokenChunk(
            token_ids=self.ids,
            logprobs=self.logprobs,
            versions=self.versions,
            behavior_logprobs=self.behavior_logprobs if self.params.modifies_distribution else None,
            finish_reason=self.finish_reason,
            stop=self.stop,
        )

    @property
    def untrainable_reason(self) -> str | None:
        if self.source_untrainable_reason is not None:
            return self.source_untrainable_reason
        if any(map(math.isnan, self.logprobs)):
            return "logprobs are missing"
        if self.params.modifies_distribution and any(map(math.isnan, self.behavior_logprobs)):
            return "the sampling settings change the distribution, and behavior_logprobs are missing"
        return None


@dataclass(slots=True)
class RequestMeta:
    """The properties of a request that are recorded with its replies."""

    request_id: str
    request: ModelRequest
    chain: HashChain | None
    """The hash chain of the messages, or None if the call is placed by its prompt instead."""
    dialect: str
    client_key: str | None
    response_fields: Json | None = None
    """The data of `Dialect.build_response_fields`."""
    started_at: float = field(default_factory=time.time)

    @property
    def messages(self) -> tuple[Message, ...]:
        prompt = self.request.prompt
        if isinstance(prompt, str):
            return (Message(role="user", content=prompt),)
        return self.request.messages


@dataclass(frozen=True, slots=True)
class _CallRow:
    """A call to store, with values for the message graph and the session index."""

    call: Call
    chain: HashChain | None
    """The hash chain of the messages and the reply, or None as in `RequestMeta`."""
    withheld_ids: Ids | None
    """The sampled tokens, if they are not stored because of a secret; otherwise None."""
    first_redacted_message: int | None


class Recorder:
    def __init__(
        self, context: GatewayContext, resolver: SessionResolver, renderer: Renderer | None = None
    ) -> None:
        """Create a recorder. ``renderer`` decodes token id prompts to search them for secrets."""
        self._store = context.store
        self._hasher = context.hasher
        self._redactor = context.redactor
        self._resolver = resolver
        self._renderer = renderer
        self._redacted_tools: OrderedDict[bytes, tuple[Tool, ...] | None] = OrderedDict()
        self._commits: set[asyncio.Task[None]] = set()

    async def record(
        self,
        state: SessionState,
        graph: MessageGraph,
        meta: RequestMeta,
        placement: Placement,
        replies: Sequence[SampledReply],
        *,
        abort_reason: str | None = None,
    ) -> list[Call]:
        """Record the replies, and return their calls once they are stored. Cancellation does not stop the
        commit. ``abort_reason`` says why the replies are incomplete; it is None for complete replies."""
        rows: list[_CallRow] = []
        for reply in replies:
            first = rows[0] if rows else None
            rows.append(self._build_row(state, meta, placement, reply, first, abort_reason))
        task = asyncio.create_task(self._commit(state, graph, meta, placement, rows))
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)
        await asyncio.shield(task)
        return [row.call for row in rows]

    async def drain(self) -> None:
        """Wait for all commits in progress. `record` raises their errors."""
        await asyncio.gather(*self._commits, return_exceptions=True)

    async def _commit(
        self,
        state: SessionState,
        graph: MessageGraph,
        meta: RequestMeta,
        placement: Placement,
        rows: Sequence[_CallRow],
    ) -> None:
        tail_keys: dict[str, bytes] = {}
        if state.is_matched_by_content and meta.chain is not None:
            tail_keys = {row.call.call_id: row.chain.canonical[-1] for row in rows if row.chain}
        session, state.unsaved_session = state.unsaved_session, None
        user_ids, users = meta.request.user_ids, list[str]()
        if user_ids != state.recorded_users:
            users = [encode_user_id(user_id, self._redactor, self._hasher) for user_id in user_ids]
        try:
            await self._store.add_calls(
                [row.call for row in rows],
                new_session=session,
                tail_keys=tail_keys,
                users=users,
                response_fields=self._redactor.redact_value(meta.response_fields),
            )
            state.recorded_users = user_ids
        except BaseException:  # Nothing was stored, so the next call must store the session.
            state.unsaved_session = session
            raise
        prompt = meta.request.prompt if isinstance(meta.request.prompt, str) else None
        for row in rows:
            position = row.first_redacted_message
            graph.add(
                row.call, placement, row.chain, sampled_ids=row.withheld_ids, first_redacted_message=position
            )
            self._resolver.index.add_call(state, row.call, row.chain, prompt)

    def _build_row(
        self,
        state: SessionState,
        meta: RequestMeta,
        placement: Placement,
        reply: SampledReply,
        first: _CallRow | None,
        abort_reason: str | None,
    ) -> _CallRow:
        session, params = state.session, self._redactor.redact_params(reply.params)
        base_messages = len(meta.messages) if first else placement.base_messages
        tools = self.redact_tools(meta)
        messages, redacted_reply, position = self._redact(meta, placement, reply, tools, first, base_messages)
        has_tokens = position is None
        reason = abort_reason or reply.untrainable_reason
        if reason is not None:
            reason = self._redactor.redact_text(reason)  # A provider's error may contain the rejected key.
        if position is not None:
            reason = format_redaction_reason(position, reason)
        chain = meta.chain.extend([self._hasher.hash_message(reply.message)]) if meta.chain else None
        sampled_ids = np.asarray(reply.ids, np.int32)
        # The prompt is stored only with the first reply; the others refer to it.
        base_tokens = len(first.call.prompt_ids) if first else placement.base_tokens
        behavior_logprobs = None
        if params.modifies_distribution:
            behavior_logprobs = np.asarray(reply.behavior_logprobs if has_tokens else (), np.float32)
        call = Call(
            call_id=new_id("call"),
            session_id=session.session_id,
            run_id=session.run_id,
            agent_id=session.agent_id,
            policy_id=reply.policy_id or session.policy_id,
            request_id=meta.request_id,
            prompt_ids=placement.prompt_ids if has_tokens else _NO_IDS,
            sampled_ids=sampled_ids if has_tokens else _NO_IDS,
            logprobs=np.asarray(reply.logprobs if has_tokens else (), np.float32),
            versions=np.asarray(reply.versions if has_tokens else (), np.int32),
            behavior_logprobs=behavior_logprobs,
            messages=messages,
            tools=tools,
            reply=redacted_reply,
            finish_reason="aborted" if abort_reason else reply.finish_reason or "aborted",
            parent_id=placement.parent_id,
            link=Link.SIBLING if first else placement.link,
            base_id=first.call.call_id if first else placement.base_id,
            base_tokens=base_tokens if has_tokens else 0,
            base_messages=base_messages,
            status=CallStatus.ABORTED if abort_reason else CallStatus.OK,
            trainable=reason is None,
            reason=reason,
            dialect=meta.dialect,
            model=meta.request.model,
            client_key=meta.client_key,
            digests=self._pack_digests(meta, base_messages, chain, reply.message),
            params=params,
            started_at=meta.started_at,
            first_token_at=reply.first_token_at,
            ended_at=reply.ended_at or time.time(),
        )
        return _CallRow(call, chain, None if has_tokens else sampled_ids, position)

    def _redact(
        self,
        meta: RequestMeta,
        placement: Placement,
        reply: SampledReply,
        tools: tuple[Tool, ...],
        first: _CallRow | None,
        base_messages: int,
    ) -> tuple[tuple[Message, ...], Message, int | None]:
        """Return the messages and the reply without secrets, and the index of the first redacted one. The
        index is 0 if secrets were found in the tools or token ids, and None if there are none."""
        messages = meta.messages
        own_messages = messages[base_messages:]
        redacted = [self._redactor.redact_message(message) for message in own_messages]
        redacted_reply = self._redactor.redact_message(reply.message)
        pairs = zip((*own_messages, reply.message), (*redacted, redacted_reply), strict=True)
        position = next((i for i, (a, b) in enumerate(pairs, base_messages) if a is not b), None)
        if placement.first_redacted_message is not None:
            position = placement.first_redacted_message
        kwargs = meta.request.chat_template_kwargs
        is_redacted = tools is not meta.request.tools or self._redactor.redact_value(kwargs) != kwargs
        if is_redacted or self._has_secret_in_prompt_ids(meta, placement):
            position = 0
        first_position = first.first_redacted_message if first else None
        if first_position is not None and first_position < base_messages:
            position = first_position
        if position is not None:
            messages = (*messages[:base_messages], *redacted)
        return messages, redacted_reply, position

    def _pack_digests(self, meta: RequestMeta, start: int, chain: HashChain | None, reply: Message) -> bytes:
        if chain is not None:
            return chain.pack(start)
        prompt = meta.request.prompt
        return self._hasher.pack_prompt_digest(prompt, reply["content"]) if isinstance(prompt, str) else b""

    def _has_secret_in_prompt_ids(self, meta: RequestMeta, placement: Placement) -> bool:
        """Return True if the prompt was sent as token ids and its new tokens contain a secret."""
        prompt = meta.request.prompt
        if prompt is None or isinstance(prompt, str) or self._renderer is None:
            return False
        parser = self._renderer.stream_text()
        parser.feed(prompt[max(0, placement.base_tokens - _REDACTION_OVERLAP_TOKENS) :])
        parser.finish()
        text = parser.message["content"]
        return self._redactor.redact_text(text) != text

    def redact_tools(self, meta: RequestMeta) -> tuple[Tool, ...]:
        """Return the tools without secrets. Raise RecursionError if a tool is nested too deeply."""
        tools = meta.request.tools
        if not tools:
            return tools
        if meta.chain is None:
            return self._redactor.redact_tools(tools)
        key = meta.chain.tools_digest
        if key not in self._redacted_tools:
            redacted = self._redactor.redact_tools(tools)
            self._redacted_tools[key] = None if redacted is tools else redacted
            if len(self._redacted_tools) > _MAX_CACHED_TOOLS:
                self._redacted_tools.popitem(last=False)
        return self._redacted_tools[key] or tools
