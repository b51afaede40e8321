"""Trains and samples at a service over lines that are bad in every way at every place, and prints as JSON
what came of it.

Run by the interpreter of an environment that has the service's SDK. Its arguments are the service's name and
address, the model's folder, a folder to write in, and what to try: `faults`, `even` or `odd` for half of
them, or `idle`, where the service forgets whom it does not hear of. The key is in the service's variable.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from instar.backends.base import Backend
from instar.clouds.base import SERVICES
from instar.config import AdamConfig, BackendConfig, CloudEngineConfig, LossConfig, ModelConfig
from instar.conformance.batches import make_sample
from instar.engines.base import Engine
from instar.errors import BackendError, EngineError, InstarError
from instar.registry import load_object, resolve_section
from instar.types import Policy, Sample, SamplingParams
from tests.integration.backends.faulty_proxy import ANY_ENDPOINT, FAULTS, PERMANENT_FAULTS, Fault, FaultyProxy

ADAM = AdamConfig(lr=0.01)
CONCURRENCY = 8
DEADLINE, SHORT_DEADLINE = 150.0, 8.0
"""Of a call; the short one where the line does not answer. The SDKs themselves wait for up to 90 s."""
IDLE_SECONDS = 5.0
"""Seconds without a word, after which the service has forgotten the session."""
MAX_ERRORS = 6
TICK = 0.02
SAMPLERS = {
    "tinker": "instar.engines.cloud.tinker:TinkerSampler",
    "mint": "instar.engines.cloud.tinker:MintSampler",
    "weaver": "instar.engines.cloud.weaver:WeaverSampler",
}


ACTIONS = 14
"""Of the scene."""


def make_batch(step: int) -> list[Sample]:
    rng = np.random.default_rng(step)
    return [make_sample(f"{step}.{i}", rng.integers(3, 300, 12).tolist(), 5, step + i) for i in range(2)]


class TrainingScenario:
    """What every run does, in order. An action that fails is done again from the last saved state on, as the
    trainer does it."""

    def __init__(self, backend: Backend, engine: Engine, folder: Path) -> None:
        self.backend = backend
        self.engine = engine
        self.folder = folder
        self.saved_state: Path | None = None
        self.resume_at = 0
        self.results: dict[str, Any] = {}
        self.actions: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("start", backend.start),
            ("forward", lambda: self.forward("before")),
            ("step", lambda: self.step(1)),
            ("save_state", lambda: self.save("one", 4)),
            ("step", lambda: self.step(2)),
            ("publish", self.publish),
            ("save_state", lambda: self.save("two", 7)),
            ("sampler.load", self.load_sampler),
            ("sampler.generate", self.generate),
            ("sampler.logprobs", self.score),
            ("reference_logprobs", self.reference),
            ("load_state", lambda: backend.load_state(self.folder / "two")),
            ("step", lambda: self.step(3)),
            ("forward", lambda: self.forward("after")),
        ]
        assert len(self.actions) == ACTIONS

    async def forward(self, name: str) -> None:
        self.results[name] = [row[1:].tolist() for row in await self.backend.forward(make_batch(0))]

    async def step(self, number: int) -> None:
        """Both calls are on their way before the first is answered."""
        calls = (
            self.backend.forward_backward(make_batch(number), LossConfig()),
            self.backend.optim_step(ADAM),
        )
        done, moved = await asyncio.gather(*calls, return_exceptions=True)
        for result in (done, moved):
            if isinstance(result, BaseException):
                raise result

    async def save(self, name: str, resume_at: int) -> None:
        await self.backend.save_state(self.folder / name)
        self.saved_state, self.resume_at = self.folder / name, resume_at

    async def publish(self) -> None:
        self.artifact = await self.backend.publish(self.folder / "v000001")

    async def load_sampler(self) -> None:
        await self.engine.load(Policy("p", 1, self.artifact))

    async def generate(self) -> None:
        chunks = [
            chunk async for chunk in self.engine.generate([5, 6, 7], SamplingParams(max_tokens=4, seed=3))
        ]
        self.results["sampled"] = [chunk.token_ids for chunk in chunks]
        self.results["versions"] = [chunk.versions for chunk in chunks]

    async def score(self) -> None:
        self.results["scored"] = (await self.engine.logprobs([5, 6, 7, 8]))[1:].tolist()

    async def reference(self) -> None:
        self.results["reference"] = [
            row[1:].tolist() for row in await self.backend.reference_logprobs(make_batch(0))
        ]

    async def restore_state(self) -> int:
        """To the last saved state; the action to go on with."""
        if self.saved_state is None:
            await self.backend.start()
            return 1
        await self.backend.load_state(self.saved_state)
        return self.resume_at


async def run_actions(
    scene: TrainingScenario, line: FaultyProxy, key: str, idle_before: int | None
) -> list[dict[str, Any]]:
    """The errors on the way."""
    errors: list[dict[str, Any]] = []
    place, lost = 0, False
    while place < len(scene.actions):
        name, act = scene.actions[place]
        if place == idle_before:
            idle_before = None
            await asyncio.sleep(IDLE_SECONDS)
        began = time.monotonic()
        try:
            if lost:
                name = "go back"
                place = await scene.restore_state()
                lost = False
            else:
                await act()
                place += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is judged by who reads this
            errors.append(describe_error(name, error, time.monotonic() - began, key))
            line.disable_fault()
            lost = lost or not name.startswith("sampler")
            if len(errors) > MAX_ERRORS:
                break
    return errors


def describe_error(name: str, error: Exception, seconds: float, key: str) -> dict[str, Any]:
    complete = "".join(traceback.format_exception(error))
    return {
        "in": name,
        "error": type(error).__name__,
        "expected": isinstance(error, (BackendError, EngineError)),
        "ours": isinstance(error, InstarError),
        "text": str(error),
        "seconds": seconds,
        "key_shown": key in complete,
    }


class StallMonitor:
    """How long the event loop was not to be had, by a clock that stands still while the machine has no time
    for this process."""

    def __init__(self) -> None:
        self._beats = 0
        self._over = threading.Event()
        self.longest = 0.0

    def _beat(self) -> None:
        while not self._over.wait(TICK):
            self._beats += 1

    async def __aenter__(self) -> StallMonitor:
        threading.Thread(target=self._beat, daemon=True).start()
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._over.set()
        self._task.cancel()

    async def _tick(self) -> None:
        before = self._beats
        while True:
            await asyncio.sleep(TICK)
            now = self._beats
            self.longest = max(self.longest, (now - before) * TICK)
            before = now


class FaultRunner:
    def __init__(self, service: str, url: str, model: str, folder: Path) -> None:
        self.service = service
        self.url = url
        self.model = ModelConfig(name=model, dtype="fp32", device="cpu", max_context=256)
        self.folder = folder
        self.key = os.environ[SERVICES[service].key_env]
        self.slots = asyncio.Semaphore(CONCURRENCY)

    async def run(
        self, line: FaultyProxy, name: str, deadline: float = DEADLINE, idle_before: int | None = None
    ) -> dict[str, Any]:
        sent = {"type": self.service, "base_url": line.url, "rank": 4, "deadline": deadline}
        section = TypeAdapter[Any](BackendConfig).validate_python(sent)
        backend: Backend = resolve_section("backends", section)(self.model, section, seed=7)
        sampler: Any = load_object(SAMPLERS[self.service])
        engine: Engine = sampler(self.model, section, CloudEngineConfig())
        folder = self.folder / name
        folder.mkdir()
        scene = TrainingScenario(backend, engine, folder)
        errors = await run_actions(scene, line, self.key, idle_before)
        played = time.monotonic()
        await engine.close()
        await backend.close()
        return {
            "told": scene.results,
            "errors": errors,
            "struck": line.fault_count,
            "deadline": deadline,
            "closing": time.monotonic() - played,
        }

    async def run_with_fault(self, number: int, place: str, count: int, fault: Fault) -> dict[str, Any]:
        """The fault in the middle of the requests that are made for this."""
        line = FaultyProxy(self.url, place, fault, after=count // 2)
        deadline = SHORT_DEADLINE if fault.hangs or fault in PERMANENT_FAULTS else DEADLINE
        async with self.slots, line.serve():
            result = await self.run(line, str(number), deadline)
        return {"place": place, "fault": fault.name, "lasts": fault in PERMANENT_FAULTS, **result}

    async def run_with_idle(self, place: int) -> dict[str, Any]:
        async with self.slots, FaultyProxy(self.url).serve() as line:
            return await self.run(line, str(place), idle_before=place)

    async def main(self, what: str) -> dict[str, Any]:
        async with FaultyProxy(self.url).serve() as line:
            undisturbed = await self.run(line, "undisturbed")
        assert not undisturbed["errors"], undisturbed["errors"]
        places = {place: count for place, count in line.request_counts.items() if "finish" not in place}
        if what == "idle":
            cases = [self.run_with_idle(place) for place in range(1, ACTIONS)]
        else:
            chosen = [
                (place, count, fault)
                for index, (place, count) in enumerate(places.items())
                for number, fault in enumerate(FAULTS)
                if what == "faults" or ("even", "odd")[(index + number) % 2] == what
            ]
            chosen += [(ANY_ENDPOINT, line.request_counts.total(), fault) for fault in PERMANENT_FAULTS]
            cases = [self.run_with_fault(number, *case) for number, case in enumerate(chosen)]
        async with StallMonitor() as ticker:
            played = await asyncio.gather(*cases)
        return {
            "undisturbed": undisturbed["told"],
            "places": list(places),
            "cases": played,
            "longest_stall": ticker.longest,
        }


if __name__ == "__main__":
    service, url, model, folder, what = sys.argv[1:]
    Path(folder).mkdir()
    print(json.dumps(asyncio.run(FaultRunner(service, url, model, Path(folder)).main(what))))
