"""Read providers' HTTP responses, to record them and to pass them on or translate them."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import aiohttp
import msgspec

from instar.errors import EngineUnavailable
from instar.gateway.dialects.base import ModelRequest, ReplyChoice
from instar.gateway.upstream import chat, messages, responses, rewrite
from instar.gateway.upstream.base import UpstreamChunk, UpstreamError
from instar.gateway.upstream.replies import ReplyReader, parse_error
from instar.gateway.upstream.rewrite import AddedFields
from instar.http.retry import parse_retry_after

if TYPE_CHECKING:
    from instar.http.plain import PlainResponse

HttpResponse: TypeAlias = "aiohttp.ClientResponse | PlainResponse"
SendRequest = Callable[[], Awaitable["HttpResponse"]]

# How long to wait for the end of a stream after its last event, so that the connection can be reused.
_STREAM_END_TIMEOUT_SECONDS = 1.0
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError)


class HttpUpstreamResponse:
    """One response from a provider.

    ``chunks`` raises UpstreamError if the response is an error or cannot be parsed, and EngineUnavailable if
    the provider cannot be reached or closes the connection before the end of the response.
    """

    def __init__(
        self,
        send: SendRequest,
        request: ModelRequest,
        dialect: str,
        *,
        is_translated: bool,
        added_fields: AddedFields | None,
    ) -> None:
        """Create a response in the given dialect. ``added_fields`` is None if no token ids were requested."""
        self._send = send
        self._request = request
        self._is_translated = is_translated
        self._added_fields = added_fields or AddedFields(has_token_ids=False, has_logprobs=False)
        emit_deltas = is_translated and request.stream
        self._reader: ReplyReader
        if dialect == "messages":
            self._reader = messages.MessagesReader(emit_deltas=emit_deltas)
        elif dialect == "responses":
            self._reader = responses.ResponsesReader(emit_deltas=emit_deltas)
        else:
            has_token_ids = added_fields is not None
            self._reader = chat.ChatReader(request.n, emit_deltas=emit_deltas, has_token_ids=has_token_ids)
        self._splitter = EventSplitter()
        self._held_events: list[bytes] = []
        self._failure: UpstreamError | None = None
        self.chunks = self._read_chunks()

    def partial_choices(self) -> list[ReplyChoice]:
        """Return the partial replies, all ``aborted``, or an empty list if nothing was received."""
        return self._reader.partial_choices()

    async def _read_chunks(self) -> AsyncGenerator[UpstreamChunk]:
        response = None
        try:
            response = await self._send()
            if not 200 <= response.status < 300:
                raise await read_error(response)
            content_type = response.headers.get("Content-Type")
            if not self._request.stream or "json" in (content_type or ""):
                yield await self._read_complete(response, content_type)
                return
            while data := await _read_more(response, self._reader):
                raw = self._read_events(self._splitter.feed(data))
                if raw or self._reader.deltas:
                    yield UpstreamChunk(raw, self._reader.take_deltas(), content_type=content_type)
                    content_type = None
                if self._failure is not None:
                    raise self._failure
            yield self._build_last_chunk(content_type)
        except UpstreamError as error:
            if self._is_translated:
                error.raw, error.content_type = b"", None
            raise
        finally:
            # The connection of a response that was not read completely must not be reused.
            if response is not None and not response.closed:
                response.close()

    async def _read_complete(self, response: HttpResponse, content_type: str | None) -> UpstreamChunk:
        reader = self._reader
        try:
            body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise interrupted_error(error) from error
        try:
            reader.read(body)
            raw = rewrite.strip_added_fields(body, self._added_fields) if self._added_fields else body
        except _DECODE_ERRORS as error:
            raise _unreadable_error(error) from error
        if self._is_translated:
            return UpstreamChunk(b"", reader.take_deltas(), reader.choices())
        return UpstreamChunk(raw, (), reader.choices(), content_type, reader.response_id)

    def _read_events(self, events: Iterable[ServerSentEvent]) -> bytes:
        """Read the events and return the bytes that may be passed on. The first event that announces the end
        of the response and all later events are held back until the call is recorded."""
        forwarded: list[bytes] = []
        try:
            for event in events:
                if event.data:
                    self._reader.feed(event.data)
                if not self._is_translated:
                    raw = event.raw
                    if self._added_fields and event.data.startswith(b"{"):
                        stripped = rewrite.strip_added_fields(event.data, self._added_fields)
                        raw = b"data: " + stripped + b"\n\n"
                    (self._held_events if self._reader.has_seen_end else forwarded).append(raw)
        except UpstreamError as error:
            self._failure = error
        except _DECODE_ERRORS as error:
            self._failure = _unreadable_error(error)
        return b"".join(forwarded)

    def _build_last_chunk(self, content_type: str | None) -> UpstreamChunk:
        reader = self._reader
        if rest := self._splitter.flush():
            self._held_events.append(self._read_events([rest]))
        if self._failure is not None:
            raise self._failure
        if not reader.can_end:
            raise EngineUnavailable("the provider closed the connection before the end of its response")
        raw, deltas = b"".join(self._held_events), reader.take_deltas()
        response_id = None if self._is_translated else reader.response_id
        return UpstreamChunk(raw, deltas, reader.choices(), content_type, response_id)


async def _read_more(response: HttpResponse, reader: ReplyReader) -> bytes:
    """Return the next bytes, or ``b""`` at the end of the stream. After the last event, wait only briefly,
    because some providers keep the connection open."""
    try:
        if not reader.is_exhausted:
            return await response.content.readany()
        async with asyncio.timeout(_STREAM_END_TIMEOUT_SECONDS):
            return await response.content.readany()
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        if not reader.can_end:
            raise interrupted_error(error) from error
        return b""


async def read_error(response: HttpResponse) -> UpstreamError:
    if 300 <= response.status < 400:
        location = response.headers.get("Location", "another address")
        return UpstreamError(502, f"The provider redirects to {location}; change its base_url accordingly.")
    try:
        raw = await response.read()
    except (aiohttp.ClientError, OSError):
        raw = b""  # The status is reported without the body.
    seconds = parse_retry_after(response.headers.get("Retry-After"))
    retry_after = None if seconds is None else math.ceil(seconds)
    return parse_error(raw, max(response.status, 400), retry_after, response.headers.get("Content-Type"))


def interrupted_error(error: Exception) -> EngineUnavailable:
    reason = str(error) or type(error).__name__
    return EngineUnavailable(f"the connection failed before the end of the provider's response: {reason}")


def _unreadable_error(error: Exception) -> UpstreamError:
    return UpstreamError(502, f"The provider's response cannot be read: {error}", code="bad_gateway")


# An event ends with two line breaks in a row. A line break is \r\n, \n or \r; \r\n counts as one.
_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class ServerSentEvent(NamedTuple):
    raw: bytes
    """All bytes of the event, including its blank line."""
    data: bytes
    """The data of the event; empty for a comment."""


class EventSplitter:
    """Splits a byte stream, which arrives in pieces of any size, into server-sent events."""

    def __init__(self) -> None:
        self._rest = b""
        self._search_start = 0  # No event ends before this offset in the rest.

    def feed(self, piece: bytes) -> Iterator[ServerSentEvent]:
        stream = self._rest + piece if self._rest else piece
        start = 0
        for end in _EVENT_END.finditer(stream, self._search_start):
            raw = stream[start : end.end()]
            start = end.end()
            yield ServerSentEvent(raw, _extract_data(raw))
        self._rest = stream[start:]
        self._search_start = max(0, len(self._rest) - 3)

    def flush(self) -> ServerSentEvent | None:
        """Return the incomplete event at the end of the stream. Some servers omit the last blank line."""
        raw, self._rest, self._search_start = self._rest, b"", 0
        return ServerSentEvent(raw, _extract_data(raw)) if raw else None


def _extract_data(raw: bytes) -> bytes:
    if raw.startswith(b"data: ") and raw.count(b"\n") == 2 and raw.endswith(b"\n\n") and b"\r" not in raw:
        return raw[6:-2]
    lines = [line for line in _LINE_END.split(raw) if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
