"""The live agents of a soak test: conversations with rewards, disconnecting clients and broken requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from gateway_parts.conversations import Conversation
from gateway_parts.processes import MeasurementError
from gateway_parts.servers import GatewayProcess

from reliability_parts.load import LoadClient, Outcome

CHAT = "/v1/chat/completions"
TURNS = 6
TURN_BYTES = 120
CallKind = Literal["complete", "streamed", "disconnecting", "broken"]
CALL_WEIGHTS: dict[CallKind, float] = {"complete": 0.5, "streamed": 0.3, "disconnecting": 0.1, "broken": 0.1}
MAX_DISCONNECT_SECONDS = 0.3
"""A disconnecting client closes its connection at a random moment within this time."""
DOCUMENTED_ERRORS = (502, 503, 504)


@dataclass(eq=False)
class LiveSession:
    session_id: str
    conversation: Conversation


class LiveAgents:
    def __init__(self, gateway: GatewayProcess, client: LoadClient, *, seed: int = 0) -> None:
        self._gateway = gateway
        self._client = client
        self._random = random.Random(seed)
        self._idle_sessions: list[LiveSession] = []
        self.counts: Counter[str] = Counter()
        """The number of calls by kind, responses by status, rewards and sessions."""

    async def send_call(self) -> Outcome:
        """Send the next call of a session, or a broken call, and count it."""
        (kind,) = self._random.choices(list(CALL_WEIGHTS), list(CALL_WEIGHTS.values()))
        self.counts[kind] += 1
        if kind == "broken":
            outcome = await self._send_broken()
        else:
            session = self._idle_sessions.pop() if self._idle_sessions else await self._open_session()
            outcome = await self._send_turn(session, kind)
        self.counts[f"status {outcome.status}"] += 1
        if outcome.status >= 500 and outcome.status not in DOCUMENTED_ERRORS:
            self.counts["server_errors"] += 1
        return outcome

    async def _open_session(self) -> LiveSession:
        self.counts["sessions"] += 1
        outcome, body = await self._post("/sessions", self._gateway.admin_key, {})
        if outcome.status != 201:
            raise MeasurementError(f"cannot open a session: status {outcome.status}: {body[:160].decode()}")
        opened = json.loads(body)
        number = self.counts["sessions"]
        return LiveSession(opened["session_id"], Conversation(number, TURN_BYTES, opened["api_key"]))

    async def _send_turn(self, session: LiveSession, kind: CallKind) -> Outcome:
        conversation = session.conversation
        body = conversation.next_request()
        if kind != "complete":
            body = b'{"stream":true,' + body[1:]
        abandon_after_seconds = (
            self._random.uniform(0, MAX_DISCONNECT_SECONDS) if kind == "disconnecting" else None
        )
        headers = self._make_headers(conversation.key)
        outcome, received = await self._client.send(
            CHAT, headers, body, abandon_after_seconds=abandon_after_seconds
        )
        if outcome.reply_id is None:
            return outcome  # the agent abandons its session, which stays open until it times out
        conversation.add_reply(read_reply(received))
        if conversation.turn < TURNS:
            self._idle_sessions.append(session)
        else:
            await self._end_session(session)
        return outcome

    async def _end_session(self, session: LiveSession) -> None:
        """Complete the session with a reward from the agent and feedback from a user."""
        reward = {"reward": self._random.random()}
        path = f"/sessions/{session.session_id}/complete"
        feedback = {"session_id": session.session_id, "thumbs": self._random.choice(["up", "down"])}
        for request in (
            (path, session.conversation.key, reward),
            ("/feedback", self._gateway.admin_key, feedback),
        ):
            outcome, _ = await self._post(*request)
            self.counts["rewards" if outcome.status in (200, 201) else "rejected_rewards"] += 1

    async def _send_broken(self) -> Outcome:
        key, path, body = self._gateway.admin_key, CHAT, b'{"model":"m","messages":[]}'
        match self._random.randrange(5):
            case 0:
                body = b'{"model": "m", "messages": [{"role": "us'
            case 1:
                key = "sk-instar-unknown"
            case 2:
                path = f"/s/unknown{CHAT}"
            case 3:
                text = "too long " * 5000
                body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
            case _:
                return await self._send_incomplete()
        outcome, _ = await self._client.send(path, self._make_headers(key), body)
        return outcome

    async def _send_incomplete(self) -> Outcome:
        """Send a request with an incomplete body, and disconnect."""
        address = urlsplit(self._gateway.url)
        started_at = asyncio.get_running_loop().time()
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            head = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {self._gateway.admin_key}\r\n"
            writer.write(f"{head}content-length: 1000\r\n\r\n{{".encode())
            await asyncio.sleep(self._random.uniform(0, MAX_DISCONNECT_SECONDS))
            writer.close()
        return Outcome(started_at, asyncio.get_running_loop().time(), 0)

    async def _post(self, path: str, key: str, body: Any) -> tuple[Outcome, bytes]:
        return await self._client.send(path, self._make_headers(key), json.dumps(body).encode())

    def _make_headers(self, key: str) -> dict[str, str]:
        return {"content-type": "application/json", "authorization": f"Bearer {key}"}


def read_reply(body: bytes) -> str:
    """Return the text of a chat completion, streamed or not."""
    if not body.startswith(b"data:"):
        return json.loads(body)["choices"][0]["message"]["content"]
    events = [line[5:] for line in body.split(b"\n") if line.startswith(b"data:")]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
