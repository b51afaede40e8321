"""The floor, the least that a recording proxy can do: forward, commit one row per call, then reply.

    python floor.py PORT UPSTREAM STORE ROW_BYTES

The row is the request's last ROW_BYTES, which is what is new in a long session: as many as the gateway
commits for such a call. One thread writes, with the pragmas of its store; calls that wait share a commit.
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


def write() -> None:
    db = sqlite3.connect(STORE, isolation_level=None)
    db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE calls (body)")
    while True:
        batch = [queue.get(), *(queue.get() for _ in range(min(queue.qsize(), 255)))]
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO calls VALUES (?)", [row for row, _ in batch])
        db.execute("COMMIT")
        waiting = [written for _, written in batch]
        waiting[0].get_loop().call_soon_threadsafe(release, waiting)


def release(waiting: list[asyncio.Future[None]]) -> None:
    for written in waiting:
        if not written.done():
            written.set_result(None)


async def commit(body: bytes) -> None:
    written = asyncio.get_running_loop().create_future()
    queue.put(((body[-ROW_BYTES:],), written))
    await written


async def forward(request: Request) -> Response:
    body, headers = await request.body(), {"content-type": "application/json"}
    answer = await request.app.state.client.post(f"{UPSTREAM}/chat/completions", data=body, headers=headers)
    if answer.content_type == "text/event-stream":
        return StreamingResponse(pieces(answer, body), media_type=answer.content_type)
    reply = await answer.read()
    await commit(body)
    return Response(reply, answer.status, media_type="application/json")


async def pieces(answer: aiohttp.ClientResponse, body: bytes):
    """As they come; the last one once the row is written."""
    held = b""
    async for piece in answer.content.iter_any():
        yield held
        held = piece
    await commit(body)
    yield held


async def main() -> None:
    threading.Thread(target=write, daemon=True).start()
    app = Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as app.state.client:
        config = uvicorn.Config(
            app, port=PORT, http="httptools", log_level="warning", access_log=False, backlog=2048
        )
        await uvicorn.Server(config).serve()


uvloop.run(main())
