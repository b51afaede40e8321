"""Answers to programs that hold the tokens themselves (`gateway.whitebox`): generate, and submit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec.structs
from starlette.types import Receive, Scope, Send

from instar.gateway.base import bad_request
from instar.gateway.calls import Calls, EngineCall
from instar.gateway.dialects.base import Dialect, ModelRequest
from instar.gateway.recording import RequestMeta
from instar.gateway.responses import Count, ModelResponse, api_error
from instar.gateway.sessions import SessionState
from instar.gateway.token_api import (
    LINES,
    SubmittedCall,
    write_failure,
    write_generated,
    write_piece,
)
from instar.record.base import Placement
from instar.record.graph import MessageGraph
from instar.record.hashing import HashChain, MessageHasher
from instar.types import TokenChunk, new_id


class GenerateResponse(ModelResponse):
    """Token ids, as they are sampled. The line that ends a reply leaves once the call is recorded."""

    def __init__(self, dialect: Dialect, exchange: EngineCall, count: Count, patience: float) -> None:
        super().__init__(dialect, exchange.session_id, count, patience)
        self._exchange = exchange
        self._begun = False

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._exchange
        if exchange.request.stream:
            await self._stream(scope, receive, send)
            return
        try:
            await exchange.run()
        except Exception as error:  # noqa: BLE001 — whatever it is, it is said
            await self.refuse(error, scope, receive, send)
            return
        await self.begin(send, b"application/json")
        body = write_generated(exchange.request_id, exchange.replies)
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        last: dict[int, TokenChunk] = {}

        async def tell(index: int, chunk: TokenChunk) -> None:
            if chunk.finish_reason is not None:
                last[index] = msgspec.structs.replace(chunk, token_ids=[], logprobs=[], versions=[])
                chunk = msgspec.structs.replace(chunk, finish_reason=None, stop=None)
            if not self._begun:
                self._begun = True
                await self.begin(send, LINES.encode())
            if chunk.token_ids:
                body = write_piece(index, chunk)
                await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await self._exchange.run(on_chunk=tell)
            end = b"".join(write_piece(index, chunk) for index, chunk in sorted(last.items()))
        except Exception as error:  # noqa: BLE001 — whatever it is, it is said
            if not self._begun:
                await self.refuse(error, scope, receive, send)
                return
            end = write_failure(api_error(error))
        await self.end(send, end)


async def submit(
    calls: Calls, hasher: MessageHasher, state: SessionState, submitted: Sequence[SubmittedCall]
) -> list[str]:
    """Records calls that were sampled elsewhere; their ids. One that was recorded before under the same
    client key is not recorded again."""
    ids: list[str] = []
    with calls.sessions.answering(state):
        graph = await calls.sessions.graph_of(state)
        for i, call in enumerate(submitted):
            if call.parent_id is not None and not graph.has_call(call.parent_id):
                raise bad_request(
                    f"This session has no call {call.parent_id!r}.", f"calls[{i}].parent_id", "invalid_value"
                )
            ids += await _submit(calls, hasher, graph, state, call)
    return ids


async def _submit(
    calls: Calls, hasher: MessageHasher, graph: MessageGraph, state: SessionState, call: SubmittedCall
) -> list[str]:
    chain: HashChain | None = None
    if call.messages is None:
        placement = graph.place_prompt(call.prompt_ids.tolist(), calls.renderer)
    else:
        chain = graph.match_replies(hasher.hash_messages(call.messages, call.tools), call.messages)
        unsettled = graph.place(chain, call.messages, call.tools, None)
        placement = graph.attach_prompt(unsettled, call.prompt_ids)
    try:
        if call.client_key and (known := graph.find_by_idempotency_key(placement.key, call.client_key)):
            return known
        return await _record(calls, graph, state, call, chain, placement)
    finally:
        graph.release(placement)


async def _record(
    calls: Calls,
    graph: MessageGraph,
    state: SessionState,
    call: SubmittedCall,
    chain: HashChain | None,
    placement: Placement,
) -> list[str]:
    reply = call.reply
    if not call.has_message:
        reply.message = calls.renderer.parse(reply.ids, call.tools)
    request = ModelRequest(
        model=call.model,
        messages=call.messages or (),
        tools=call.tools,
        prompt=None if chain else tuple(call.prompt_ids.tolist()),
    )
    asked = RequestMeta(new_id("sub"), request, chain, "tokens", call.client_key, time.time())
    if call.parent_id is not None:
        placement = replace(placement, parent_id=call.parent_id)
    return await calls.recorder.record(state, graph, asked, placement, [reply])
