"""Conversations that grow turn by turn, many at a time in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from gateway_parts.load import make_filler
from gateway_parts.processes import MeasurementError
from gateway_parts.servers import GatewayProcess
from gateway_parts.stub import REPLY

T = TypeVar("T")

MAX_IN_FLIGHT = 32


@dataclass
class Conversation:
    """A session in which each turn sends the full history and a new message of ``size`` bytes."""

    number: int
    size: int
    key: str = "none"
    turn: int = 0
    messages: bytearray = field(default_factory=bytearray)
    """The messages as JSON, separated by commas."""

    def next_request(self) -> bytes:
        """Start the next turn and return the body of its request."""
        self.turn += 1
        filler = make_filler(self.size, self.number * 1000 + self.turn)
        self._append_message("user", f"Worker {self.number}, turn {self.turn}: {filler}")
        return b'{"model":"bench","messages":[' + self.messages + b"]}"

    def add_reply(self, reply: str) -> None:
        self._append_message("assistant", reply)

    def skip_to(self, turn: int) -> None:
        """Advance to this turn with the stub's replies, without sending requests."""
        while self.turn < turn:
            self.next_request()
            self.add_reply(REPLY)

    def _append_message(self, role: str, content: str) -> None:
        if self.messages:
            self.messages += b","
        self.messages += json.dumps({"role": role, "content": content}).encode()


async def open_conversations(gateway: GatewayProcess, count: int, size: int) -> list[Conversation]:
    headers = {"Authorization": f"Bearer {gateway.admin_key}"}

    async def open_one(client: aiohttp.ClientSession, number: int) -> Conversation:
        async with client.post(f"{gateway.url}/sessions", json={}, headers=headers) as response:
            if response.status != 201:
                raise MeasurementError(f"cannot open a session: {(await response.text())[:160]}")
            return Conversation(number, size, (await response.json())["api_key"])

    async with _create_client() as client:
        return await _gather_limited([open_one(client, number) for number in range(count)])


async def run_turns(url: str, conversations: Sequence[Conversation], turns: int) -> None:
    """Run ``turns`` more turns of each conversation. The conversations run concurrently.

    Raises MeasurementError if a turn fails or the reply is not the stub's.
    """

    async def run_one(client: aiohttp.ClientSession, conversation: Conversation) -> None:
        headers = {"Authorization": f"Bearer {conversation.key}", "Content-Type": "application/json"}
        for _ in range(turns):
            body = conversation.next_request()
            async with client.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
                text = await response.text()
            if response.status != 200:
                raise MeasurementError(
                    f"turn {conversation.turn} failed with status {response.status}: {text[:160]}"
                )
            reply = json.loads(text)["choices"][0]["message"]["content"]
            if reply != REPLY:
                raise MeasurementError(
                    f"turn {conversation.turn} returned an unexpected reply: {reply[:160]}"
                )
            conversation.add_reply(reply)

    async with _create_client() as client:
        await _gather_limited([run_one(client, conversation) for conversation in conversations])


def _create_client() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=MAX_IN_FLIGHT)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120))


async def _gather_limited(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines, at most MAX_IN_FLIGHT at a time, and return their results in order."""
    semaphore = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def run_one(coroutine: Coroutine[Any, Any, T]) -> T:
        async with semaphore:
            return await coroutine

    return await asyncio.gather(*[run_one(coroutine) for coroutine in coroutines])
