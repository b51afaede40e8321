"""A judge's endpoint with a limit: so many questions at once, each for so long; the others wait at the door.

    python bench/rewards_parts/endpoint.py --slots 16 --service 0.1 --faults 0.2

Prints its port. Of all questions, ``--faults`` are answered badly: by nothing at all, by 429, by garbage, or
by a connection that breaks off; the latter two after the time of a good answer. ``GET /stats`` tells what it
did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter

from aiohttp import web

SILENT_SECONDS = 3600.0


class Judge:
    def __init__(self, slots: int, service: float, faults: float) -> None:
        self.slots = asyncio.Semaphore(slots)
        self.service = service
        self.faults = faults
        self.random = random.Random(7)
        self.did: Counter[str] = Counter()
        self.first = self.last = 0.0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.first = self.first or time.monotonic()
        fault = ""
        if self.random.random() < self.faults:
            fault = self.random.choice(["silent", "busy", "garbage", "broken"])
        if fault == "silent":
            self.did["silent"] += 1
            await asyncio.sleep(SILENT_SECONDS)
        if fault == "busy":
            self.did["busy"] += 1
            return web.json_response(
                {"error": {"message": "busy"}}, status=429, headers={"Retry-After": "0.2"}
            )
        async with self.slots:
            await asyncio.sleep(self.service)
        self.last = time.monotonic()
        self.did[fault or "good"] += 1
        if fault == "broken":
            assert request.transport is not None
            request.transport.abort()
        said = "well, who knows" if fault == "garbage" else json.dumps({"reasons": "-", "score": 0.5})
        message = {"role": "assistant", "content": said}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    async def stats(self, request: web.Request) -> web.Response:
        served = sum(self.did[kind] for kind in ("good", "garbage", "broken"))
        return web.json_response({**self.did, "served": served, "seconds": self.last - self.first})


async def serve(judge: Judge) -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.answer)
    app.router.add_get("/stats", judge.stats)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    assert runner.addresses
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--service", type=float, required=True)
    parser.add_argument("--faults", type=float, default=0.0)
    arguments = parser.parse_args()

    async def run() -> None:
        await serve(Judge(arguments.slots, arguments.service, arguments.faults))

    asyncio.run(run())


if __name__ == "__main__":
    main()
