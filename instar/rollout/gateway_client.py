"""A client for the gateway's control API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

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
from instar.http.client import HttpClient, NoResponse
from instar.http.retry import RetryPolicy
from instar.rollout.base import AgentSession
from instar.types import Reward, RewardSource, Score

T = TypeVar("T")

TRANSIENT_STATUSES = (429, 502, 503, 504)
REQUEST_TIMEOUT_SECONDS = 30.0


class GatewayClient:
    """Opens and ends sessions. If the gateway is unavailable, for example during a restart, requests are
    retried for ``max_wait`` seconds before EngineUnavailable is raised."""

    def __init__(self, url: str, admin_key: str, *, max_wait: float = 120.0) -> None:
        self.set_url(url)
        self.max_wait = max_wait
        headers = {"Authorization": f"Bearer {admin_key}", "Content-Type": "application/json"}
        self._http = HttpClient(headers=headers, timeout=REQUEST_TIMEOUT_SECONDS)

    def set_url(self, url: str) -> None:
        self.url = url.rstrip("/")

    async def open_session(self, request: OpenSession) -> AgentSession:
        """Open a session. If the response is lost, another one is opened; the first closes with its group."""
        opened = await self._post("/sessions", request, OpenedSession)
        return AgentSession(opened.session_id, opened.base_url, opened.api_key, metadata=request.metadata)

    async def complete_session(
        self,
        session_id: str,
        rewards: Sequence[Reward] = (),
        metadata: Mapping[str, Any] | None = None,
        scores: Sequence[Score] = (),
    ) -> EndedSession:
        """Complete the session and return its state. A session that has already ended is not changed."""
        body = CompleteSession(
            metadata=dict(metadata or {}),
            rewards=[to_reward_body(reward) for reward in rewards],
            scores=[ScoreBody(s.scorer, s.state, s.attempts, s.reason) for s in scores],
        )
        return await self._post(f"/sessions/{session_id}/complete", body, EndedSession)

    async def fail_session(self, session_id: str, reason: str, reward: float | None = None) -> EndedSession:
        """Fail the session and return its state. A session that has already ended is not changed.
        ``reward``, if not None, is recorded as a fallback reward."""
        rewards = [] if reward is None else [RewardBody(reward, RewardSource.FALLBACK, "failed_reward")]
        body = FailSession(reason=reason, rewards=rewards)
        return await self._post(f"/sessions/{session_id}/fail", body, EndedSession)

    async def close(self) -> None:
        await self._http.close()

    async def _post(self, path: str, body: msgspec.Struct, response_type: type[T]) -> T:
        data = msgspec.json.encode(body)
        content = await RetryPolicy().run(
            lambda: self._post_once(path, data), retry_on=EngineUnavailable, seconds=self.max_wait
        )
        return msgspec.json.decode(content, type=response_type)

    async def _post_once(self, path: str, data: bytes) -> bytes:
        try:
            response = await self._http.post(self.url + path, data)
        except NoResponse as error:
            message = f"the gateway at {self.url} did not respond to {path}: {error}"
            raise EngineUnavailable(message) from error
        if response.status in TRANSIENT_STATUSES:
            raise EngineUnavailable(
                f"the gateway at {self.url} responded to {path} with status {response.status}"
            )
        if response.status >= 400:
            excerpt = response.excerpt(500)
            raise InstarError(f"the gateway rejected {path} with status {response.status}: {excerpt}")
        return response.body
