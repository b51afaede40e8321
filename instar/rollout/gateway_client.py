"""The gateway's control API, as the rollout uses it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from instar.errors import EngineUnavailable, InstarError
from instar.gateway.base import (
    CompleteSession,
    EndedSession,
    FailSession,
    OpenedSession,
    OpenSession,
    RewardBody,
    ScoreBody,
    to_reward_body,
)
from instar.rollout.base import AgentSession
from instar.types import Channel, Reward, RewardSource, Score

T = TypeVar("T")

TRANSIENT = (429, 502, 503, 504)
REQUEST_TIMEOUT = 30.0


def backoff(attempt: int, *, first: float = 0.25, longest: float = 8.0) -> float:
    """Seconds to wait before another try: doubling, with jitter so that many do not come at once."""
    return min(longest, first * 2**attempt) * random.uniform(0.5, 1.0)


class GatewayClient:
    """Opens and ends sessions. A gateway that is away (it is being restarted, say) is waited for up to
    ``patience`` seconds; after that EngineUnavailable is raised."""

    def __init__(self, url: str, admin_key: str, *, max_wait: float = 120.0) -> None:
        self.set_url(url)
        self.max_wait = max_wait
        self._headers = {"Authorization": f"Bearer {admin_key}", "Content-Type": "application/json"}
        self._http: aiohttp.ClientSession | None = None

    def set_url(self, url: str) -> None:
        """The gateway is there now: sessions that are opened from now on are opened there."""
        self.url = url.rstrip("/")

    async def open_session(
        self,
        *,
        channel: Channel,
        task_id: str | None = None,
        group_id: str | None = None,
        slot: int = 0,
        attempt: int = 0,
        seed: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AgentSession:
        """A fresh session. One that a lost reply left behind stays open: the runner abandons it when its
        group closes."""
        body = OpenSession(
            channel=channel,
            task_id=task_id,
            group_id=group_id,
            slot=slot,
            attempt=attempt,
            seed=seed,
            sampling=dict(sampling or {}),
            metadata=dict(metadata or {}),
        )
        opened = await self._post("/sessions", body, OpenedSession)
        return AgentSession(opened.session_id, opened.base_url, opened.api_key, metadata=body.metadata)

    async def complete_session(
        self,
        session_id: str,
        rewards: Sequence[Reward] = (),
        metadata: Mapping[str, Any] | None = None,
        scores: Sequence[Score] = (),
    ) -> EndedSession:
        """End the session well. One that has ended already stays as it is."""
        body = CompleteSession(
            metadata=dict(metadata or {}),
            rewards=[to_reward_body(reward) for reward in rewards],
            scores=[ScoreBody(s.scorer, s.state, s.attempts, s.reason) for s in scores],
        )
        return await self._post(f"/sessions/{session_id}/complete", body, EndedSession)

    async def fail_session(self, session_id: str, reason: str, reward: float | None = None) -> EndedSession:
        """End the session as failed; ``reward`` is recorded as a fallback."""
        rewards = [] if reward is None else [RewardBody(reward, RewardSource.FALLBACK, "failed_reward")]
        body = FailSession(reason=reason, rewards=rewards)
        return await self._post(f"/sessions/{session_id}/fail", body, EndedSession)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _post(self, path: str, body: msgspec.Struct, answer: type[T]) -> T:
        deadline = time.monotonic() + self.max_wait
        tries = 0
        while True:
            try:
                return msgspec.json.decode(await self._post_once(path, body), type=answer)
            except EngineUnavailable:
                pause = backoff(tries)
                if time.monotonic() + pause > deadline:
                    raise
                await asyncio.sleep(pause)
                tries += 1

    async def _post_once(self, path: str, body: msgspec.Struct) -> bytes:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT)
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        data = msgspec.json.encode(body)
        try:
            async with self._http.post(self.url + path, data=data, headers=self._headers) as response:
                content = await response.read()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            cause = str(error) or type(error).__name__
            raise EngineUnavailable(f"the gateway at {self.url} cannot be reached: {cause}") from error
        if response.status in TRANSIENT:
            raise EngineUnavailable(f"the gateway at {self.url} answered {response.status} to {path}")
        if response.status >= 400:
            text = content.decode(errors="replace")[:500]
            raise InstarError(f"the gateway refused {path} with {response.status}: {text}")
        return content
