"""One engine of a pool, with its health and its load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field

from instar.engines.base import Engine
from instar.errors import EngineUnavailable


@dataclass(eq=False, slots=True)
class PoolMember:
    engine: Engine
    index: int
    is_healthy: bool = False
    unhealthy_reason: str = "no response yet"
    missed_checks: int = 0
    is_draining: bool = False
    """True if the engine reported that it rejects new requests."""
    in_flight: int = 0
    other_requests: int = 0
    """The number of requests from other clients at the latest health check."""
    total_requests: int = 0
    loaded_version: int | None = None
    """The latest version that this pool loaded into the engine. Always None if ``newest_policy`` is set."""
    check_requested: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to start the next health check immediately, for example after a failed request."""
    first_token_timeouts: set[asyncio.Timeout] = field(default_factory=set[asyncio.Timeout])
    """The timeouts of the requests that are waiting for their first token."""

    @property
    def load(self) -> int:
        """The number of requests, including those from other clients."""
        return self.in_flight + self.other_requests

    @property
    def can_accept_requests(self) -> bool:
        return self.is_healthy and not self.is_draining

    def mark_unhealthy(self, reason: str) -> None:
        self.is_healthy = False
        self.unhealthy_reason = reason
        self.check_requested.set()

    def release_waiting_requests(self) -> None:
        """Time out requests that have no first token yet, so that they are retried on other engines."""
        while self.first_token_timeouts:
            self.first_token_timeouts.pop().reschedule(asyncio.get_running_loop().time())

    @contextlib.contextmanager
    def track_request(self) -> Generator[None]:
        """Count a request while the block runs. Mark the engine as unhealthy on EngineUnavailable."""
        self.in_flight += 1
        try:
            yield
        except EngineUnavailable as error:
            self.mark_unhealthy(str(error))
            raise
        finally:
            self.in_flight -= 1
