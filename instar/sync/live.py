"""Carries weights from the backend itself, without files: all engines take them in, then all serve them."""

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
    """The engines of one push, each with its outcome. One that fails is left out of what follows."""

    def __init__(self, policy: Policy, engines: Sequence[Engine]) -> None:
        self._policy = policy
        self._engines = engines
        self.outcomes: list[Exception | None] = [None] * len(engines)
        self._served: set[int] = set()

    @property
    def engines(self) -> list[Engine]:
        """Those that have not failed."""
        return [engine for engine, failed in zip(self._engines, self.outcomes, strict=True) if not failed]

    async def run(self, doing: str, work: Callable[[Engine], Awaitable[object]]) -> None:
        async def one(place: int) -> None:
            try:
                await work(self._engines[place])
            except (InstarError, OSError) as error:
                self._fail(place, doing, error)

        await asyncio.gather(*(one(i) for i, failed in enumerate(self.outcomes) if failed is None))

    async def commit(self, work: Callable[[Engine], Awaitable[object]]) -> None:
        """The last that each is asked for: one that has answered serves the policy, whatever becomes of the
        others."""
        places = {id(engine): place for place, engine in enumerate(self._engines)}

        async def one(engine: Engine) -> None:
            await work(engine)
            self._served.add(places[id(engine)])

        await self.run("served", one)

    def fail_remaining(self, doing: str, error: Exception) -> None:
        """For all that have neither failed yet nor come to serve the policy."""
        for place, failed in enumerate(self.outcomes):
            if failed is None and place not in self._served:
                self._fail(place, doing, error)

    def _fail(self, place: int, doing: str, error: Exception) -> None:
        policy = self._policy
        told = SyncError(f"version {policy.version} of {policy.policy_id} could not be {doing}: {error}")
        told.__cause__ = error
        self.outcomes[place] = told


class LiveSync(Sync):
    """In two phases: an engine that does not take everything in keeps what it serves, and so do all when the
    weights cannot be had from the backend."""

    live = True

    def __init__(self, backend: Backend, *, deadline: float) -> None:
        self._backend = backend
        self._deadline = deadline
        self._files = FileSync(deadline=deadline)

    async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
        if policy.artifact.kind == "base":
            return await self._files.push(policy, engines)
        fleet = PushTargets(policy, engines)
        try:
            async with asyncio.timeout(self._deadline):
                await self._stage(policy, fleet)
                if fleet.engines:
                    await self._commit(policy, fleet)
        except TimeoutError:
            fleet.fail_remaining("served", SyncError(f"it took longer than {self._deadline:g} s"))
        except RouteError as error:
            fleet.fail_remaining("carried", error)
        return fleet.outcomes

    @abstractmethod
    async def _stage(self, policy: Policy, fleet: PushTargets) -> None:
        """Bring the weights to every engine."""

    async def _commit(self, policy: Policy, fleet: PushTargets) -> None:
        await fleet.commit(lambda engine: engine.commit(policy))


@contextmanager
def route_errors(*kinds: type[Exception]) -> Generator[None]:
    """Within, what torch, CUDA or the system refuse, or one of these, is the way's failure. What the backend
    raises while it hands out weights is not for here: it is the trainer's."""
    try:
        yield
    except (RuntimeError, OSError, *kinds) as error:
        raise RouteError(f"{type(error).__name__}: {error}") from error
