"""Measure the gaps between the tokens of live streams while versions are promoted.

    python bench/live_swap.py [--json] [--rounds N] [--seconds S] [--streams N]

A gateway on a socket and the local engine serve a tiny model with random weights to 32 streams, each of
which sends one call after another. Rounds without and with a promotion alternate, because other programs on
the same machine change the speed; in a round with a promotion, a new version is promoted after a third of its
time. A gap is the time between two consecutive pieces of one reply.

``gap_ratio`` is the median over the rounds with a promotion of the longest gap, divided by the same median
over the others (goal: ≤ 2). ``gap_ratio_p95`` divides it by the 95th percentile of the gaps without a
promotion instead. ``failed`` counts calls that failed or did not end, and ``wrong_versions`` replies whose
tokens have different versions; both must be 0. ``versions`` is the number of versions that replied.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import torch
import uvloop
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM

from instar.config import GatewayConfig, LocalEngineConfig, ModelConfig
from instar.conformance.tiny import make_tiny_model
from instar.engines.local.engine import LocalEngine
from instar.gateway.app import create_app
from instar.gateway.live_policies import LiveOptions
from instar.gateway.serve import bind, serve
from instar.record.render import load_renderer
from instar.store.base import Run
from instar.store.sqlite import SqliteStore
from instar.types import Artifact, Policy, StepState

RUN = "swap"
ADMIN_KEY = "sk-instar-live-swap-bench"
ADAPTERS = 2
MAX_TOKENS = 64

console = Console(stderr=True)


@dataclass
class Stream:
    url: str
    number: int
    gaps: list[float] = field(default_factory=list[float])
    """The gaps of the current round, in seconds."""
    call_ids: list[str] = field(default_factory=list[str])
    failed: int = 0

    async def run(self, http: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with http.post(f"{self.url}/sessions", json={}, headers=headers) as response:
            base_url = (await response.json())["base_url"]
        while not stop.is_set():
            messages = [{"role": "user", "content": f"question {self.number}.{len(self.call_ids)}"}]
            body = {"model": "m", "messages": messages, "max_tokens": MAX_TOKENS, "stream": True}
            async with http.post(f"{base_url}/chat/completions", json=body, headers=headers) as response:
                await self._read(response)

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        previous, last, call_id = None, b"", None
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            now, last = time.perf_counter(), line.strip()
            if previous is not None:
                self.gaps.append(now - previous)
            if call_id is None and last != b"data: [DONE]":
                call_id = json.loads(line[6:]).get("id")
            previous = now
        if response.status == 200 and last == b"data: [DONE]" and call_id:
            self.call_ids.append(call_id)
        else:
            self.failed += 1


@dataclass
class Environment:
    store: SqliteStore
    url: str
    adapters: list[Artifact]

    async def promote(self, step: int) -> None:
        parent = (await self.store.latest_policy(RUN)).version
        version = await self.store.reserve_version(RUN, RUN, step, parent=parent, is_candidate=True)
        await self.store.claim_step(RUN, step, [])
        await self.store.publish(Policy(RUN, version, self.adapters[step % len(self.adapters)]))
        await self.store.advance_step(RUN, step, StepState.COMMITTED, version=version)
        await self.store.promote_version(RUN, version)


@asynccontextmanager
async def open_environment(folder: Path) -> AsyncGenerator[Environment]:
    model_folder = make_tiny_model(folder / "model")
    adapters = [save_adapter(model_folder, folder / f"adapter-{seed}", seed) for seed in range(ADAPTERS)]
    model = ModelConfig(name=str(model_folder), dtype="fp32", device="cpu", max_context=256)
    engine, store = LocalEngine(model, LocalEngineConfig(threads=1)), SqliteStore(folder / "store.db")
    await store.put_run(Run(RUN, RUN, {}))
    app = create_app(
        store=store,
        engine=engine,
        renderer=load_renderer(model_folder, model),
        run_id=RUN,
        agent_id="agent",
        policy_id=RUN,
        config=GatewayConfig(),
        admin_key=ADMIN_KEY,
        live=LiveOptions(),
    )
    listener, stop = bind("127.0.0.1", 0), asyncio.Event()
    server = asyncio.create_task(serve(app, listener, stop=stop, grace=1, reject_early=app.reject_early))
    try:
        yield Environment(store, f"http://127.0.0.1:{listener.getsockname()[1]}", adapters)
    finally:
        stop.set()
        await server
        await engine.close()
        await store.close()


def save_adapter(model_folder: Path, folder: Path, seed: int) -> Artifact:
    torch.manual_seed(seed)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return Artifact("adapter", str(folder))


async def measure(rounds: int, seconds: float, stream_count: int) -> dict[str, Any]:
    longest: dict[bool, list[float]] = {False: [], True: []}
    gaps_without: list[float] = []
    with tempfile.TemporaryDirectory(prefix="instar-live-swap-") as folder:
        async with open_environment(Path(folder)) as environment, aiohttp.ClientSession() as http:
            stop, streams = asyncio.Event(), [Stream(environment.url, n) for n in range(stream_count)]
            tasks = [asyncio.create_task(stream.run(http, stop)) for stream in streams]
            await asyncio.sleep(seconds)  # warm up
            for number in range(2 * rounds):
                has_swap = number % 2 == 1
                for stream in streams:
                    stream.gaps.clear()
                await asyncio.sleep(seconds / 3)
                if has_swap:
                    await environment.promote(number // 2 + 1)
                await asyncio.sleep(2 * seconds / 3)
                gaps = [gap for stream in streams for gap in stream.gaps]
                longest[has_swap].append(max(gaps))
                gaps_without += [] if has_swap else gaps
                console.print(f"round {number + 1}: longest gap {1000 * max(gaps):.0f} ms, swap: {has_swap}")
            stop.set()
            await asyncio.gather(*tasks)
            call_ids = [call_id for stream in streams for call_id in stream.call_ids]
            calls = [
                call for call_id in call_ids for call in await environment.store.calls_by_request(call_id)
            ]
    versions = [set(call.versions.tolist()) for call in calls]
    p95 = sorted(gaps_without)[int(0.95 * len(gaps_without))]
    return {
        "gap_ratio": round(median(longest[True]) / median(longest[False]), 2),
        "gap_ratio_p95": round(median(longest[True]) / p95, 2),
        "longest_gap_ms": round(1000 * median(longest[True]), 1),
        "longest_gap_without_swap_ms": round(1000 * median(longest[False]), 1),
        "p95_gap_without_swap_ms": round(1000 * p95, 1),
        "calls": len(calls),
        "failed": sum(stream.failed for stream in streams),
        "wrong_versions": sum(len(numbers) != 1 for numbers in versions),
        "versions": len(set().union(*versions)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with the figures as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="rounds with a promotion, and as many without")
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of a round")
    parser.add_argument("--streams", type=int, default=32)
    arguments = parser.parse_args()
    figures = uvloop.run(measure(arguments.rounds, arguments.seconds, arguments.streams))
    for name, value in figures.items():
        console.print(f"{name}: {value}")
    if arguments.json:
        sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
