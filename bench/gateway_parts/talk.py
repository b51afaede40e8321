"""Conversations that grow turn by turn, held by many clients at once in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from gateway_parts.load import filler
from gateway_parts.processes import DidNotStart
from gateway_parts.servers import Gateway
from gateway_parts.stub import REPLY

T = TypeVar("T")

IN_FLIGHT = 32


@dataclass
class Talk:
    """One session. Each turn sends everything so far and a new message of ``size`` bytes."""

    number: int
    size: int
    key: str = "none"
    turn: int = 0
    said: bytearray = field(default_factory=bytearray)

    def ask(self) -> bytes:
        """The next turn's request."""
        self.turn += 1
        text = f"Worker {self.number}, turn {self.turn}: {filler(self.size, self.number * 1000 + self.turn)}"
        self._say("user", text)
        return b'{"model":"bench","messages":[' + self.said + b"]}"

    def hear(self, reply: str) -> None:
        self._say("assistant", reply)

    def skip_to(self, turn: int) -> None:
        """As if the turns up to this one had been held."""
        while self.turn < turn:
            self.ask()
            self.hear(REPLY)

    def _say(self, role: str, content: str) -> None:
        if self.said:
            self.said += b","
        self.said += json.dumps({"role": role, "content": content}).encode()


async def open_talks(gateway: Gateway, count: int, size: int) -> list[Talk]:
    headers = {"Authorization": f"Bearer {gateway.admin_key}"}

    async def open_one(client: aiohttp.ClientSession, number: int) -> Talk:
        async with client.post(f"{gateway.url}/sessions", json={}, headers=headers) as answer:
            if answer.status != 201:
                raise DidNotStart(f"a session was not opened: {(await answer.text())[:160]}")
            return Talk(number, size, (await answer.json())["api_key"])

    async with _client() as client:
        return await _pool([open_one(client, number) for number in range(count)])


async def hold(url: str, talks: Sequence[Talk], turns: int) -> None:
    """So many further turns of each, one after the other within a talk."""

    async def hold_one(client: aiohttp.ClientSession, talk: Talk) -> None:
        headers = {"Authorization": f"Bearer {talk.key}", "Content-Type": "application/json"}
        for _ in range(turns):
            async with client.post(f"{url}/v1/chat/completions", data=talk.ask(), headers=headers) as answer:
                text = await answer.text()
            if answer.status != 200:
                raise DidNotStart(f"turn {talk.turn} was answered with {answer.status}: {text[:160]}")
            reply = json.loads(text)["choices"][0]["message"]["content"]
            if reply != REPLY:
                raise DidNotStart(f"turn {talk.turn} has another reply: {reply[:160]}")
            talk.hear(reply)

    async with _client() as client:
        await _pool([hold_one(client, talk) for talk in talks])


def _client() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=IN_FLIGHT)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120))


async def _pool(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All of them, so many at once, begun in order."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def one(work: Coroutine[Any, Any, T]) -> T:
        async with room:
            return await work

    return await asyncio.gather(*[one(work) for work in works])
