"""A provider's HTTP response: passed on as it arrives and parsed on the side, or translated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import aiohttp
import msgspec

from instar.errors import EngineUnavailable
from instar.gateway.dialects.base import ModelRequest, ReplyChoice
from instar.gateway.upstream import chat, messages, responses, rewrite
from instar.gateway.upstream.base import UpstreamChunk, UpstreamError, UpstreamResponse
from instar.gateway.upstream.replies import ReplyReader, parse_error
from instar.gateway.upstream.rewrite import AddedFields
from instar.gateway.upstream.sse import EventSplitter, ServerSentEvent
from instar.http.retry import parse_retry_after

if TYPE_CHECKING:
    from instar.http.plain import PlainResponse

HttpResponse: TypeAlias = "aiohttp.ClientResponse | PlainResponse"
SendRequest = Callable[[], Awaitable["HttpResponse"]]

# The time to wait for a stream's end after its last event. Only a stream that was read to its end allows its
# connection to be reused.
_STREAM_END_SECONDS = 1.0

_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError)


class HttpUpstreamResponse(UpstreamResponse):
    """A response of a provider over HTTP. ``dialect`` is the provider's. ``added_fields`` is set if token ids
    were requested."""

    def __init__(
        self,
        send: SendRequest,
        request: ModelRequest,
        dialect: str,
        *,
        translated: bool,
        added_fields: AddedFields | None,
    ) -> None:
        self._send = send
        self._request = request
        self._dialect = dialect
        self._translated = translated
        self._has_token_ids = added_fields is not None
        self._added_fields = added_fields or AddedFields(token_ids=False, logprobs=False)
        self._response: HttpResponse | None = None
        self._reader: ReplyReader | None = None
        self._splitter = EventSplitter()
        self._held: list[bytes] = []
        self._content_type: str | None = None
        self._failure: UpstreamError | None = None
        self._is_closed = False

    async def __anext__(self) -> UpstreamChunk:
        if self._is_closed:
            raise StopAsyncIteration
        try:
            chunk = await self._next_chunk()
        except UpstreamError as error:
            self._close()
            if self._translated:
                error.raw, error.content_type = b"", None
            raise
        except BaseException:  # including cancellation: the connection must not be reused
            self._close()
            raise
        if chunk.choices is not None:
            self._close()
        return chunk

    async def aclose(self) -> None:
        self._close()

    def _close(self) -> None:
        self._is_closed = True
        if self._response is not None and not self._response.closed:
            self._response.close()

    def partial_choices(self) -> list[ReplyChoice]:
        return self._reader.partial_choices() if self._reader else []

    async def _next_chunk(self) -> UpstreamChunk:
        if self._response is None:
            self._response = await self._send()
            if not 200 <= self._response.status < 300:
                raise await read_error(self._response)
            self._content_type = self._response.headers.get("Content-Type")
            self._reader = self._create_reader()
            if not self._request.stream or "json" in (self._content_type or ""):
                return await self._read_complete(self._response, self._reader)
        assert self._reader is not None
        return await self._read_streamed(self._response, self._reader)

    def _create_reader(self) -> ReplyReader:
        emit_deltas = self._translated and self._request.stream
        if self._dialect == "messages":
            return messages.MessagesReader(emit_deltas=emit_deltas)
        if self._dialect == "responses":
            return responses.ResponsesReader(emit_deltas=emit_deltas)
        return chat.ChatReader(self._request.n, emit_deltas=emit_deltas, has_token_ids=self._has_token_ids)

    async def _read_complete(self, response: HttpResponse, reader: ReplyReader) -> UpstreamChunk:
        try:
            body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable_error(error) from error
        try:
            reader.read(body)
            raw = rewrite.strip_added_fields(body, self._added_fields) if self._added_fields else body
        except _DECODE_ERRORS as error:
            raise _unreadable_error(error) from error
        if self._translated:
            return UpstreamChunk(b"", reader.take_deltas(), reader.choices())
        return UpstreamChunk(raw, (), reader.choices(), self._content_type, reader.response_id)

    async def _read_streamed(self, response: HttpResponse, reader: ReplyReader) -> UpstreamChunk:
        while True:
            if self._failure is not None:
                raise self._failure
            if not (data := await _read_more(response, reader)):
                return self._last_chunk(reader)
            raw = self._read_events(self._splitter.feed(data), reader)
            deltas = reader.take_deltas()
            if raw or deltas:
                content_type, self._content_type = self._content_type, None
                return UpstreamChunk(raw, deltas, content_type=content_type)

    def _read_events(self, events: Iterable[ServerSentEvent], reader: ReplyReader) -> bytes:
        """Read the events, and return the bytes that may be passed on: those before the first event that
        announces the end of the response. The other events are held until the call is recorded."""
        passed: list[bytes] = []
        try:
            for event in events:
                if event.data:
                    reader.feed(event.data)
                if not self._translated:
                    (self._held if reader.has_ended else passed).append(self._strip_event(event))
        except UpstreamError as error:
            self._failure = error
        except _DECODE_ERRORS as error:
            self._failure = _unreadable_error(error)
        return b"".join(passed)

    def _strip_event(self, event: ServerSentEvent) -> bytes:
        if not self._added_fields or not event.data.startswith(b"{"):
            return event.raw
        return b"data: " + rewrite.strip_added_fields(event.data, self._added_fields) + b"\n\n"

    def _last_chunk(self, reader: ReplyReader) -> UpstreamChunk:
        if rest := self._splitter.flush():
            self._held.append(self._read_events([rest], reader))
        if self._failure is not None:
            raise self._failure
        if not reader.is_complete:
            raise EngineUnavailable("the provider's response broke off")
        raw, deltas = b"".join(self._held), reader.take_deltas()
        response_id = None if self._translated else reader.response_id
        return UpstreamChunk(raw, deltas, reader.choices(), self._content_type, response_id)


async def _read_more(response: HttpResponse, reader: ReplyReader) -> bytes:
    """Return the bytes that have arrived, or no bytes after the end. A provider may send its last event and
    keep the connection open, so after that event the wait for the end is short."""
    try:
        if not reader.is_done:
            return await response.content.readany()
        async with asyncio.timeout(_STREAM_END_SECONDS):
            return await response.content.readany()
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        if not reader.is_complete:
            raise EngineUnavailable(f"the provider's response broke off: {error}") from error
        return b""


# --- errors -------------------------------------------------------------------------------------


async def read_error(response: HttpResponse) -> UpstreamError:
    if 300 <= response.status < 400:
        location = response.headers.get("Location", "another address")
        return UpstreamError(502, f"The provider redirects to {location}; correct its base_url.")
    try:
        raw = await response.read()
    except (aiohttp.ClientError, OSError):
        raw = b""  # the status is enough
    seconds = parse_retry_after(response.headers.get("Retry-After"))
    retry_after = None if seconds is None else math.ceil(seconds)
    return parse_error(raw, max(response.status, 400), retry_after, response.headers.get("Content-Type"))


def unreachable_error(error: Exception) -> EngineUnavailable:
    return EngineUnavailable(f"the provider cannot be reached: {error or type(error).__name__}")


def _unreadable_error(error: Exception) -> UpstreamError:
    return UpstreamError(502, f"The provider's response cannot be read: {error}", code="bad_gateway")
