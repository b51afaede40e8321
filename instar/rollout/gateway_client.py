"""The gateway's control API, as the rollout uses it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from instar.errors import EngineUnavailable, InstarError
from instar.rollout.base import AgentSession
from instar.types import Channel, Json, Reward

TRANSIENT = (429, 502, 503, 504)
REQUEST_TIMEOUT = 30.0


def backoff(attempt: int, *, first: float = 0.25, longest: float = 8.0) -> float:
    """Seconds to wait before another try: doubling, with jitter so that many do not come at once."""
    return min(longest, first * 2**attempt) * random.uniform(0.5, 1.0)


class GatewayClient:
    """Opens and ends sessions. A gateway that is away (it is being restarted, say) is waited for up to
    ``patience`` seconds; after that EngineUnavailable is raised."""

    def __init__(self, url: str, admin_key: str, *, patience: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self.patience = patience
        self._headers = {"Authorization": f"Bearer {admin_key}", "Content-Type": "application/json"}
        self._http: aiohttp.ClientSession | None = None

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
        body = {
            "channel": channel,
            "task_id": task_id,
            "group_id": group_id,
            "slot": slot,
            "attempt": attempt,
            "seed": seed,
            "sampling": dict(sampling or {}),
            "metadata": dict(metadata or {}),
        }
        opened = await self._post("/sessions", {k: v for k, v in body.items() if v is not None})
        return AgentSession(
            session_id=opened["session_id"],
            base_url=opened["base_url"],
            api_key=opened["api_key"],
            metadata=dict(metadata or {}),
        )

    async def complete(
        self, session_id: str, rewards: Sequence[Reward] = (), metadata: Mapping[str, Any] | None = None
    ) -> None:
        """End the session well. Nothing happens to one that has ended already."""
        given = [
            {
                "value": r.value,
                "source": r.source,
                "scorer": r.scorer,
                "detail": r.detail,
                "call_id": r.call_id,
            }
            for r in rewards
        ]
        body: Json = {"rewards": given, "metadata": dict(metadata or {})}
        await self._post(f"/sessions/{session_id}/complete", body)

    async def fail(self, session_id: str, reason: str, reward: float | None = None) -> None:
        """End the session as failed; ``reward`` is recorded as a fallback."""
        body: Json = {"reason": reason}
        if reward is not None:
            body["reward"] = reward
        await self._post(f"/sessions/{session_id}/fail", body)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _post(self, path: str, body: Json) -> Json:
        deadline = time.monotonic() + self.patience
        tries = 0
        while True:
            try:
                return await self._post_once(path, body)
            except EngineUnavailable:
                pause = backoff(tries)
                if time.monotonic() + pause > deadline:
                    raise
                await asyncio.sleep(pause)
                tries += 1

    async def _post_once(self, path: str, body: Json) -> Json:
        if self._http is None:
            # A killed gateway leaves dead connections behind, so none is kept for long.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=10)
            timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)
        data = msgspec.json.encode(body)
        try:
            async with self._http.post(self.url + path, data=data, headers=self._headers) as response:
                content = await response.read()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            cause = str(error) or type(error).__name__
            raise EngineUnavailable(f"the gateway at {self.url} cannot be reached: {cause}") from error
        if response.status in TRANSIENT:
            raise EngineUnavailable(f"the gateway at {self.url} answered {response.status} to {path}")
        if response.status == 409 and not path.endswith("/sessions"):
            return {}  # it has ended already: a reply was lost, or the agent ended it itself
        if response.status >= 400:
            text = content.decode(errors="replace")[:500]
            raise InstarError(f"the gateway refused {path} with {response.status}: {text}")
        return msgspec.json.decode(content)
