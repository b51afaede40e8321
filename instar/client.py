"""A client for programs outside a run that open training groups and run their sessions::

    async with Client("http://127.0.0.1:8000", admin_key) as client:
        group = await client.open_group({"question": "2 + 2"}, size=8)
        for slot in group.slots:
            reward = await run_agent(slot.base_url, slot.api_key)
            await slot.complete(reward=reward)

docs/groups.md describes the requests behind it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from instar.errors import EngineUnavailable, GatewayError, InstarError, RunFinished
from instar.gateway.base import CompleteSession, EndedSession, FailSession, GroupView, OpenGroup, SlotView
from instar.http.client import HttpClient, HttpResponse, NoResponse
from instar.http.retry import RetryPolicy
from instar.types import GroupStatus, Json, SessionStatus

__all__ = ["Client", "Group", "Slot"]

T = TypeVar("T")

REQUEST_TIMEOUT_SECONDS = 30.0
RETRIED_STATUSES = (429, 502, 503, 504)
GROUP_LIMIT_CODE = "too_many_groups"
RUN_FINISHED_CODE = "run_finished"


class _RetryableError(EngineUnavailable):
    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _Unavailable(_RetryableError):
    pass


class _TooManyGroups(_RetryableError):
    """Waiting for the trainer takes longer than waiting for a gateway that restarts."""


class Client:
    """Opens groups with the admin key of a run's gateway. Requests may be concurrent.

    If the gateway is unavailable, for example during a restart, requests are retried for ``max_wait``
    seconds before EngineUnavailable is raised. A request that it rejects raises GatewayError.
    """

    def __init__(self, url: str, admin_key: str, *, max_wait: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self.max_wait = max_wait
        self._admin_key = admin_key
        self._http = HttpClient(headers={"Content-Type": "application/json"}, timeout=REQUEST_TIMEOUT_SECONDS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()

    async def open_group(
        self,
        task: Json,
        *,
        size: int,
        task_id: str | None = None,
        deadline_s: float | None = None,
        timeout: float = 3600.0,
    ) -> Group:
        """Open a group of ``size`` sessions that attempt the task.

        If the run already has enough groups ahead of the trainer, wait up to ``timeout`` seconds, and then
        raise EngineUnavailable. Raises RunFinished if the run has trained all its steps.
        """
        body = OpenGroup(task=task, size=size, task_id=task_id, deadline_s=deadline_s)
        # With this key, a retry after a lost response returns the group that was opened.
        headers = {"Idempotency-Key": secrets.token_urlsafe(16)}

        async def attempt() -> GroupView:
            return await self.request("POST", "/groups", self._admin_key, GroupView, body, headers)

        return Group(self, await RetryPolicy().run(attempt, retry_on=_TooManyGroups, seconds=timeout))

    async def get_group(self, group_id: str) -> Group:
        return Group(self, await self.request_group("GET", group_id))

    async def request_group(self, method: str, group_id: str) -> GroupView:
        return await self.request(method, f"/groups/{group_id}", self._admin_key, GroupView)

    async def request(
        self,
        method: str,
        path: str,
        key: str,
        response_type: type[T],
        body: msgspec.Struct | None = None,
        headers: dict[str, str] | None = None,
    ) -> T:
        """Send a request, with retries, and return its decoded response."""
        data = None if body is None else msgspec.json.encode(body)
        all_headers = {**(headers or {}), "Authorization": f"Bearer {key}"}

        response = await RetryPolicy().run(
            lambda: self._request_once(method, path, data, all_headers),
            retry_on=_Unavailable,
            seconds=self.max_wait,
        )
        return msgspec.json.decode(response.body, type=response_type)

    async def _request_once(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> HttpResponse:
        try:
            response = await self._http.request(method, self.url + path, data, headers=headers)
        except NoResponse as error:
            raise _Unavailable(f"the gateway at {self.url} did not respond to {path}: {error}") from error
        if response.is_success:
            return response
        code, message = _parse_error(response)
        text = f"the gateway rejected {method} {path} with status {response.status}: {message}"
        if code == GROUP_LIMIT_CODE:
            raise _TooManyGroups(text, response.retry_after)
        if response.status in RETRIED_STATUSES:
            raise _Unavailable(text, response.retry_after)
        error_type = RunFinished if code == RUN_FINISHED_CODE else GatewayError
        raise error_type(text, status=response.status, code=code)


@dataclass(eq=False)
class Group:
    """A group and its state at the last request: `refresh` reads it again."""

    _client: Client = field(repr=False)
    view: GroupView

    @property
    def group_id(self) -> str:
        return self.view.group_id

    @property
    def status(self) -> GroupStatus:
        return self.view.status

    @property
    def slots(self) -> list[Slot]:
        """The latest session of each slot. After a failure under ``refill``, it is another session."""
        return [Slot(self._client, view) for view in self.view.slots]

    async def refresh(self) -> None:
        self.view = await self._client.request_group("GET", self.group_id)

    async def abandon(self) -> None:
        """End the sessions of an open group. The run does not train on it."""
        self.view = await self._client.request_group("DELETE", self.group_id)


@dataclass(eq=False)
class Slot:
    """A slot of a group with its latest session."""

    _client: Client = field(repr=False)
    view: SlotView

    @property
    def session_id(self) -> str:
        return self.view.session_id

    @property
    def is_open(self) -> bool:
        return self.view.status is SessionStatus.OPEN

    @property
    def base_url(self) -> str:
        """The ``base_url`` for an OpenAI client; `SlotView.base_urls` has those of other clients."""
        return self.view.base_url

    @property
    def api_key(self) -> str:
        """The session's key. Raises InstarError if the session has ended."""
        if self.view.api_key is None:
            raise InstarError(
                f"the session {self.session_id} is {self.view.status} and has no key; use the open slots of "
                "the group after `refresh`"
            )
        return self.view.api_key

    async def complete(self, reward: float | None = None, metadata: Json | None = None) -> EndedSession:
        """Complete the session. Without a reward, it needs one from a rule or judge of the run. A session
        that has already ended is not changed."""
        return await self._end("complete", CompleteSession(reward=reward, metadata=metadata or {}))

    async def fail(self, reason: str, reward: float | None = None) -> EndedSession:
        """Report that the attempt failed. A session that has already ended is not changed."""
        return await self._end("fail", FailSession(reason=reason, reward=reward))

    async def _end(self, action: str, body: msgspec.Struct) -> EndedSession:
        path = f"/sessions/{self.session_id}/{action}"
        return await self._client.request("POST", path, self.api_key, EndedSession, body)


def _parse_error(response: HttpResponse) -> tuple[str | None, str]:
    """Return the code and the message of an error response."""
    try:
        error: dict[str, Any] = msgspec.json.decode(response.body, type=dict[str, Any]).get("error", {})
        return error.get("code"), str(error["message"])
    except (msgspec.DecodeError, KeyError, AttributeError):
        return None, response.excerpt()
