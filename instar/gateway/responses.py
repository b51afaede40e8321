"""Answers of model calls: written while they are sampled, stopped when the client goes away."""

from __future__ import annotations

import asyncio
import traceback
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from instar.errors import EngineError, EngineUnavailable, PromptTooLong, RenderError, StoreError
from instar.gateway.base import SESSION_HEADER, ApiError
from instar.gateway.calls import EngineCall
from instar.gateway.dialects.base import Dialect, StreamWriter, TokenLogprob
from instar.gateway.http_protocol import LimitedHttpProtocol, get_connection
from instar.gateway.upstream.base import UpstreamChunk, UpstreamError
from instar.gateway.upstream_call import UpstreamCall
from instar.record.base import ReplyDelta

JSON = "application/json"
_EVENTS = b"text/event-stream"

Count = Callable[[int], None]


def api_error(error: Exception) -> ApiError:
    """What a failure looks like from outside."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ApiError(400, str(error), code="context_length_exceeded", param="messages")
        case RenderError():
            return ApiError(400, str(error), code="invalid_messages", param="messages")
        case EngineUnavailable():
            return ApiError(503, f"The engine is not ready: {error}", code="unavailable", retry_after=1)
        case EngineError():
            return ApiError(502, f"The engine failed: {error}", code="engine_error")
        case StoreError():
            return ApiError(503, f"The store refused: {error}", code="store_error", retry_after=1)
        case HTTPException():
            return ApiError(error.status_code, error.detail)
        case _:
            traceback.print_exception(error)
            return ApiError(500, "Internal error; the gateway's log says more.", code="internal")


def failure(dialect: Dialect, error: ApiError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    if error.param == "messages":
        error.param = dialect.messages_param
    if isinstance(error, UpstreamError) and error.raw:
        return Response(error.raw, error.status, headers, error.content_type or JSON)
    return Response(dialect.format_error(error), error.status, headers, JSON)


class ModelResponse(Response):
    """Works while it answers; the work is cancelled when the client goes away."""

    def __init__(self, dialect: Dialect, session_id: str, count: Count, patience: float) -> None:
        """``patience``: seconds that a client has to take the end of a stream."""
        super().__init__()
        self.dialect = dialect
        self._patience = patience
        self._session = (SESSION_HEADER.encode(), session_id.encode())
        self._count = count

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._count(1)
        leaving = DisconnectWatcher()
        leaving.watch(scope, receive)
        try:
            await self.answer(scope, receive, send)
        except asyncio.CancelledError:
            # The client's leaving ends this request quietly; anything else is the server's own wish.
            if not leaving.ends_quietly():
                raise
        finally:
            self._count(-1)
            await leaving.forget()

    async def refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        await failure(self.dialect, api_error(error))(scope, receive, send)

    async def begin(self, send: Send, content_type: bytes) -> None:
        headers = [(b"content-type", content_type), self._session]
        if content_type == _EVENTS:
            headers.append((b"cache-control", b"no-cache"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def whole(self, scope: Scope, send: Send, content_type: bytes, body: bytes) -> None:
        """An answer that is not streamed."""
        headers = [(b"content-type", content_type), self._session]
        if (link := get_connection(scope)) is not None:
            link.answer(headers, body)
            return
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def end(self, send: Send, last: bytes) -> None:
        """Of a stream. A client that does not take it is left alone."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                await send({"type": "http.response.body", "body": last, "more_body": False})


class DisconnectWatcher:
    """Cancels the running task when its client goes away."""

    def __init__(self) -> None:
        work = asyncio.current_task()
        assert work is not None
        self._work = work
        self._gone = False
        self._connection: LimitedHttpProtocol | None = None
        self._watching: asyncio.Task[None] | None = None

    def watch(self, scope: Scope, receive: Receive) -> None:
        self._connection = get_connection(scope)
        if self._connection is None:  # another server's
            self._watching = asyncio.create_task(self._wait(receive))
        elif self._connection.transport.is_closing():
            self._cancel()
        else:
            self._connection.when_gone = self._cancel

    def ends_quietly(self) -> bool:
        return self._gone and self._work.uncancel() == 0

    async def forget(self) -> None:
        if self._connection is not None:
            self._connection.when_gone = None
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    def _cancel(self) -> None:
        self._gone = True
        self._work.cancel()

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel()


class CallResponse(ModelResponse):
    def __init__(self, dialect: Dialect, exchange: EngineCall, count: Count, patience: float) -> None:
        super().__init__(dialect, exchange.session_id, count, patience)
        self._exchange = exchange

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._exchange.request.stream:
            await EventStream(self, self._exchange, send).run(scope, receive)
            return
        try:
            choices = await self._exchange.run()
        except Exception as error:  # noqa: BLE001 — whatever it is, it is said in the dialect's words
            await self.refuse(error, scope, receive, send)
            return
        exchange = self._exchange
        body = self.dialect.format_response(exchange.request_id, exchange.request, choices)
        await self.whole(scope, send, JSON.encode(), body)


class EventStream:
    """A streamed answer. Headers leave with the first piece, so an early failure has its own status."""

    def __init__(self, response: ModelResponse, exchange: EngineCall, send: Send) -> None:
        self._response = response
        self._exchange = exchange
        self._send = send
        self._writer: StreamWriter | None = None

    async def run(self, scope: Scope, receive: Receive) -> None:
        try:
            choices = await self._exchange.run(self._emit)
            last = (await self._begun()).finish(choices)
        except Exception as error:  # noqa: BLE001 — whatever it is, it is said in the dialect's words
            if self._writer is None:
                await self._response.refuse(error, scope, receive, self._send)
                return
            last = self._writer.write_error(api_error(error))
        await self._response.end(self._send, last)

    async def _emit(self, index: int, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]) -> None:
        piece = (await self._begun()).write_deltas(index, deltas, logprobs)
        if piece:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _begun(self) -> StreamWriter:
        if self._writer is None:
            exchange = self._exchange
            self._writer = self._response.dialect.create_stream_writer(exchange.request_id, exchange.request)
            await self._response.begin(self._send, _EVENTS)
            first = b"".join(map(self._writer.begin, range(exchange.request.n)))
            await self._send({"type": "http.response.body", "body": first, "more_body": True})
        return self._writer


class ForwardResponse(ModelResponse):
    """A provider's answer, passed on."""

    def __init__(self, dialect: Dialect, forward: UpstreamCall, count: Count, patience: float) -> None:
        super().__init__(dialect, forward.session_id, count, patience)
        self._forward = forward
        self._writer: StreamWriter | None = None
        self._begun = False

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def forward(piece: UpstreamChunk) -> None:
            await self._pass(piece, scope, send)

        try:
            await self._forward.run(forward)
        except Exception as error:  # noqa: BLE001 — whatever it is, it is said in the dialect's words
            if not self._begun:
                await self.refuse(error, scope, receive, send)
                return
            said = api_error(error)
            await self.end(send, self._writer.write_error(said) if self._writer else self._broken(said))

    async def _pass(self, piece: UpstreamChunk, scope: Scope, send: Send) -> None:
        body, content_type = piece.raw, piece.content_type
        if not body:
            body, content_type = self._translated(piece)
        more = piece.choices is None
        if not self._begun:
            self._begun = True
            if not more and not self._forward.request.stream:
                await self.whole(scope, send, (content_type or JSON).encode(), body)
                return
            await self.begin(send, (content_type or JSON).encode())
        if body or not more:
            await send({"type": "http.response.body", "body": body, "more_body": more})

    def _translated(self, piece: UpstreamChunk) -> tuple[bytes, str]:
        forward = self._forward
        if not forward.request.stream:
            assert piece.choices is not None
            return self.dialect.format_response(forward.request_id, forward.request, piece.choices), JSON
        out: list[bytes] = []
        writer = self._writer
        if writer is None:
            writer = self._writer = self.dialect.create_stream_writer(forward.request_id, forward.request)
            out += map(writer.begin, range(forward.request.n))
        out += [writer.write_deltas(index, [delta], ()) for index, delta in piece.deltas]
        if piece.choices is not None:
            out.append(writer.finish(piece.choices))
        return b"".join(out), _EVENTS.decode()

    def _broken(self, error: ApiError) -> bytes:
        """The end of a stream that was passed on as it came."""
        forward = self._forward
        return self.dialect.create_stream_writer(forward.request_id, forward.request).write_error(error)
