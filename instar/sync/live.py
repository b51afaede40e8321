"""Live routes, which send weights to engines without files."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from instar.backends.base import Backend
from instar.engines.base import Engine
from instar.errors import InstarError, SyncError
from instar.sync.base import RouteError, SyncRoute
from instar.sync.files import FileSync
from instar.types import Policy

if TYPE_CHECKING:
    from torch import Tensor


class PushTargets:
    """The engines of one push, each with its outcome. Later steps skip an engine that has failed."""

    def __init__(self, policy: Policy, engines: Sequence[Engine]) -> None:
        self._policy = policy
        self.outcomes: dict[Engine, Exception | None] = dict.fromkeys(engines)
        self._committed: set[Engine] = set()

    @property
    def healthy_engines(self) -> list[Engine]:
        """The engines that have not failed."""
        return [engine for engine, error in self.outcomes.items() if error is None]

    async def run(self, action: str, function: Callable[[Engine], Awaitable[object]]) -> None:
        """Call a function for each engine that has not failed. ``action`` completes the error message
        `version 3 of p could not be ...`, for example `sent`."""

        async def run_one(engine: Engine) -> None:
            try:
                await function(engine)
            except (InstarError, OSError) as error:
                self._fail(engine, action, error)

        await asyncio.gather(*map(run_one, self.healthy_engines))

    async def commit(self, function: Callable[[Engine], Awaitable[object]]) -> None:
        """Run the last step. An engine that completes it serves the policy, even if other engines fail."""

        async def commit_one(engine: Engine) -> None:
            await function(engine)
            self._committed.add(engine)

        await self.run("served", commit_one)

    def fail_remaining(self, action: str, error: Exception) -> None:
        """Mark every engine that has neither failed nor committed as failed with ``error``."""
        for engine in self.healthy_engines:
            if engine not in self._committed:
                self._fail(engine, action, error)

    def _fail(self, engine: Engine, action: str, error: Exception) -> None:
        policy = self._policy
        failure = SyncError(f"version {policy.version} of {policy.policy_id} could not be {action}: {error}")
        failure.__cause__ = error
        self.outcomes[engine] = failure


class LiveSync(SyncRoute):
    """Base class for live routes. A push has two phases: all engines receive the weights, then commit them.
    An engine that did not receive all weights keeps its policy, except over NCCL. If the backend cannot
    provide the weights, ``push`` raises the backend's error."""

    is_live = True

    def __init__(self, backend: Backend, *, timeout: float) -> None:
        self._backend = backend
        self._timeout = timeout
        self._files = FileSync(timeout=timeout)

    async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
        if policy.artifact.kind == "base":
            return await self._files.push(policy, engines)
        targets = PushTargets(policy, engines)
        try:
            async with asyncio.timeout(self._timeout):
                await self._stage(policy, targets)
                if targets.healthy_engines:
                    await self._commit(policy, targets)
        except TimeoutError:
            targets.fail_remaining("served", SyncError(f"the push took longer than {self._timeout:g} s"))
        except RouteError as error:
            targets.fail_remaining("sent", error)
        return list(targets.outcomes.values())

    @abstractmethod
    async def _stage(self, policy: Policy, targets: PushTargets) -> None:
        """Send the weights to every engine, or announce weights that are sent during the commit."""

    async def _commit(self, policy: Policy, targets: PushTargets) -> None:
        await targets.commit(lambda engine: engine.commit(policy))


def describe_weight(name: str, tensor: Tensor) -> tuple[str, str, list[int]]:
    """Return the name, dtype and shape of a weight."""
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


@contextmanager
def convert_route_errors(*error_types: type[Exception]) -> Generator[None]:
    """Convert errors from torch, CUDA and the operating system, and ``error_types``, to RouteError. Code that
    reads the backend's weights must stay outside the block, because its errors belong to the trainer."""
    try:
        yield
    except (RuntimeError, OSError, *error_types) as error:
        raise RouteError(f"{type(error).__name__}: {error}") from error
