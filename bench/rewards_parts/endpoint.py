"""A judge endpoint with limited capacity.

    python bench/rewards_parts/endpoint.py --slots 16 --service 0.1 --faults 0.2

It prints its port and handles up to ``--slots`` concurrent requests, each in ``--service`` seconds. A
fraction ``--faults`` of the requests fails: no response, status 429, an invalid reply or a broken connection.
The last two take as long as a valid reply. ``GET /stats`` returns the number of requests by outcome, the
number served and the time from the first request to the last reply.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter

from aiohttp import web

NO_RESPONSE_SECONDS = 3600.0


class JudgeEndpoint:
    def __init__(self, slots: int, service_seconds: float, fault_rate: float) -> None:
        self.slots = asyncio.Semaphore(slots)
        self.service_seconds = service_seconds
        self.fault_rate = fault_rate
        self.random = random.Random(7)
        self.outcome_counts: Counter[str] = Counter()
        self.first_request_at = self.last_reply_at = 0.0

    async def handle_completion(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.first_request_at = self.first_request_at or time.monotonic()
        fault = ""
        if self.random.random() < self.fault_rate:
            fault = self.random.choice(["silent", "busy", "malformed", "broken"])
        if fault == "silent":
            self.outcome_counts["silent"] += 1
            await asyncio.sleep(NO_RESPONSE_SECONDS)
        if fault == "busy":
            self.outcome_counts["busy"] += 1
            return web.json_response(
                {"error": {"message": "busy"}}, status=429, headers={"Retry-After": "0.2"}
            )
        async with self.slots:
            await asyncio.sleep(self.service_seconds)
        self.last_reply_at = time.monotonic()
        self.outcome_counts[fault or "good"] += 1
        if fault == "broken":
            assert request.transport is not None
            request.transport.abort()
        content = "not JSON" if fault == "malformed" else json.dumps({"reasons": "-", "score": 0.5})
        message = {"role": "assistant", "content": content}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    async def handle_stats(self, request: web.Request) -> web.Response:
        served = sum(self.outcome_counts[outcome] for outcome in ("good", "malformed", "broken"))
        seconds = self.last_reply_at - self.first_request_at
        return web.json_response({**self.outcome_counts, "served": served, "seconds": seconds})


async def serve(judge: JudgeEndpoint) -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.handle_completion)
    app.router.add_get("/stats", judge.handle_stats)
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
        await serve(JudgeEndpoint(arguments.slots, arguments.service, arguments.faults))

    asyncio.run(run())


if __name__ == "__main__":
    main()
