"""A provider's answer: passed on as it comes and read on the side, or translated."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from email.utils import parsedate_to_datetime
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

if TYPE_CHECKING:
    from instar.http.plain import PlainResponse

HttpResponse: TypeAlias = "aiohttp.ClientResponse | PlainResponse"
Post = Callable[[], Awaitable["HttpResponse"]]
"""Sends the request."""

# From the last event of a stream to its end. Waiting for that lets the connection be used again.
_HANG_UP_SECONDS = 1.0

_Unreadable = (msgspec.DecodeError, UnicodeDecodeError)


class HttpUpstreamResponse(UpstreamResponse):
    """``dialect``: what the provider speaks. ``unasked``: set when token ids were asked for."""

    def __init__(
        self,
        post: Post,
        request: ModelRequest,
        dialect: str,
        *,
        translated: bool,
        unasked: AddedFields | None,
    ) -> None:
        self._post = post
        self._request = request
        self._dialect = dialect
        self._translated = translated
        self._exact = unasked is not None
        self._unasked = unasked or AddedFields(token_ids=False, logprobs=False)
        self._response: HttpResponse | None = None
        self._reader: ReplyReader | None = None
        self._splitter = EventSplitter()
        self._held: list[bytes] = []
        self._content_type: str | None = None
        self._failure: UpstreamError | None = None
        self._over = False

    async def __anext__(self) -> UpstreamChunk:
        if self._over:
            raise StopAsyncIteration
        try:
            piece = await self._next()
        except UpstreamError as error:
            self._close()
            if self._translated:
                error.raw, error.content_type = b"", None
            raise
        except BaseException:  # cancelled too: the connection is not to be used again
            self._close()
            raise
        if piece.choices is not None:
            self._close()
        return piece

    async def aclose(self) -> None:
        self._close()

    def _close(self) -> None:
        self._over = True
        if self._response is not None and not self._response.closed:
            self._response.close()

    def partial_choices(self) -> list[ReplyChoice]:
        return self._reader.partial_choices() if self._reader else []

    async def _next(self) -> UpstreamChunk:
        if self._response is None:
            self._response = await self._post()
            if not 200 <= self._response.status < 300:
                raise await read_error(self._response)
            self._content_type = self._response.headers.get("Content-Type")
            self._reader = self._new_reader()
            if not self._request.stream or "json" in (self._content_type or ""):
                return await self._whole(self._response, self._reader)
        assert self._reader is not None
        return await self._streamed(self._response, self._reader)

    # --- not streamed -----------------------------------------------------------------------------

    async def _whole(self, response: HttpResponse, reader: ReplyReader) -> UpstreamChunk:
        try:
            body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable_error(error) from error
        try:
            reader.read(body)
            raw = rewrite.strip_added_fields(body, self._unasked) if self._unasked else body
        except _Unreadable as error:
            raise _unreadable(error) from error
        if self._translated:
            return UpstreamChunk(b"", reader.take_deltas(), reader.choices())
        return UpstreamChunk(raw, (), reader.choices(), self._content_type, reader.response_id)

    # --- streamed ---------------------------------------------------------------------------------

    def _new_reader(self) -> ReplyReader:
        aloud = self._translated and self._request.stream
        if self._dialect == "messages":
            return messages.MessagesReader(emit_deltas=aloud)
        if self._dialect == "responses":
            return responses.ResponsesReader(emit_deltas=aloud)
        return chat.ChatReader(self._request.n, emit_deltas=aloud, exact=self._exact)

    async def _streamed(self, response: HttpResponse, reader: ReplyReader) -> UpstreamChunk:
        while True:
            if self._failure is not None:
                raise self._failure
            if not (chunk := await _more(response, reader)):
                return self._last(reader)
            raw = self._take(self._splitter.feed(chunk), reader)
            deltas = reader.take_deltas()
            if raw or deltas:
                content_type, self._content_type = self._content_type, None
                return UpstreamChunk(raw, deltas, content_type=content_type)

    def _take(self, events: Iterable[ServerSentEvent], reader: ReplyReader) -> bytes:
        """Read the events; those up to the first that says the answer has ended may be passed on."""
        passed: list[bytes] = []
        try:
            for event in events:
                if event.data:
                    reader.feed(event.data)
                if not self._translated:
                    (self._held if reader.has_ended else passed).append(self._shown(event))
        except UpstreamError as error:
            self._failure = error
        except _Unreadable as error:
            self._failure = _unreadable(error)
        return b"".join(passed)

    def _shown(self, event: ServerSentEvent) -> bytes:
        if not self._unasked or not event.data.startswith(b"{"):
            return event.raw
        return b"data: " + rewrite.strip_added_fields(event.data, self._unasked) + b"\n\n"

    def _last(self, reader: ReplyReader) -> UpstreamChunk:
        if rest := self._splitter.flush():
            self._held.append(self._take([rest], reader))
        if self._failure is not None:
            raise self._failure
        if not reader.is_complete:
            raise EngineUnavailable("the provider's answer broke off")
        raw, deltas = b"".join(self._held), reader.take_deltas()
        answer_id = None if self._translated else reader.response_id
        return UpstreamChunk(raw, deltas, reader.choices(), self._content_type, answer_id)


async def _more(response: HttpResponse, reader: ReplyReader) -> bytes:
    """What has come since. Nothing, when it is over: by the provider's word, if not by its hanging up."""
    try:
        if not reader.is_done:
            return await response.content.readany()
        async with asyncio.timeout(_HANG_UP_SECONDS):
            return await response.content.readany()
    except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
        if not reader.is_complete:
            raise EngineUnavailable(f"the provider's answer broke off: {error}") from error
        return b""


# --- errors -------------------------------------------------------------------------------------


async def read_error(response: HttpResponse) -> UpstreamError:
    if 300 <= response.status < 400:
        where = response.headers.get("Location", "elsewhere")
        return UpstreamError(502, f"The provider redirects to {where}: correct its base_url.")
    try:
        raw = await response.read()
    except (aiohttp.ClientError, OSError):
        raw = b""  # its status says enough
    retry_after = _retry_after(response.headers.get("Retry-After"))
    return parse_error(raw, max(response.status, 400), retry_after, response.headers.get("Content-Type"))


def _retry_after(header: str | None) -> int | None:
    """Seconds, or a date."""
    if not header:
        return None
    try:
        return max(0, math.ceil(float(header)))
    except ValueError:
        pass
    try:
        return max(0, math.ceil(parsedate_to_datetime(header).timestamp() - time.time()))
    except ValueError:
        return None


def unreachable_error(error: Exception) -> EngineUnavailable:
    return EngineUnavailable(f"the provider cannot be reached: {error or type(error).__name__}")


def _unreadable(error: Exception) -> UpstreamError:
    return UpstreamError(502, f"The provider's answer cannot be read: {error}", code="bad_gateway")
