"""A draining server finishes its requests unless it is stopped; new connections wait for the next server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from instar.gateway.serve import bind, serve


class NamedServer:
    def __init__(self, name: str) -> None:
        self.name = name
        self.resume = asyncio.Event()
        self.stop, self.drain = asyncio.Event(), asyncio.Event()
        self.app = Starlette(routes=[Route("/slow", self.slow), Route("/who", self.who)])

    async def slow(self, request: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"first "
            await self.resume.wait()
            yield b"last"

        return StreamingResponse(pieces())

    async def who(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse(self.name)


@pytest.mark.parametrize("stop_early", [False, True])
async def test_draining_server_leaves_new_connections_to_the_next_server(stop_early: bool) -> None:
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    old, new = NamedServer("one"), NamedServer("two")
    old_task = asyncio.create_task(serve(old.app, listener.dup(), stop=old.stop, drain=old.drain, grace=0.2))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as client:
        stream = await client.get(f"{url}/slow")
        assert await stream.content.readany() == b"first "
        old.drain.set()
        await asyncio.sleep(1.2)  # Longer than the interval at which the server checks whether to stop.
        request_task = asyncio.create_task(client.get(f"{url}/who"))
        await asyncio.sleep(0.1)
        assert not request_task.done()
        assert not old_task.done(), "the server must wait for its stream"
        if stop_early:
            old.stop.set()
        else:
            old.resume.set()
            assert await stream.content.read() == b"last"
        await asyncio.wait_for(old_task, 10)
        new_task = asyncio.create_task(serve(new.app, listener.dup(), stop=new.stop))
        assert await (await request_task).text() == "two"
        stream.close()
        new.stop.set()
        await asyncio.wait_for(new_task, 15)
    listener.close()
