"""The floor: a minimal recording proxy that forwards each call, commits one row, then replies.

    python floor.py PORT UPSTREAM STORE ROW_BYTES

The row contains the last ROW_BYTES of the request. In a long session, this is the new part of the request,
about as much as the gateway commits for such a call. A single thread writes the rows, with the same pragmas
as the gateway's store. Concurrent calls share a commit.
"""

import asyncio
import sqlite3
import sys
import threading
from queue import SimpleQueue

import aiohttp
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

PORT, UPSTREAM, STORE, ROW_BYTES = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
queue: SimpleQueue = SimpleQueue()


def write_rows() -> None:
    db = sqlite3.connect(STORE, isolation_level=None)
    db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE calls (body)")
    while True:
        batch = [queue.get(), *(queue.get() for _ in range(min(queue.qsize(), 255)))]
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO calls VALUES (?)", [row for row, _ in batch])
        db.execute("COMMIT")
        futures = [future for _, future in batch]
        futures[0].get_loop().call_soon_threadsafe(resolve, futures)


def resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


async def commit(body: bytes) -> None:
    future = asyncio.get_running_loop().create_future()
    queue.put(((body[-ROW_BYTES:],), future))
    await future


async def forward(request: Request) -> Response:
    body, headers = await request.body(), {"content-type": "application/json"}
    response = await request.app.state.client.post(f"{UPSTREAM}/chat/completions", data=body, headers=headers)
    if response.content_type == "text/event-stream":
        return StreamingResponse(forward_stream(response, body), media_type=response.content_type)
    reply = await response.read()
    await commit(body)
    return Response(reply, response.status, media_type="application/json")


async def forward_stream(response: aiohttp.ClientResponse, body: bytes):
    """Yield the chunks of the stream. The last one is held back until the row is committed."""
    previous = b""
    async for chunk in response.content.iter_any():
        yield previous
        previous = chunk
    await commit(body)
    yield previous


async def main() -> None:
    threading.Thread(target=write_rows, daemon=True).start()
    app = Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as app.state.client:
        config = uvicorn.Config(
            app, port=PORT, http="httptools", log_level="warning", access_log=False, backlog=2048
        )
        await uvicorn.Server(config).serve()


uvloop.run(main())
