"""A teacher behind an OpenAI-compatible ``/v1/completions`` endpoint that returns prompt logprobs in one of
the formats in `instar.reference.prompt_logprobs`. The first supported one is used."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import numpy as np

from instar.config import CompletionsReferenceConfig, ModelConfig
from instar.errors import ConfigError, EngineError, EngineUnavailable
from instar.http.client import HttpClient, NoResponse
from instar.http.retry import RetryPolicy
from instar.models import load_tokenizer, resolve_model
from instar.reference.base import PerSequenceReference
from instar.reference.prompt_logprobs import (
    FORMATS,
    PromptLogprobsFormat,
    PromptLogprobsUnsupported,
    ScoredPrompt,
)
from instar.types import Floats, Ids

RETRY_POLICY = RetryPolicy(first_delay=0.25, max_delay=8.0, jitter=(0.75, 1.25))
PROBE_TEXT = "The answer to 615 plus 278 is 893."


class RetryableResponse(Exception):
    """The response has status 429 or a server error. ``retry_after`` is the requested delay in seconds."""

    def __init__(self, message: str, retry_after: float | None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CompletionsReference(PerSequenceReference):
    def __init__(self, section: CompletionsReferenceConfig, model: ModelConfig, key: str | None) -> None:
        super().__init__(section.max_in_flight)
        self._section = section
        self._model = model
        self._url = f"{section.base_url.rstrip('/')}/completions"
        self._format: PromptLogprobsFormat | None = None
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._client = HttpClient(headers=headers, secret=key)

    async def start(self) -> None:
        """Find a supported format, and check that the server uses the model's vocabulary."""
        tokenizer: Any = await asyncio.to_thread(lambda: load_tokenizer(resolve_model(self._model.name)))
        ids = np.asarray(tokenizer.encode(PROBE_TEXT, add_special_tokens=False), np.int32)
        failures: list[str] = []
        for name, candidate in FORMATS.items():
            try:
                scored = await self._score_prompt(candidate, ids)
            except PromptLogprobsUnsupported as error:
                failures.append(f"{name}: {error}")
                continue
            self._check_vocabulary(scored, ids, tokenizer)
            self._format = candidate
            return
        raise ConfigError(
            f"trainer.reference.base_url: {self._url} does not return the logprobs of token ids in any "
            f"supported format ({', '.join(failures)}); use a server such as vLLM"
        )

    def _check_vocabulary(self, scored: ScoredPrompt, ids: Ids, tokenizer: Any) -> None:
        for token, text in zip(ids.tolist(), scored.texts, strict=True):
            expected: str = tokenizer.decode([token])
            # Whitespace is not compared, because servers treat the whitespace around a token differently.
            if text is not None and expected.isascii() and expected.strip() != text.strip():
                raise ConfigError(
                    f"trainer.reference.model: the vocabulary of {self._section.model} differs from "
                    f"{self._model.name}: token {token} is {text!r} instead of {expected!r}; "
                    "choose a teacher with the same vocabulary"
                )

    async def score(self, token_ids: Ids) -> Floats:
        if self._format is None:
            await self.start()
        assert self._format is not None
        try:
            return (await self._score_prompt(self._format, token_ids)).logprobs
        except PromptLogprobsUnsupported as error:
            raise EngineError(f"the teacher at {self._url} did not score a sample: {error}") from error

    async def close(self) -> None:
        await self._client.close()

    async def _score_prompt(self, logprobs_format: PromptLogprobsFormat, ids: Ids) -> ScoredPrompt:
        """Score a prompt. Raises PromptLogprobsUnsupported if the server does not support this format."""
        body = {"model": self._section.model, "prompt": ids.tolist(), "temperature": 0}
        response = await self._post(msgspec.json.encode(body | logprobs_format.request_fields))
        return logprobs_format.parse(response, ids)

    async def _post(self, body: bytes) -> Any:
        timeout = self._section.timeout
        deadline = time.monotonic() + timeout
        try:
            return await RETRY_POLICY.run(
                lambda: self._attempt(body, deadline - time.monotonic()),
                retry_on=(NoResponse, RetryableResponse),
                seconds=timeout,
            )
        except (NoResponse, RetryableResponse) as error:
            raise EngineUnavailable(
                f"the teacher at {self._url} is still unavailable after {timeout:g} s "
                f"(trainer.reference.timeout): {error}"
            ) from error

    async def _attempt(self, body: bytes, timeout: float) -> Any:
        response = await self._client.post(self._url, body, timeout=timeout)
        excerpt = self._client.redact(response.excerpt())
        if response.status == 429 or response.status >= 500:
            raise RetryableResponse(f"{response.status}: {excerpt}", response.retry_after)
        if response.status in (400, 422):
            raise PromptLogprobsUnsupported(f"{response.status}: {excerpt}")
        if response.status != 200:
            raise EngineError(f"the teacher at {self._url} responded with {response.status}: {excerpt}")
        try:
            return msgspec.json.decode(response.body)
        except msgspec.DecodeError as error:
            raise EngineError(f"the teacher at {self._url} did not return JSON: {excerpt}") from error
