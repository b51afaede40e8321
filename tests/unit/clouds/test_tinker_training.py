"""Tests for completed and cancelled calls in a Tinker training session."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, cast

import pytest

from instar.clouds.base import CloudError
from instar.clouds.tinker import TinkerConnection
from instar.clouds.tinker_training import TinkerTrainingSession


class ImmediateConnection:
    """A connection on which every call succeeds immediately, with its action as the result."""

    async def await_result(self, action: str, response: Any) -> str:
        return action


class SentCall:
    def future(self) -> Future[None]:
        return Future()


async def test_call_cancelled_before_it_starts_loses_the_session() -> None:
    session = TinkerTrainingSession(cast(TinkerConnection, ImmediateConnection()), client=None)
    cancelled = session.send("forward_backward", lambda _: SentCall())
    cancelled.cancel()  # before its coroutine has started
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(CloudError, match="forward_backward was cancelled"):
            await session.send("optim_step", lambda _: SentCall())


async def test_completed_calls_keep_the_session() -> None:
    session = TinkerTrainingSession(cast(TinkerConnection, ImmediateConnection()), client=None)
    calls = [session.send(name, lambda _: SentCall()) for name in ("first", "second")]
    assert await asyncio.gather(*calls) == ["first", "second"]
    assert session.lost_reason is None
