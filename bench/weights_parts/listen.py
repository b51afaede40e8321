"""Read tokens from live streams continuously, and print their arrival times when stdin closes.

python listen.py URL STREAMS TOKENS VOCAB
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


async def collect_token_times(
    engine: RemoteEngine, tokens: int, vocab: int, token_times: list[list[float]]
) -> None:
    """Sample replies until cancelled. Append the list of arrival times of each reply to ``token_times``."""
    while True:
        times: list[float] = []
        token_times.append(times)
        prompt = [random.randrange(vocab) for _ in range(16)]
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=tokens)):
            times.append(time.monotonic())


async def main(url: str, streams: int, tokens: int, vocab: int) -> None:
    engine = await RemoteEngine.connect(url)
    token_times: list[list[float]] = []
    stream_tasks = [
        asyncio.create_task(collect_token_times(engine, tokens, vocab, token_times)) for _ in range(streams)
    ]
    input_closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    done, _ = await asyncio.wait([*stream_tasks, input_closed], return_when=asyncio.FIRST_COMPLETED)
    for task in stream_tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        for task in done:
            task.result()  # raises if a stream failed
    await asyncio.gather(*stream_tasks, return_exceptions=True)
    print(json.dumps(token_times), flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5])))
