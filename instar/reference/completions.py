"""A teacher behind an OpenAI-compatible ``/v1/completions`` that takes token ids and tells their logprobs.

Servers tell them in one way or another (`instar.reference.prompt_logprobs`): the first that works is kept to.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import Any

import aiohttp
import msgspec
import numpy as np

from instar.config import CompletionsReferenceConfig, ModelConfig
from instar.errors import ConfigError, EngineError, EngineUnavailable
from instar.models import load_tokenizer, resolve_model
from instar.reference.base import PerSequenceReference
from instar.reference.prompt_logprobs import (
    FORMATS,
    PromptLogprobsFormat,
    PromptLogprobsUnsupported,
    ScoredPrompt,
)
from instar.types import Floats, Ids

FIRST_PAUSE = 0.25
MAX_PAUSE = 8.0
PROBE_TEXT = "The answer to 615 plus 278 is 893."


class CompletionsReference(PerSequenceReference):
    def __init__(self, section: CompletionsReferenceConfig, model: ModelConfig, key: str | None) -> None:
        super().__init__(section.max_in_flight)
        self._section = section
        self._model = model
        self._key = key
        self._url = f"{section.base_url.rstrip('/')}/completions"
        self._form: PromptLogprobsFormat | None = None
        self._client: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Find out how it tells logprobs, and whether it reads ids as the model does."""
        tokenizer: Any = await asyncio.to_thread(lambda: load_tokenizer(resolve_model(self._model.name)))
        ids = np.asarray(tokenizer.encode(PROBE_TEXT, add_special_tokens=False), np.int32)
        refused: list[str] = []
        for form in FORMATS:
            try:
                answer = await self._ask(form, ids)
            except PromptLogprobsUnsupported as error:
                refused.append(f"{form.name}: {error}")
                continue
            self._compare(answer, ids, tokenizer)
            self._form = form
            return
        raise ConfigError(
            f"trainer.reference.base_url: {self._url} does not tell the logprobs of a prompt of token ids "
            f"({'; '.join(refused)})"
        )

    def _compare(self, answer: ScoredPrompt, ids: Ids, tokenizer: Any) -> None:
        """Texts are compared without the blanks around them, which servers treat differently."""
        for token, text in zip(ids.tolist(), answer.texts, strict=True):
            here: str = tokenizer.decode([token])
            if text is not None and here.isascii() and here.strip() != text.strip():
                raise ConfigError(
                    f"trainer.reference.model: {self._section.model} has another vocabulary than "
                    f"{self._model.name}: token {token} is {here!r} here and {text!r} there"
                )

    async def score(self, token_ids: Ids) -> Floats:
        if self._form is None:
            await self.start()
        assert self._form is not None
        try:
            return (await self._ask(self._form, token_ids)).logprobs
        except PromptLogprobsUnsupported as error:
            raise EngineError(f"the teacher at {self._url} does not score a sample: {error}") from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    # --- one request -------------------------------------------------------------------------------

    async def _ask(self, form: PromptLogprobsFormat, ids: Ids) -> ScoredPrompt:
        """Raise PromptLogprobsUnsupported if the server rejects this format or omits the logprobs."""
        body = {"model": self._section.model, "prompt": ids.tolist(), "temperature": 0}
        return form.read(await self._post(msgspec.json.encode(body | form.asks)), ids)

    async def _post(self, body: bytes) -> Any:
        """Tries again, ever more slowly, until the deadline."""
        deadline = time.monotonic() + self._section.timeout
        pause = FIRST_PAUSE
        while True:
            try:
                wait = await self._attempt(body, deadline - time.monotonic())
                if not isinstance(wait, RetryLater):
                    return wait
                reason, pause = wait.reason, max(pause, wait.seconds)
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            pause *= random.uniform(0.75, 1.25)
            if time.monotonic() + pause > deadline:
                raise EngineUnavailable(
                    f"the teacher at {self._url} did not answer within {self._section.timeout:g} s: "
                    f"{self._hidden(reason)}"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    async def _attempt(self, body: bytes, seconds: float) -> Any:
        async with self._session().post(
            self._url, data=body, timeout=aiohttp.ClientTimeout(total=max(0.001, seconds))
        ) as response:
            content = await response.read()
        told = self._hidden(content[:300].decode(errors="replace"))
        if response.status == 429 or response.status >= 500:
            return RetryLater(f"{response.status}: {told}", _retry_after(response))
        if response.status in (400, 422):
            raise PromptLogprobsUnsupported(f"{response.status}: {told}")
        if response.status != 200:
            raise EngineError(f"the teacher at {self._url} answered {response.status}: {told}")
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise EngineError(f"the teacher at {self._url} answered no JSON: {told}") from error

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            headers = {"Content-Type": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            self._client = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))
        return self._client

    def _hidden(self, text: str) -> str:
        """Servers quote the key they refuse."""
        return text.replace(self._key, "...") if self._key else text


class RetryLater:
    """Come again, at the earliest after so many seconds."""

    def __init__(self, reason: str, seconds: float) -> None:
        self.reason = reason
        self.seconds = seconds


def _retry_after(response: aiohttp.ClientResponse) -> float:
    try:
        seconds = float(response.headers.get("Retry-After", "0"))
    except ValueError:  # a date
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
