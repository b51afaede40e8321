"""A backend whose work runs in one thread, in the order of the calls. The event loop stays free, and calls
may be pipelined."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from instar.backends.base import Backend, ForwardBackwardResult, OptimStepResult
from instar.config import AdamConfig, LossConfig
from instar.errors import BackendError
from instar.types import Artifact, Sample

T = TypeVar("T")


class ThreadedBackend(Backend):
    def __init__(self, thread_name: str) -> None:
        self._closed = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=thread_name)

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        return await self._run(lambda: self._forward_backward(samples, loss))

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        return await self._run(lambda: self._optim_step(adam))

    async def publish(self, path: Path) -> Artifact:
        return await self._run(lambda: self._publish(path))

    async def save_state(self, path: Path) -> None:
        await self._run(lambda: self._save_state(path))

    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        await self._run(lambda: self._load_state(path, optimizer))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._pool, self._release)
        self._pool.shutdown(wait=True)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise BackendError("the backend is closed")
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    # --- called in the thread ----------------------------------------------------------------------

    @abstractmethod
    def _forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult: ...

    @abstractmethod
    def _optim_step(self, adam: AdamConfig) -> OptimStepResult: ...

    @abstractmethod
    def _publish(self, path: Path) -> Artifact: ...

    @abstractmethod
    def _save_state(self, path: Path) -> None: ...

    @abstractmethod
    def _load_state(self, path: Path, optimizer: bool) -> None: ...

    @abstractmethod
    def _release(self) -> None: ...
