"""One reply on its way from vLLM, each token stamped with the version that sampled it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any

import aiohttp

from instar.engines.vllm.client import VllmClient, response_error
from instar.engines.vllm.wire import Choice, Usage, choice_logprobs, decode_event
from instar.errors import EngineUnavailable
from instar.http.plain import PlainResponse
from instar.types import FinishReason, SamplingParams, TokenChunk

FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
END_SECONDS = 10.0
"""For the words behind the last token."""


class VllmReply:
    """``version`` tells what is served at the moment. ``fence`` is called at every change of that, when all
    that was sampled before has come."""

    def __init__(
        self,
        response: PlainResponse,
        params: SamplingParams,
        *,
        client: VllmClient,
        version: Callable[[], int],
        end_ids: Collection[int],
        tokenizer: Any,
    ) -> None:
        """``ends``: ids that end a reply."""
        self._response = response
        self._params = params
        self._client = client
        self._version = version
        self._ends = end_ids
        self._tokenizer = tokenizer
        self._rest = b""
        self._read = 0
        """Bytes that were taken apart, in whole events."""
        self._older: deque[tuple[int, int]] = deque()
        """(so many bytes from the start, the version that they are of)"""
        self._ids: list[int] = []
        self._stamps: list[int] = []
        self.usage: Usage | None = None
        self.mislabelled_tokens = 0
        """Tokens that another version has sampled than was said, as vLLM from 0.27 on tells at the end."""

    @property
    def received_bytes(self) -> int:
        return self._response.received

    def mark_version(self, version: int) -> None:
        """What has come until now was sampled by this version."""
        self._older.append((self._response.received, version))

    def abort(self) -> None:
        self._response.close()

    async def chunks(self) -> AsyncGenerator[TokenChunk, None]:
        """Closing it gives the request up."""
        last: TokenChunk | None = None
        try:
            while last is None:
                chunk = self._chunk(await self._some())
                if chunk is not None and chunk.finish_reason is not None:
                    last = chunk
                elif chunk is not None:
                    yield chunk
            # To its end, so that the connection can be used again.
            async with asyncio.timeout(END_SECONDS):
                while data := await self._response.readany():
                    self._chunk(data)
            yield last
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if last is not None:
                yield last
            else:
                raise self._client.unreachable_error(error) from error
        finally:
            self._response.close()

    async def _some(self) -> bytes:
        if data := await self._response.readany():
            return data
        raise EngineUnavailable(f"the vLLM server at {self._client.url} broke off in the middle of a reply")

    def _chunk(self, data: bytes) -> TokenChunk | None:
        """All tokens of the events that are whole by now."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finish: FinishReason | None = None
        stop: str | None = None
        for text in events:
            self._read += len(text) + 2
            if not text.startswith(b"data: {"):
                continue  # [DONE]
            event = decode_event(text[6:])
            if event.error is not None:
                raise response_error(int(event.error.get("code") or 500), text[6:])
            self.usage = event.usage or self.usage
            for choice in event.choices:
                new = choice.token_ids or []
                ids += new
                logprobs += choice_logprobs(choice) if new else []
                versions += [self._stamp()] * len(new)
                if choice.finish_reason is not None:
                    finish, stop = self._finish(choice, [*self._ids, *ids])
                    self._compare(choice, [*self._stamps, *versions])
        self._stamps += versions
        if self._params.stop:
            self._ids += ids
        if not ids and finish is None:
            return None
        return TokenChunk(ids, logprobs, versions, self._behavior(len(ids)), finish, stop)

    def _stamp(self) -> int:
        while self._older and self._read > self._older[0][0]:
            self._older.popleft()
        return self._older[0][1] if self._older else self._version()

    def _compare(self, choice: Choice, stamps: list[int]) -> None:
        for span in choice.weight_versions or []:
            if span.version.isdigit():
                told = int(span.version)
                self.mislabelled_tokens += sum(stamp != told for stamp in stamps[span.start : span.end])

    def _behavior(self, count: int) -> list[float] | None:
        """A greedy token was certain; of another distribution than the full softmax vLLM tells nothing."""
        if not self._params.modifies_distribution:
            return None
        return [0.0 if self._params.temperature == 0 else math.nan] * count

    def _finish(self, choice: Choice, ids: list[int]) -> tuple[FinishReason, str | None]:
        assert choice.finish_reason is not None
        finish = FINISHES.get(choice.finish_reason)
        if finish is None:
            raise EngineUnavailable(f"vLLM gave the request up: {choice.finish_reason}")
        if finish == "length" or not self._params.stop:
            return finish, None
        if isinstance(choice.stop_reason, str):
            return finish, choice.stop_reason
        return finish, None if ids[-1] in self._ends else self._stop_string(ids)

    def _stop_string(self, ids: list[int]) -> str | None:
        """The one that the reply has come to, where vLLM does not say."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        found = [(text.find(stop), stop) for stop in self._params.stop if stop in text]
        return min(found)[1] if found else None
