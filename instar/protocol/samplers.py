"""Sampling policies: local engines over one copy of the base weights, each with one adapter at a time."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from instar.config import LocalEngineConfig, ModelConfig
from instar.engines.base import EngineInfo
from instar.engines.checks import check_request, check_score_request, to_ids
from instar.engines.local.engine import LocalEngine, default_kv_tokens
from instar.engines.local.model import EngineModel
from instar.errors import EngineError
from instar.models import load_tokenizer
from instar.protocol.base import ProtocolError, SampledSequence
from instar.types import Artifact, Floats, Ids, Policy, SamplingParams

ENGINE_WAIT_SECONDS = 600.0
"""Seconds to wait for an engine when all are sampling from other policies."""
BASE = ""
"""The key of the base model."""


@dataclass(eq=False, slots=True)
class _PooledEngine:
    engine: LocalEngine
    users: int = 0
    broken: bool = False


class SamplerPool:
    """At most ``most`` engines. A policy that no engine has takes the seat of the one unused longest, which
    costs the reading of an adapter. The engines at work divide the memory for keys and values among them; one
    that is at rest keeps what it has until another begins."""

    def __init__(self, model: ModelConfig, base: Any, *, most: int, threads: int | None) -> None:
        self._model = model
        self._weights = EngineModel(model, base)
        self._tokenizer: Any = load_tokenizer(self._weights.folder)
        self._most = most
        self.folder = self._weights.folder
        self.info = EngineInfo(
            kind="local",
            model=model.name,
            vocab_size=self._weights.vocab_size,
            max_context=self._weights.max_context,
            artifacts=("adapter", "base"),
        )
        context = self.info.max_context
        config = LocalEngineConfig(threads=threads)
        room = default_kv_tokens(self._weights.kv_shape, config.max_batch * context)
        self._kv_tokens = max(context, room)
        self._config = config.model_copy(update={"kv_tokens": self._kv_tokens})
        self._cores: int | None = None
        self._seats: OrderedDict[str, _PooledEngine] = OrderedDict()
        self._seating = asyncio.Lock()
        self._freed = asyncio.Event()
        self._loads = 0

    async def sample(
        self, key: str, adapter: Path | None, prompt: Sequence[int], params: SamplingParams, count: int
    ) -> list[SampledSequence]:
        """``key`` names the weights in ``adapter``: other weights, another key. The replies of a seeded
        request are drawn apart, and the first is the one that a request for one would get."""
        ids = self._checked(prompt, lambda ids: check_request(self.info, ids, params))
        async with self._engine(key, adapter) as engine:
            replies = [
                asyncio.create_task(self._reply(engine, ids, _nth_seed(params, index)))
                for index in range(count)
            ]
            try:
                return await asyncio.gather(*replies)
            finally:
                for reply in replies:
                    reply.cancel()

    async def logprobs(self, key: str, adapter: Path | None, tokens: Sequence[int]) -> Floats:
        ids = self._checked(tokens, lambda ids: check_score_request(self.info, ids))
        async with self._engine(key, adapter) as engine:
            return await engine.logprobs(ids)

    def _checked(self, tokens: Sequence[int], check: Callable[[Ids], None]) -> Ids:
        """What an engine refuses of a request is the client's mistake; later errors are ours."""
        try:
            ids = to_ids(tokens)
            check(ids)
        except EngineError as error:
            raise ProtocolError(str(error)) from error
        return ids

    def use_cores(self, count: int) -> None:
        self._cores = count
        for seat in self._seats.values():
            seat.engine.use_cores(count)

    async def close(self) -> None:
        seats = [*self._seats.values()]
        self._seats.clear()
        await asyncio.gather(*(seat.engine.close() for seat in seats))

    async def _reply(self, engine: LocalEngine, prompt: Ids, params: SamplingParams) -> SampledSequence:
        ids: list[int] = []
        logprobs: list[float] = []
        reason = ""
        async for chunk in engine.generate(prompt, params):
            ids.extend(chunk.token_ids)
            logprobs.extend(chunk.logprobs)
            reason = chunk.finish_reason or reason
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return SampledSequence(ids, logprobs, "stop" if reason == "stop" else "length", text)

    @asynccontextmanager
    async def _engine(self, key: str, adapter: Path | None) -> AsyncGenerator[LocalEngine]:
        """An engine with this policy, which nothing else is loaded into meanwhile."""
        seat = await self._take(key, adapter)
        try:
            yield seat.engine
        except EngineError:
            seat.broken = True
            raise
        finally:
            await self._leave(key, seat)

    async def _take(self, key: str, adapter: Path | None) -> _PooledEngine:
        try:
            async with asyncio.timeout(ENGINE_WAIT_SECONDS):
                if key not in self._seats:
                    await self._seat(key, adapter)
        except TimeoutError as error:
            raise ProtocolError("every sampler is in use: try again later", 503, "server") from error
        # From here to the next await nothing else runs, so the seat is not given away again.
        seat = self._seats[key]
        self._seats.move_to_end(key)
        seat.users += 1
        if seat.users == 1:
            self._begin()
        return seat

    def _begin(self) -> None:
        """One more is at work."""
        for seat in self._seats.values():
            if seat.users == 0:
                seat.engine.release_memory()
        self._divide_memory()

    def _divide_memory(self) -> None:
        at_work = [seat.engine for seat in self._seats.values() if seat.users]
        for engine in at_work:
            engine.set_kv_tokens(max(self.info.max_context, self._kv_tokens // len(at_work)))

    async def _seat(self, key: str, adapter: Path | None) -> None:
        """Those who need a seat come in turn."""
        async with self._seating:
            while key not in self._seats:
                if self._has_room():
                    self._seats[key] = await self._make(adapter)
                else:
                    self._freed.clear()
                    await self._freed.wait()

    async def _leave(self, key: str, seat: _PooledEngine) -> None:
        seat.users -= 1
        self._freed.set()
        if seat.broken:
            if self._seats.get(key) is seat:
                del self._seats[key]
            if seat.users == 0:
                await seat.engine.close()
        if seat.users == 0:
            self._divide_memory()

    def _has_room(self) -> bool:
        return len(self._seats) < self._most or any(seat.users == 0 for seat in self._seats.values())

    async def _make(self, adapter: Path | None) -> _PooledEngine:
        """A new seat, or the one unused longest; with the policy in place."""
        if len(self._seats) < self._most:
            seat = _PooledEngine(await asyncio.to_thread(self._new_engine))
        else:
            seat = self._seats.pop(next(key for key, seat in self._seats.items() if seat.users == 0))
        self._loads += 1
        artifact = Artifact("base") if adapter is None else Artifact("adapter", str(adapter))
        try:
            await seat.engine.load(Policy("sampler", self._loads, artifact))
        except BaseException:
            await seat.engine.close()
            raise
        return seat

    def _new_engine(self) -> LocalEngine:
        weights = self._weights.share()
        engine = LocalEngine(self._model, self._config, tokenizer=self._tokenizer, weights=weights)
        if self._cores is not None:
            engine.use_cores(self._cores)
        return engine


def _nth_seed(params: SamplingParams, index: int) -> SamplingParams:
    if params.seed is None or index == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{index}".encode(), digest_size=8).digest()
    return msgspec.structs.replace(params, seed=int.from_bytes(digest) >> 1)
