"""What live streams see: samples without end, notes when tokens come, prints it when the input ends.

listen.py URL STREAMS TOKENS VOCAB
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time

from instar.engines.remote import RemoteEngine
from instar.types import SamplingParams


async def stream(engine: RemoteEngine, tokens: int, vocab: int, replies: list[list[float]]) -> None:
    """One list of times per reply."""
    while True:
        times: list[float] = []
        replies.append(times)
        prompt = [random.randrange(vocab) for _ in range(16)]
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=tokens)):
            times.append(time.monotonic())


async def main(url: str, streams: int, tokens: int, vocab: int) -> None:
    engine = await RemoteEngine.connect(url)
    replies: list[list[float]] = []
    running = [asyncio.create_task(stream(engine, tokens, vocab, replies)) for _ in range(streams)]
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    done, _ = await asyncio.wait([*running, ended], return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        for task in done:
            task.result()  # a stream that failed
    await asyncio.gather(*running, return_exceptions=True)
    print(json.dumps(replies), flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5])))
