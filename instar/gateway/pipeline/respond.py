"""Send the responses to model calls, complete or streamed, and watch for clients that disconnect."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from instar.errors import (
    EngineError,
    EngineUnavailable,
    PolicyNotFound,
    PromptTooLong,
    RenderError,
    StoreError,
)
from instar.gateway.base import DROPPED_MESSAGES_HEADER, IGNORED_FIELDS_HEADER, SESSION_HEADER, ApiError
from instar.gateway.dialects.base import Dialect, ReplyChoices, StreamWriter, TokenLogprobs
from instar.gateway.dialects.common import split_reply
from instar.gateway.http_protocol import LimitedHttpProtocol, get_connection
from instar.gateway.pipeline.sample import ModelCall, SampledResult
from instar.gateway.upstream.base import UpstreamError
from instar.record.base import ReplyDelta
from instar.types import TokenChunk

logger = logging.getLogger(__name__)

JSON = "application/json"


def to_api_error(error: Exception) -> ApiError:
    """Convert a failure to the error that the client receives. An unexpected failure is logged."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ApiError(400, str(error), code="context_length_exceeded", param="messages")
        case RenderError():
            return ApiError(400, str(error), code="invalid_messages", param="messages")
        case PolicyNotFound():
            return ApiError(404, str(error), code="model_not_found", param="model")
        case EngineUnavailable():
            return ApiError(503, f"The model is not available: {error}", code="unavailable", retry_after=1)
        case EngineError():
            return ApiError(502, f"The engine failed: {error}", code="engine_error")
        case StoreError():
            return ApiError(503, f"The store failed: {error}", code="store_error", retry_after=1)
        case RecursionError():
            return ApiError(400, "The request's JSON is nested too deeply.", code="invalid_json")
        case HTTPException():
            return ApiError(error.status_code, error.detail)
        case _:
            logger.error("A request failed with an unexpected error.", exc_info=error)
            return ApiError(500, "Internal error; see the gateway's log.", code="internal")


def release_frames(failure: BaseException) -> None:
    """Clear the local variables of the functions that the failure ended.

    An exception that passes through a future is in a cycle of references with the frames that awaited it.
    They would keep the request's body and messages in memory until the next garbage collection.
    """
    error: BaseException | None = failure
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def error_response(dialect: Dialect, failure: Exception) -> Response:
    error = to_api_error(failure)
    release_frames(failure)
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    if error.param == "messages":
        error.param = dialect.messages_param
    if isinstance(error, UpstreamError) and error.raw:
        return Response(error.raw, error.status, headers, error.content_type or JSON)
    return Response(dialect.format_error(error), error.status, headers, JSON)


@dataclass(slots=True, eq=False)
class Responder:
    """Sends the response to one call, and cancels the call when the client disconnects.

    The headers of a stream are sent with its first part, so that an earlier failure can still set the status.
    """

    _call: ModelCall
    _scope: Scope
    _receive: Receive
    _send: Send
    _read_timeout: float
    """The time within which the client must read the end of a stream, in seconds."""
    _writer: StreamWriter | None = None
    _has_started: bool = False

    async def run(self, execute: Callable[[ModelCall, Responder], Awaitable[None]]) -> None:
        """Execute the call. Cancel it if the client disconnects, and send an error if it fails."""
        watcher = DisconnectWatcher(self._scope, self._receive)
        try:
            await execute(self._call, self)
        except asyncio.CancelledError:
            # Only a cancellation by the server is passed on. After a disconnect, no one reads an error.
            if not watcher.consume_cancellation():
                raise
        except Exception as error:  # noqa: BLE001 - every failure is reported in the client's dialect
            await self._send_failure(error)
        finally:
            await watcher.close()

    async def finish(self, result: SampledResult) -> None:
        """Send the rest of the response. The caller must record the call first."""
        call = self._call
        if not call.request.stream:
            request_id = call.meta.request_id
            body = result.raw or call.dialect.format_response(request_id, call.request, result.choices)
            await self._send_complete(result.content_type or JSON, body)
        elif result.raw:
            await self._start(result.content_type or JSON)
            await self._send_last(result.raw)
        else:
            writer = await self._start_writer()
            parts = [writer.write_deltas(index, [delta], ()) for index, delta in result.deltas]
            await self._send_last(b"".join([*parts, writer.finish(result.choices)]))

    async def replay(self, choices: ReplyChoices) -> None:
        """Send recorded replies as if they had just been sampled."""
        if self._call.request.stream:
            for index, choice in enumerate(choices):
                if choice.tokens is not None:
                    await self.send_tokens(index, choice.tokens)
                else:
                    await self.send_deltas(index, split_reply(choice.message), choice.logprobs)
        await self.finish(SampledResult((), choices))

    async def send_deltas(self, index: int, deltas: Sequence[ReplyDelta], logprobs: TokenLogprobs) -> None:
        writer = await self._start_writer()
        await self._send_part(writer.write_deltas(index, deltas, logprobs))

    async def send_indexed_deltas(self, deltas: Sequence[tuple[int, ReplyDelta]]) -> None:
        writer = await self._start_writer()
        parts = [writer.write_deltas(index, [delta], ()) for index, delta in deltas]
        await self._send_part(b"".join(parts))

    async def send_tokens(self, index: int, chunk: TokenChunk) -> None:
        writer = await self._start_writer()
        await self._send_part(writer.write_tokens(index, chunk))

    async def send_raw(self, raw: bytes, content_type: str | None) -> None:
        """Pass on bytes from a provider that speaks the client's dialect."""
        await self._start(content_type or JSON)
        await self._send_part(raw)

    async def _start_writer(self) -> StreamWriter:
        if self._writer is None:
            call = self._call
            self._writer = call.dialect.stream_writer_class(call.meta.request_id, call.request)
            await self._start(call.dialect.stream_content_type)
            await self._send_part(b"".join(map(self._writer.begin, range(call.request.n))))
        return self._writer

    async def _start(self, content_type: str) -> None:
        if self._has_started:
            return
        self._has_started = True
        headers = [(b"content-type", content_type.encode()), *self._call_headers]
        if content_type.startswith("text/event-stream"):
            headers.append((b"cache-control", b"no-cache"))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_part(self, part: bytes) -> None:
        if part:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def _send_last(self, part: bytes) -> None:
        with suppress(TimeoutError):  # The call is already recorded, so the client may stop reading.
            async with asyncio.timeout(self._read_timeout):
                await self._send({"type": "http.response.body", "body": part, "more_body": False})

    async def _send_complete(self, content_type: str, body: bytes) -> None:
        self._has_started = True
        headers = [(b"content-type", content_type.encode()), *self._call_headers]
        if (connection := get_connection(self._scope)) is not None:
            connection.send_response(headers, body)
            return
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _send_failure(self, failure: Exception) -> None:
        call = self._call
        if not self._has_started:
            await error_response(call.dialect, failure)(self._scope, self._receive, self._send)
            return
        # There is no writer yet if a provider's stream was passed on unchanged.
        writer = self._writer or call.dialect.stream_writer_class(call.meta.request_id, call.request)
        await self._send_last(writer.write_error(to_api_error(failure)))
        release_frames(failure)

    @property
    def _call_headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(SESSION_HEADER.encode(), self._call.state.session.session_id.encode())]
        if dropped := self._call.dropped_messages:
            headers.append((DROPPED_MESSAGES_HEADER.encode(), b"%d" % dropped))
        if ignored := self._call.request.ignored_fields:
            # The names come from the client, so they may contain characters that a header must not have.
            value = ", ".join(ignored).encode("ascii", "backslashreplace")
            headers.append((IGNORED_FIELDS_HEADER.encode(), re.sub(rb"[\x00-\x1f\x7f]", b"?", value)[:4096]))
        return headers


class DisconnectWatcher:
    """Cancels the current task when its client disconnects."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None, "requests are handled in tasks"
        self._task = task
        self._is_disconnected = False
        self._receive_task: asyncio.Task[None] | None = None
        self._connection: LimitedHttpProtocol | None = get_connection(scope)
        if self._connection is None:  # The server does not use LimitedHttpProtocol.
            self._receive_task = asyncio.create_task(self._wait_for_disconnect(receive))
        elif self._connection.transport.is_closing():
            self._cancel()
        else:
            self._connection.on_disconnect = self._cancel

    def consume_cancellation(self) -> bool:
        """Undo the watcher's cancellation, if any. Return True if only the watcher cancelled the task."""
        return self._is_disconnected and self._task.uncancel() == 0

    async def close(self) -> None:
        # The next request on the connection may already have set its own callback.
        if self._connection is not None and self._connection.on_disconnect == self._cancel:
            self._connection.on_disconnect = None
        if self._receive_task is not None:
            self._receive_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._receive_task

    def _cancel(self) -> None:
        self._is_disconnected = True
        self._task.cancel()

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel()
