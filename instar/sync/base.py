"""The interface for sync routes, which transfer a published policy to the engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from instar.engines.base import Engine
from instar.errors import SyncError
from instar.types import Policy


class RouteError(SyncError):
    """A failure of the route itself, not of an engine or the backend."""


class SyncRoute(ABC):
    description: str
    """A description of the route for the log."""
    is_live = False
    """True if ``push`` reads the weights from the backend, so that no files are published. The policy's
    artifact is ``live``, and the policy can be pushed only while the backend has its weights."""

    @abstractmethod
    async def push(self, policy: Policy, engines: Sequence[Engine]) -> list[Exception | None]:
        """Load the policy into every engine. Return one entry per engine, in order: the error, or None on
        success. The failure of one engine does not affect the others."""

    async def close(self) -> None:  # noqa: B027 - most routes have no resources
        """Release the route's resources."""
