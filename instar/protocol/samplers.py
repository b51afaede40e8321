"""A pool of local engines that share one copy of the base weights. Each engine has one adapter at a time."""

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

from instar.async_utils import map_concurrently
from instar.config import LocalEngineConfig, ModelConfig
from instar.engines.base import EngineInfo
from instar.engines.checks import check_request, check_score_request
from instar.engines.local.check import check_architecture
from instar.engines.local.engine import LocalEngine, compute_kv_tokens
from instar.engines.local.model import EngineModel
from instar.errors import EngineError
from instar.models import load_tokenizer
from instar.protocol.base import ProtocolError, SampledSequence
from instar.types import Artifact, Floats, Ids, Policy, SamplingParams

ACQUIRE_TIMEOUT_SECONDS = 600.0
"""The maximum time to wait for a free engine and to load the policy into it."""
BASE_MODEL_KEY = ""


@dataclass(eq=False, slots=True)
class _PooledEngine:
    engine: LocalEngine
    request_count: int = 0
    has_failed: bool = False


class SamplerPool:
    """A pool of at most ``max_engines`` engines, each with one policy. If the pool is full, a new policy
    is loaded into the least recently used idle engine, once there is one. The KV memory is divided between
    the engines in use; an idle engine keeps its memory until another engine needs it."""

    def __init__(self, model: ModelConfig, base: Any, *, max_engines: int, threads: int | None) -> None:
        self._model_config = model
        check_architecture(model)
        self._model = EngineModel(model, base)
        self._tokenizer: Any = load_tokenizer(self._model.folder)
        self._max_engines = max_engines
        self.folder = self._model.folder
        self.info = EngineInfo(
            kind="local",
            model=model.name,
            vocab_size=self._model.vocab_size,
            max_context=self._model.max_context,
            artifacts=("adapter", "base"),
        )
        context = self.info.max_context
        config = LocalEngineConfig(threads=threads, max_adapters=1)
        kv_tokens = compute_kv_tokens(self._model.kv_shape, config.max_batch * context)
        self._kv_tokens = max(context, kv_tokens)
        self._config = config.model_copy(update={"kv_tokens": self._kv_tokens})
        self._cores: int | None = None
        self._engines: OrderedDict[str, _PooledEngine] = OrderedDict()
        self._loading_lock = asyncio.Lock()
        self._engine_released = asyncio.Event()
        self._load_count = 0

    async def sample(
        self, key: str, adapter: Path | None, prompt: Sequence[int], params: SamplingParams, count: int
    ) -> list[SampledSequence]:
        """Sample ``count`` sequences with ``adapter`` (None: the base model). ``key`` identifies the policy.
        The first sequence uses the seed in ``params``, if any; the others use seeds derived from it."""
        ids = _convert_check_errors(lambda: check_request(self.info, prompt, params))
        async with self._borrow_engine(key, adapter) as engine:
            return await map_concurrently(
                lambda index: self._generate(engine, ids, _with_derived_seed(params, index)), range(count)
            )

    async def compute_logprobs(self, key: str, adapter: Path | None, tokens: Sequence[int]) -> Floats:
        ids = _convert_check_errors(lambda: check_score_request(self.info, tokens))
        async with self._borrow_engine(key, adapter) as engine:
            return await engine.logprobs(ids)

    def set_cores(self, count: int) -> None:
        self._cores = count
        for pooled in self._engines.values():
            pooled.engine.use_cores(count)

    async def close(self) -> None:
        engines = [*self._engines.values()]
        self._engines.clear()
        await asyncio.gather(*(pooled.engine.close() for pooled in engines))

    async def _generate(self, engine: LocalEngine, prompt: Ids, params: SamplingParams) -> SampledSequence:
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
    async def _borrow_engine(self, key: str, adapter: Path | None) -> AsyncGenerator[LocalEngine]:
        """Yield an engine with this policy. The engine keeps the policy for the duration of the block."""
        pooled = await self._acquire(key, adapter)
        try:
            yield pooled.engine
        except EngineError:
            pooled.has_failed = True
            raise
        finally:
            await self._release(key, pooled)

    async def _acquire(self, key: str, adapter: Path | None) -> _PooledEngine:
        try:
            async with asyncio.timeout(ACQUIRE_TIMEOUT_SECONDS):
                if key not in self._engines:
                    await self._load_policy(key, adapter)
        except TimeoutError as error:
            raise ProtocolError(
                f"no sampler was ready within {ACQUIRE_TIMEOUT_SECONDS:g} s; try again later", 503, "server"
            ) from error
        # Nothing else runs until the next await, so no other policy can be loaded into the engine.
        pooled = self._engines[key]
        self._engines.move_to_end(key)
        pooled.request_count += 1
        if pooled.request_count == 1:
            for idle in [other for other in self._engines.values() if other.request_count == 0]:
                idle.engine.release_memory()
            self._divide_memory()
        return pooled

    def _divide_memory(self) -> None:
        in_use = [pooled.engine for pooled in self._engines.values() if pooled.request_count]
        for engine in in_use:
            engine.set_kv_tokens(max(self.info.max_context, self._kv_tokens // len(in_use)))

    async def _load_policy(self, key: str, adapter: Path | None) -> None:
        async with self._loading_lock:  # the lock is fair, so requests are served in order
            while key not in self._engines:
                idle_key = next(
                    (other for other, pooled in self._engines.items() if pooled.request_count == 0), None
                )
                if len(self._engines) < self._max_engines:
                    engine = await asyncio.to_thread(self._create_engine)
                    self._engines[key] = await self._load_adapter(_PooledEngine(engine), adapter)
                elif idle_key is not None:
                    self._engines[key] = await self._load_adapter(self._engines.pop(idle_key), adapter)
                else:
                    self._engine_released.clear()
                    await self._engine_released.wait()

    async def _release(self, key: str, pooled: _PooledEngine) -> None:
        pooled.request_count -= 1
        self._engine_released.set()
        if pooled.has_failed:
            if self._engines.get(key) is pooled:
                del self._engines[key]
            if pooled.request_count == 0:
                await pooled.engine.close()
        if pooled.request_count == 0:
            self._divide_memory()

    async def _load_adapter(self, pooled: _PooledEngine, adapter: Path | None) -> _PooledEngine:
        self._load_count += 1
        artifact = Artifact("base") if adapter is None else Artifact("adapter", str(adapter))
        try:
            await pooled.engine.load(Policy("sampler", self._load_count, artifact))
        except BaseException:  # also when cancelled: the engine has no usable policy
            await pooled.engine.close()
            raise
        return pooled

    def _create_engine(self) -> LocalEngine:
        model = self._model.share()
        engine = LocalEngine(self._model_config, self._config, tokenizer=self._tokenizer, shared_model=model)
        if self._cores is not None:
            engine.use_cores(self._cores)
        return engine


def _convert_check_errors(check: Callable[[], Ids]) -> Ids:
    # An error in these checks is the client's fault; later errors are the server's.
    try:
        return check()
    except EngineError as error:
        raise ProtocolError(str(error)) from error


def _with_derived_seed(params: SamplingParams, index: int) -> SamplingParams:
    if params.seed is None or index == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{index}".encode(), digest_size=8).digest()
    return msgspec.structs.replace(params, seed=int.from_bytes(digest) >> 1)
