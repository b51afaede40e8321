"""From replies to recorded calls: what is stored of them, what is cut out, and what of it is trainable."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from instar.gateway.dialects.base import ModelRequest
from instar.gateway.sessions import Sessions, SessionState
from instar.record.base import Placement, Renderer
from instar.record.graph import MessageGraph
from instar.record.hashing import HashChain, MessageHasher
from instar.record.nodes import redaction_reason
from instar.record.redact import Redactor
from instar.store.base import Store
from instar.types import (
    Call,
    CallStatus,
    FinishReason,
    Ids,
    Link,
    Message,
    SamplingParams,
    TokenChunk,
    Tool,
    new_id,
)

_REMEMBERED_TOOLS = 256
_OVERLAP = 128
"""Tokens before the new ones of a prompt, in which a secret may have begun."""
_NO_IDS: Ids = np.empty(0, np.int32)


@dataclass(slots=True)
class SampledReply:
    """One choice, while it comes and when it is whole."""

    params: SamplingParams
    message: Message = field(default_factory=lambda: Message(role="assistant", content=""))
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    behavior: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    stop: str | None = None
    first_token_at: float | None = None
    ended_at: float = 0.0
    untrainable: str | None = None
    """Why it cannot be trained on, where its own numbers do not say so."""

    def append(self, chunk: TokenChunk) -> None:
        if chunk.token_ids and self.first_token_at is None:
            self.first_token_at = time.time()
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions
        self.behavior += chunk.behavior_logprobs or [math.nan] * len(chunk.token_ids)
        self.finish_reason = chunk.finish_reason
        self.stop = chunk.stop

    @property
    def complete_chunk(self) -> TokenChunk:
        """All of it, as if it had come at once."""
        return TokenChunk(
            token_ids=self.ids,
            logprobs=self.logprobs,
            versions=self.versions,
            behavior_logprobs=self.behavior if self.params.modifies_distribution else None,
            finish_reason=self.finish_reason,
            stop=self.stop,
        )

    @property
    def untrainable_reason(self) -> str | None:
        """Why it is not trainable."""
        if self.untrainable is not None:
            return self.untrainable
        if any(map(math.isnan, self.logprobs)):
            return "logprobs are missing"
        if self.params.modifies_distribution and any(map(math.isnan, self.behavior)):
            return "sampled otherwise than at temperature 1, and the logprobs of that are missing"
        return None


def reply_from_call(call: Call) -> SampledReply:
    """The reply of a recorded call, to be given once more."""
    return SampledReply(
        params=call.params,
        message=call.reply,
        ids=call.sampled_ids.tolist(),
        logprobs=call.logprobs.tolist(),
        behavior=[] if call.behavior_logprobs is None else call.behavior_logprobs.tolist(),
        versions=call.versions.tolist(),
        finish_reason=call.finish_reason,
        first_token_at=call.first_token_at,
        ended_at=call.ended_at,
    )


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """The request that replies are recorded under."""

    request_id: str
    request: ModelRequest
    chain: HashChain | None
    """None for a prompt without messages."""
    dialect: str
    client_key: str | None
    started_at: float

    @property
    def messages(self) -> tuple[Message, ...]:
        prompt = self.request.prompt
        if isinstance(prompt, str):
            return (Message(role="user", content=prompt),)
        return self.request.messages


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A call as it is stored, and what the graph needs beside it."""

    call: Call
    whole: HashChain | None
    """Of its messages and its reply."""
    sampled_ids: Ids | None
    redacted_at: int | None


class Recorder:
    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        hasher: MessageHasher,
        redactor: Redactor,
        renderer: Renderer | None = None,
    ) -> None:
        """``renderer``: to read prompts that are given as token ids."""
        self.store = store
        self._sessions = sessions
        self._hasher = hasher
        self._redactor = redactor
        self._renderer = renderer
        self._tools: OrderedDict[bytes, tuple[Tool, ...] | None] = OrderedDict()
        self._commits: set[asyncio.Task[None]] = set()

    async def record(
        self,
        state: SessionState,
        graph: MessageGraph,
        asked: RequestMeta,
        placement: Placement,
        replies: Sequence[SampledReply],
        *,
        aborted: str | None = None,
    ) -> list[str]:
        """The ids of the calls. Durable when it returns; goes on to its end even if its caller is cancelled
        meanwhile."""
        made: list[_Recorded] = []
        for reply in replies:
            first = made[0] if made else None
            made.append(self._recorded(state, asked, placement, reply, first, aborted))
        task = asyncio.create_task(self._commit(state, graph, asked, placement, made))
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)
        await asyncio.shield(task)
        return [one.call.call_id for one in made]

    async def drain(self) -> None:
        await asyncio.gather(*self._commits, return_exceptions=True)

    async def _commit(
        self,
        state: SessionState,
        graph: MessageGraph,
        asked: RequestMeta,
        placement: Placement,
        made: Sequence[_Recorded],
    ) -> None:
        tails: dict[str, bytes] = {}
        if state.unnamed and asked.chain is not None:
            tails = {one.call.call_id: one.whole.canonical[-1] for one in made if one.whole}
        opening = state.take_opening()
        try:
            await self.store.add_calls([one.call for one in made], opening=opening, tail_keys=tails)
        except BaseException:
            # Not stored: the next call opens the session.
            state.opening = opening
            raise
        for one in made:
            graph.add(
                one.call,
                placement,
                one.whole,
                sampled_ids=one.sampled_ids,
                first_redacted_message=one.redacted_at,
            )
        for one in made:
            self._sessions.remember(state, one.call, one.whole)
            if state.unnamed and isinstance(asked.request.prompt, str):
                self._sessions.remember_text(state, asked.request.prompt + one.call.reply["content"])

    def _recorded(
        self,
        state: SessionState,
        asked: RequestMeta,
        placement: Placement,
        reply: SampledReply,
        first: _Recorded | None,
        aborted: str | None,
    ) -> _Recorded:
        session = state.session
        base_messages = len(asked.messages) if first else placement.base_messages
        own = asked.messages[base_messages:]
        clean = [self._redactor.redact_message(message) for message in own]
        said = self._redactor.redact_message(reply.message)
        redacted_at = _first_difference([*own, reply.message], [*clean, said], base_messages)
        tools = self._clean_tools(asked)
        if placement.first_redacted_message is not None:
            redacted_at = placement.first_redacted_message
        if tools is not asked.request.tools or self._holds_secret(asked, placement):
            redacted_at = 0
        if first and first.redacted_at is not None and first.redacted_at < base_messages:
            redacted_at = first.redacted_at
        hides = redacted_at is not None
        reason = aborted or reply.untrainable_reason
        if reason is not None:
            reason = self._redactor.redact_text(reason)  # providers name the key that they refuse
        if redacted_at is not None:
            reason = redaction_reason(redacted_at, reason)
        whole = asked.chain.extend([self._hasher.hash_message(reply.message)]) if asked.chain else None
        sampled = np.asarray(reply.ids, np.int32)
        stored = not hides
        # A further reply stands on the first one, as far as that was stored.
        tokens = len(first.call.prompt_ids) if first else placement.base_tokens
        call = Call(
            call_id=new_id("call"),
            session_id=session.session_id,
            run_id=session.run_id,
            agent_id=session.agent_id,
            policy_id=session.policy_id,
            request_id=asked.request_id,
            prompt_ids=placement.prompt_ids if stored else _NO_IDS,
            sampled_ids=sampled if stored else _NO_IDS,
            logprobs=np.asarray(reply.logprobs if stored else (), np.float32),
            versions=np.asarray(reply.versions if stored else (), np.int32),
            behavior_logprobs=(
                np.asarray(reply.behavior if stored else (), np.float32)
                if reply.params.modifies_distribution
                else None
            ),
            messages=(*asked.messages[:base_messages], *clean) if hides else asked.messages,
            tools=tools,
            reply=said,
            finish_reason="aborted" if aborted else reply.finish_reason or "aborted",
            parent_id=placement.parent_id,
            link=Link.SIBLING if first else placement.link,
            base_id=first.call.call_id if first else placement.base_id,
            base_tokens=tokens if stored else 0,
            base_messages=base_messages,
            status=CallStatus.ABORTED if aborted else CallStatus.OK,
            trainable=reason is None,
            reason=reason,
            dialect=asked.dialect,
            model=asked.request.model,
            client_key=asked.client_key,
            digests=self._digests(asked, base_messages, whole, reply.message),
            params=reply.params,
            started_at=asked.started_at,
            first_token_at=reply.first_token_at,
            ended_at=reply.ended_at or time.time(),
        )
        return _Recorded(call, whole, sampled if hides else None, redacted_at)

    def _digests(self, asked: RequestMeta, since: int, whole: HashChain | None, reply: Message) -> bytes:
        if whole is not None:
            return whole.pack(since)
        prompt = asked.request.prompt
        return self._hasher.pack_prompt(prompt, reply["content"]) if isinstance(prompt, str) else b""

    def _holds_secret(self, asked: RequestMeta, placement: Placement) -> bool:
        """Whether a prompt of token ids does, in what is new of it."""
        prompt = asked.request.prompt
        if prompt is None or isinstance(prompt, str) or self._renderer is None:
            return False
        parser = self._renderer.stream_text()
        parser.feed(prompt[max(0, placement.base_tokens - _OVERLAP) :])
        parser.finish()
        text = parser.message["content"]
        return self._redactor.redact_text(text) != text

    def _clean_tools(self, asked: RequestMeta) -> tuple[Tool, ...]:
        """Looked through once: agents send the same tools with every call."""
        tools = asked.request.tools
        if not tools or asked.chain is None:
            return tools
        key = asked.chain.tools_digest
        if key not in self._tools:
            cleaned = self._redactor.redact_tools(tools)
            self._tools[key] = None if cleaned is tools else cleaned
            if len(self._tools) > _REMEMBERED_TOOLS:
                self._tools.popitem(last=False)
        return self._tools[key] or tools


def _first_difference(before: Sequence[Message], after: Sequence[Message], offset: int) -> int | None:
    return next((offset + i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a is not b), None)
