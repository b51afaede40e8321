"""How a published policy gets from a backend to the engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from instar.engines.base import Engine
from instar.errors import ConfigError, SyncError
from instar.types import ArtifactKind, Policy


class RouteError(SyncError):
    """The way itself failed: neither an engine nor the backend."""


class Sync(ABC):
    live = False
    """Whether ``push`` takes the weights from the backend itself, which then publishes nothing: the policy's
    artifact is ``live``, and it can be pushed for as long as the weights are those of its version."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What it is and how it was come to, for the log."""

    @abstractmethod
    async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
        """Load the policy on every engine. One outcome per engine, in order; a failure on one does
        not keep it from the others."""

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what it holds for the way."""


def choose_artifact(made: Iterable[ArtifactKind], taken: Iterable[ArtifactKind]) -> ArtifactKind:
    """The kind a backend makes and an engine takes, or an error at start."""
    made, taken = list(made), list(taken)
    for kind in made:
        if kind in taken:
            return kind
    raise ConfigError(
        f"no way from backend to engine: the backend publishes {', '.join(made)}, "
        f"the engine loads {', '.join(taken)}"
    )
