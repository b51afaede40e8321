"""The sessions of the simulated users: one request, one reply, and the user's feedback."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from gateway_parts.processes import MeasurementError

from instar.errors import EngineUnavailable
from instar.gateway.base import OpenSession
from instar.http.retry import RetryPolicy
from instar.rollout.base import AgentSession
from instar.rollout.gateway_client import TRANSIENT_STATUSES, GatewayClient
from instar.store.base import SessionFilter
from instar.types import Session, SessionStatus
from live_parts.evaluation import MAX_REPLY_TOKENS
from live_parts.run import NAME, LiveRun
from live_parts.schedule import Plan, parse_slot
from live_parts.users import PREFERENCES, choose_question, react

MAX_WAIT_SECONDS = 300.0
"""The time in which the gateway must respond again after a kill."""
MAX_ATTEMPTS = 5


class Users:
    """Uses the agents and sends feedback. A slot names one session: after an interruption, slots that have a
    completed session are not used again, and their feedback is not recorded twice."""

    def __init__(self, run: LiveRun, keys: Mapping[str, Sequence[str]], plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._agent_keys = {agent: agent_key for agent, (agent_key, _) in keys.items()}
        self._feedback_keys = {agent: feedback_key for agent, (_, feedback_key) in keys.items()}
        self._held_out: dict[str, Sequence[str]] = {}

    def exclude(self, agent: str, questions: Sequence[str]) -> None:
        """Never ask these questions in a session."""
        self._held_out[agent] = questions

    async def use_agents(self, slots: Sequence[str]) -> None:
        """Use the agents once per slot, all at the same time, and send the users' feedback."""
        clients = {
            agent: GatewayClient(self._run.url, key, max_wait=MAX_WAIT_SECONDS)
            for agent, key in self._agent_keys.items()
        }
        try:
            async with aiohttp.ClientSession() as http:
                await asyncio.gather(*(self._use_agent(clients, http, slot) for slot in slots))
        finally:
            for client in clients.values():
                await client.close()

    async def _use_agent(
        self, clients: Mapping[str, GatewayClient], http: aiohttp.ClientSession, slot: str
    ) -> None:
        agent, day = parse_slot(slot)
        session = await self._find_completed(slot)
        for _ in range(MAX_ATTEMPTS):
            if session is not None:
                break
            opened = await clients[agent].open_session(OpenSession(task_id=slot))
            question = choose_question(agent, slot, self._held_out[agent])
            await self._request_reply(http, opened, PREFERENCES[agent].make_messages(question))
            await clients[agent].complete_session(opened.session_id)
            session = await self._find_completed(slot)
        if session is None:
            raise MeasurementError(f"{slot}: no session was completed in {MAX_ATTEMPTS} attempts")
        reply = (await self._run.store.calls(session.session_id))[-1].reply
        reaction = react(agent, slot, str(reply["content"] or ""), self._plan.get_phase(day))
        feedback = {"thumbs": reaction.thumbs, "correction": reaction.correction}
        if body := {name: value for name, value in feedback.items() if value is not None}:
            body |= {"session_id": session.session_id, "feedback_id": slot}
            await self._post(http, f"{self._run.url}/feedback", self._feedback_keys[agent], body)

    async def _find_completed(self, slot: str) -> Session | None:
        """Return the first completed session of the slot that has a complete reply."""
        rows = await self._run.store.sessions(
            NAME, where=SessionFilter(task=slot, status=SessionStatus.COMPLETED)
        )
        for row in sorted(rows, key=lambda row: row.seq):
            if row.sampled_tokens:
                return row.session
        return None

    async def _request_reply(
        self, http: aiohttp.ClientSession, session: AgentSession, messages: list[dict[str, Any]]
    ) -> None:
        body = {"model": "instar", "messages": messages, "max_tokens": MAX_REPLY_TOKENS}
        await self._post(http, f"{session.base_url}/chat/completions", session.api_key, body)

    async def _post(self, http: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]) -> None:
        """Send a request, again if the gateway is being restarted."""

        async def post() -> None:
            try:
                async with http.post(
                    url,
                    json=body,
                    headers={"Authorization": f"Bearer {key}"},
                    timeout=aiohttp.ClientTimeout(120),
                ) as response:
                    if response.status in TRANSIENT_STATUSES:
                        raise EngineUnavailable(f"{url} responded with status {response.status}")
                    if response.status >= 400:
                        raise MeasurementError(f"{url} responded with {await response.text()}")
            except (aiohttp.ClientError, TimeoutError) as error:
                raise EngineUnavailable(f"{url} did not respond: {error}") from error

        await RetryPolicy().run(post, retry_on=EngineUnavailable, seconds=MAX_WAIT_SECONDS)
