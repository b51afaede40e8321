"""The interface for loading the policy that a backend publishes into the engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from instar.engines.base import Engine
from instar.errors import ConfigError, SyncError
from instar.types import ArtifactKind, Policy


class RouteError(SyncError):
    """An error for a failure of the route itself, not of an engine or the backend."""


class Sync(ABC):
    live = False
    """True if ``push`` reads the weights from the backend, which then does not publish files. The policy's
    artifact is ``live``, and the policy can be pushed only while the backend has the weights of its
    version."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Return a description of the route for the log."""

    @abstractmethod
    async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
        """Load the policy into every engine and return one outcome per engine, in order. If one engine fails,
        the others are not affected."""

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release the resources of the route."""


def choose_artifact(published: Iterable[ArtifactKind], loaded: Iterable[ArtifactKind]) -> ArtifactKind:
    """Return the first artifact kind that the backend publishes and the engine can load."""
    published, loaded = list(published), list(loaded)
    for kind in published:
        if kind in loaded:
            return kind
    raise ConfigError(
        f"no route from backend to engine: the backend publishes {', '.join(published)}, "
        f"the engine loads {', '.join(loaded)}"
    )
