"""A reply streamed from vLLM, with the policy version of each token."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass
from typing import Any

import aiohttp

from instar.engines.stopping import find_stop_string
from instar.engines.vllm.client import VllmClient, response_error
from instar.engines.vllm.wire import Choice, Usage, decode_event, get_logprobs
from instar.errors import EngineUnavailable
from instar.http.plain import PlainResponse
from instar.types import FinishReason, SamplingParams, TokenChunk

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
USAGE_TIMEOUT_SECONDS = 10.0
"""The timeout for the events after the last token."""


@dataclass(eq=False)
class VllmReply:
    """A reply that is being received from vLLM. ``get_version`` returns the served version. When it changes,
    call ``mark_version`` with the old version once all tokens of that version have arrived."""

    response: PlainResponse
    params: SamplingParams
    client: VllmClient
    get_version: Callable[[], int]
    end_ids: Collection[int]
    tokenizer: Any

    def __post_init__(self) -> None:
        self._unread = b""
        self._parsed_bytes = 0
        self._version_marks: deque[tuple[int, int]] = deque()
        """For each version change, the number of bytes received before it and the old version."""
        self._ids: list[int] = []
        self._versions: list[int] = []
        self.usage: Usage | None = None
        self.mislabelled_tokens = 0
        """The number of tokens whose version differs from the version that vLLM (0.27 and later) reports."""

    @property
    def received_bytes(self) -> int:
        return self.response.received

    def mark_version(self, version: int) -> None:
        self._version_marks.append((self.response.received, version))

    def abort(self) -> None:
        self.response.close()

    async def stream_chunks(self) -> AsyncGenerator[TokenChunk, None]:
        last: TokenChunk | None = None
        try:
            while last is None:
                data = await self.response.readany()
                if not data:
                    url = self.client.url
                    raise EngineUnavailable(f"The vLLM server at {url} closed the connection during a reply.")
                chunk = self._parse(data)
                if chunk is not None and chunk.finish_reason is not None:
                    last = chunk
                elif chunk is not None:
                    yield chunk
            # Read the rest of the response, so that the connection can be reused.
            async with asyncio.timeout(USAGE_TIMEOUT_SECONDS):
                while data := await self.response.readany():
                    self._parse(data)
            yield last
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if last is not None:
                yield last
            else:
                raise self.client.connection.unavailable_error(error) from error
        finally:
            self.response.close()

    def _parse(self, data: bytes) -> TokenChunk | None:
        *events, self._unread = (self._unread + data).split(b"\n\n")
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finish: FinishReason | None = None
        stop: str | None = None
        for text in events:
            self._parsed_bytes += len(text) + 2
            if not text.startswith(b"data: {"):
                continue  # [DONE]
            event = decode_event(text[6:])
            if event.error is not None:
                raise response_error(int(event.error.get("code") or 500), text[6:])
            self.usage = event.usage or self.usage
            for choice in event.choices:
                new_ids = choice.token_ids or []
                ids += new_ids
                logprobs += get_logprobs(choice) if new_ids else []
                versions += [self._current_version()] * len(new_ids)
                if choice.finish_reason is not None:
                    finish, stop = self._read_finish_reason(choice, [*self._ids, *ids])
                    self._count_mislabelled(choice, [*self._versions, *versions])
        self._versions += versions
        if self.params.stop:
            self._ids += ids
        if not ids and finish is None:
            return None
        behavior = None
        if self.params.modifies_distribution:
            # vLLM reports only logprobs of the full softmax, so the modified logprobs are unknown.
            behavior = [0.0 if self.params.temperature == 0 else math.nan] * len(ids)
        return TokenChunk(ids, logprobs, versions, behavior, finish, stop)

    def _current_version(self) -> int:
        while self._version_marks and self._parsed_bytes > self._version_marks[0][0]:
            self._version_marks.popleft()
        return self._version_marks[0][1] if self._version_marks else self.get_version()

    def _count_mislabelled(self, choice: Choice, versions: list[int]) -> None:
        for span in choice.weight_versions or []:
            if span.version.isdigit():
                actual = int(span.version)
                self.mislabelled_tokens += sum(
                    version != actual for version in versions[span.start : span.end]
                )

    def _read_finish_reason(self, choice: Choice, ids: list[int]) -> tuple[FinishReason, str | None]:
        assert choice.finish_reason is not None
        finish = FINISH_REASONS.get(choice.finish_reason)
        if finish is None:
            raise EngineUnavailable(f"vLLM aborted the request: {choice.finish_reason}")
        if finish == "length" or not self.params.stop:
            return finish, None
        if isinstance(choice.stop_reason, str):
            return finish, choice.stop_reason
        if ids[-1] in self.end_ids:
            return finish, None
        # vLLM before 0.27 does not report which stop string ended the reply.
        return finish, find_stop_string(
            self.tokenizer.decode(ids, skip_special_tokens=False), self.params.stop
        )
