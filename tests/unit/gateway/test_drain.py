"""A drained server completes its requests; later connections wait for the next server on the socket."""

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


class Served:
    def __init__(self, name: str) -> None:
        self.name = name
        self.go_on = asyncio.Event()
        self.stop, self.drain = asyncio.Event(), asyncio.Event()
        self.app = Starlette(routes=[Route("/slow", self.slow), Route("/who", self.who)])

    async def slow(self, request: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"first "
            await self.go_on.wait()
            yield b"last"

        return StreamingResponse(pieces())

    async def who(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse(self.name)


@pytest.mark.parametrize("cut_short", [False, True])
async def test_drained_server_completes_streams_and_leaves_new_connections(cut_short: bool) -> None:
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    one, two = Served("one"), Served("two")
    first = asyncio.create_task(serve(one.app, listener.dup(), stop=one.stop, drain=one.drain, grace=0.2))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as client:
        stream = await client.get(f"{url}/slow")
        assert await stream.content.readany() == b"first "
        one.drain.set()
        await asyncio.sleep(1.2)  # longer than the server's own look at whether it is to end
        request_task = asyncio.create_task(client.get(f"{url}/who"))
        await asyncio.sleep(0.1)
        assert not request_task.done()
        assert not first.done(), "a stream is under way"
        if cut_short:
            one.stop.set()
        else:
            one.go_on.set()
            assert await stream.content.read() == b"last"
        await asyncio.wait_for(first, 10)
        second = asyncio.create_task(serve(two.app, listener.dup(), stop=two.stop))
        assert await (await request_task).text() == "two"
        stream.close()
        two.stop.set()
        await asyncio.wait_for(second, 15)
    listener.close()
