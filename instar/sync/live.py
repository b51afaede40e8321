"""The base class of live routes, which send weights without files. First all engines receive the weights,
then all engines commit them."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager

from instar.backends.base import Backend
from instar.engines.base import Engine
from instar.errors import InstarError, SyncError
from instar.sync.base import RouteError, Sync
from instar.sync.files import FileSync
from instar.types import Policy


class PushTargets:
    """The engines of one push, each with its outcome. An engine that has failed is skipped in later steps."""

    def __init__(self, policy: Policy, engines: Sequence[Engine]) -> None:
        self._policy = policy
        self._engines = engines
        self.outcomes: list[Exception | None] = [None] * len(engines)
        self._committed: set[int] = set()

    @property
    def engines(self) -> list[Engine]:
        """Return the engines that have not failed."""
        return [engine for engine, failed in zip(self._engines, self.outcomes, strict=True) if not failed]

    async def run(self, action: str, work: Callable[[Engine], Awaitable[object]]) -> None:
        async def one(index: int) -> None:
            try:
                await work(self._engines[index])
            except (InstarError, OSError) as error:
                self._fail(index, action, error)

        await asyncio.gather(*(one(i) for i, failed in enumerate(self.outcomes) if failed is None))

    async def commit(self, work: Callable[[Engine], Awaitable[object]]) -> None:
        """Run the last step on every engine. An engine that completes it serves the policy, even if other
        engines fail."""
        indices = {id(engine): index for index, engine in enumerate(self._engines)}

        async def one(engine: Engine) -> None:
            await work(engine)
            self._committed.add(indices[id(engine)])

        await self.run("served", one)

    def fail_remaining(self, action: str, error: Exception) -> None:
        """Set the error as the outcome of all engines that have neither failed nor committed."""
        for index, failed in enumerate(self.outcomes):
            if failed is None and index not in self._committed:
                self._fail(index, action, error)

    def _fail(self, index: int, action: str, error: Exception) -> None:
        policy = self._policy
        failure = SyncError(f"version {policy.version} of {policy.policy_id} could not be {action}: {error}")
        failure.__cause__ = error
        self.outcomes[index] = failure


class LiveSync(Sync):
    """The base class of routes that work in two phases. An engine that did not receive all weights keeps its
    policy. If the backend cannot provide the weights, all engines keep theirs."""

    live = True

    def __init__(self, backend: Backend, *, deadline: float) -> None:
        self._backend = backend
        self._deadline = deadline
        self._files = FileSync(deadline=deadline)

    async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
        if policy.artifact.kind == "base":
            return await self._files.push(policy, engines)
        targets = PushTargets(policy, engines)
        try:
            async with asyncio.timeout(self._deadline):
                await self._stage(policy, targets)
                if targets.engines:
                    await self._commit(policy, targets)
        except TimeoutError:
            targets.fail_remaining("served", SyncError(f"it took longer than {self._deadline:g} s"))
        except RouteError as error:
            targets.fail_remaining("sent", error)
        return targets.outcomes

    @abstractmethod
    async def _stage(self, policy: Policy, targets: PushTargets) -> None:
        """Send the weights to every engine."""

    async def _commit(self, policy: Policy, targets: PushTargets) -> None:
        await targets.commit(lambda engine: engine.commit(policy))


@contextmanager
def route_errors(*kinds: type[Exception]) -> Generator[None]:
    """Raise errors of torch, CUDA, the system and the given ``kinds`` as RouteError. Errors that the backend
    raises while it provides weights belong to the trainer, so that code must stay outside the block."""
    try:
        yield
    except (RuntimeError, OSError, *kinds) as error:
        raise RouteError(f"{type(error).__name__}: {error}") from error
