"""Train and sample on a service while a proxy injects faults, and print the results as JSON.

    python -m tests.integration.backends.faults_program SERVICE URL MODEL FOLDER SELECTION

The interpreter must have the service's SDK. SELECTION is `faults` for all faults, `even` or `odd` for half of
them, or `idle` for pauses in which the service expires the session. The API key is read from the service's
environment variable.
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
from instar.config import AdamConfig, BackendConfig, CloudEngineConfig, ModelConfig
from instar.conformance.batches import make_sample
from instar.conformance.cases import LOSS
from instar.engines.base import Engine
from instar.errors import BackendError, EngineError
from instar.registry import load_object, resolve_section
from instar.types import Policy, Sample, SamplingParams
from tests.integration.backends.faulty_proxy import ANY_ENDPOINT, FAULTS, PERMANENT_FAULTS, Fault, FaultyProxy

ADAM = AdamConfig(lr=0.01)
CONCURRENCY = 8
CALL_TIMEOUT_SECONDS, SHORT_CALL_TIMEOUT_SECONDS = 150.0, 8.0
"""Values of the `deadline` setting. The long one exceeds the SDKs' own timeouts of up to 90 s. The short one
is for permanent faults and faults without a response, which would otherwise take that long."""
IDLE_SECONDS = 5.0
"""A pause after which the service has expired the session."""
MAX_ERRORS = 6
TICK_SECONDS = 0.02
SAMPLERS = {
    "tinker": "instar.engines.cloud.tinker:TinkerSampler",
    "mint": "instar.engines.cloud.tinker:MintSampler",
    "weaver": "instar.engines.cloud.weaver:WeaverSampler",
}
ACTION_COUNT = 14


def make_batch(step: int) -> list[Sample]:
    rng = np.random.default_rng(step)
    return [make_sample(f"{step}.{i}", rng.integers(3, 300, 12).tolist(), 5, step + i) for i in range(2)]


class TrainingScenario:
    """The actions that each run performs, in order, with or without faults. After an error, the run continues
    from the last saved state, as the trainer does."""

    def __init__(self, backend: Backend, engine: Engine, folder: Path) -> None:
        self.backend = backend
        self.engine = engine
        self.folder = folder
        self.saved_state_path: Path | None = None
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
            ("sampler.logprobs", self.compute_logprobs),
            ("reference_logprobs", self.compute_reference_logprobs),
            ("load_state", lambda: backend.load_state(self.folder / "two")),
            ("step", lambda: self.step(3)),
            ("forward", lambda: self.forward("after")),
        ]
        assert len(self.actions) == ACTION_COUNT

    async def forward(self, name: str) -> None:
        self.results[name] = [row[1:].tolist() for row in await self.backend.forward(make_batch(0))]

    async def step(self, number: int) -> None:
        # Both calls are sent before the response to the first call arrives.
        calls = (
            self.backend.forward_backward(make_batch(number), LOSS),
            self.backend.optim_step(ADAM),
        )
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def save(self, name: str, resume_at: int) -> None:
        await self.backend.save_state(self.folder / name)
        self.saved_state_path, self.resume_at = self.folder / name, resume_at

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

    async def compute_logprobs(self) -> None:
        self.results["scored"] = (await self.engine.logprobs([5, 6, 7, 8]))[1:].tolist()

    async def compute_reference_logprobs(self) -> None:
        self.results["reference"] = [
            row[1:].tolist() for row in await self.backend.reference_logprobs(make_batch(0))
        ]

    async def restore_state(self) -> int:
        """Load the last saved state, or start the backend if there is none. Return the index of the next
        action."""
        if self.saved_state_path is None:
            await self.backend.start()
            return 1
        await self.backend.load_state(self.saved_state_path)
        return self.resume_at


async def run_actions(
    scenario: TrainingScenario, proxy: FaultyProxy, key: str, idle_before: int | None
) -> list[dict[str, Any]]:
    """Run all actions and return the errors. After an error, the fault is disabled and the state restored.

    With ``idle_before``, pause before the action with this index. Stop after more than ``MAX_ERRORS`` errors.
    """
    errors: list[dict[str, Any]] = []
    index, must_restore = 0, False
    while index < len(scenario.actions):
        name, action = scenario.actions[index]
        if index == idle_before:
            idle_before = None
            await asyncio.sleep(IDLE_SECONDS)
        started_at = time.monotonic()
        try:
            if must_restore:
                name = "restore_state"
                index = await scenario.restore_state()
                must_restore = False
            else:
                await action()
                index += 1
        except Exception as error:  # noqa: BLE001 - the test checks the type of every error
            errors.append(describe_error(name, error, time.monotonic() - started_at, key))
            proxy.disable_fault()
            must_restore = must_restore or not name.startswith("sampler")
            if len(errors) > MAX_ERRORS:
                break
    return errors


def describe_error(name: str, error: Exception, seconds: float, key: str) -> dict[str, Any]:
    return {
        "action": name,
        "type": type(error).__name__,
        "is_expected": isinstance(error, (BackendError, EngineError)),
        "text": str(error),
        "seconds": seconds,
        "contains_key": key in "".join(traceback.format_exception(error)),
    }


class StallMonitor:
    """Measures the longest time that the event loop was blocked.

    The clock is a thread of this process, so time in which the process is not scheduled does not count.
    """

    def __init__(self) -> None:
        self._ticks = 0
        self._stopped = threading.Event()
        self.longest_seconds = 0.0

    def _count_ticks(self) -> None:
        while not self._stopped.wait(TICK_SECONDS):
            self._ticks += 1

    async def __aenter__(self) -> StallMonitor:
        threading.Thread(target=self._count_ticks, daemon=True).start()
        self._task = asyncio.create_task(self._measure_stalls())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stopped.set()
        self._task.cancel()

    async def _measure_stalls(self) -> None:
        previous = self._ticks
        while True:
            await asyncio.sleep(TICK_SECONDS)
            current = self._ticks
            self.longest_seconds = max(self.longest_seconds, (current - previous) * TICK_SECONDS)
            previous = current


class FaultRunner:
    """Runs the scenario many times, each time with a different fault or pause."""

    def __init__(self, service: str, url: str, model: str, folder: Path) -> None:
        self.service = service
        self.url = url
        self.model = ModelConfig(name=model, dtype="fp32", device="cpu", max_context=256)
        self.folder = folder
        self.key = os.environ[SERVICES[service].key_env]
        self.slots = asyncio.Semaphore(CONCURRENCY)

    async def run(
        self,
        proxy: FaultyProxy,
        name: str,
        timeout_seconds: float = CALL_TIMEOUT_SECONDS,
        idle_before: int | None = None,
    ) -> dict[str, Any]:
        settings = {"type": self.service, "base_url": proxy.url, "rank": 4, "deadline": timeout_seconds}
        section = TypeAdapter[Any](BackendConfig).validate_python(settings)
        backend: Backend = resolve_section("backends", section)(self.model, section, seed=7)
        engine_class: Any = load_object(SAMPLERS[self.service])
        engine: Engine = engine_class(self.model, section, CloudEngineConfig())
        folder = self.folder / name
        folder.mkdir()
        scenario = TrainingScenario(backend, engine, folder)
        errors = await run_actions(scenario, proxy, self.key, idle_before)
        finished_at = time.monotonic()
        await engine.close()
        await backend.close()
        return {
            "results": scenario.results,
            "errors": errors,
            "fault_count": proxy.fault_count,
            "timeout_seconds": timeout_seconds,
            "close_seconds": time.monotonic() - finished_at,
        }

    async def run_with_fault(
        self, number: int, endpoint: str, request_count: int, fault: Fault
    ) -> dict[str, Any]:
        """Run the scenario with a fault after half of the ``request_count`` requests that it sends to the
        endpoint."""
        proxy = FaultyProxy(self.url, endpoint, fault, after=request_count // 2)
        is_permanent = fault in PERMANENT_FAULTS
        timeout_seconds = SHORT_CALL_TIMEOUT_SECONDS if fault.hangs or is_permanent else CALL_TIMEOUT_SECONDS
        async with self.slots, proxy.serve():
            result = await self.run(proxy, str(number), timeout_seconds)
        return {"endpoint": endpoint, "fault": fault.name, "is_permanent": is_permanent, **result}

    async def run_with_pause(self, action_index: int) -> dict[str, Any]:
        async with self.slots, FaultyProxy(self.url).serve() as proxy:
            return await self.run(proxy, str(action_index), idle_before=action_index)

    async def run_cases(self, selection: str) -> dict[str, Any]:
        """Run the scenario without faults and then all selected cases, several at a time."""
        async with FaultyProxy(self.url).serve() as proxy:
            baseline = await self.run(proxy, "baseline")
        assert not baseline["errors"], baseline["errors"]
        # `close` sends the `finish` request and ignores its errors, so it gets no fault.
        request_counts = {name: count for name, count in proxy.request_counts.items() if "finish" not in name}
        if selection == "idle":
            cases = [self.run_with_pause(index) for index in range(1, ACTION_COUNT)]
        else:
            selected = [
                (endpoint, count, fault)
                for index, (endpoint, count) in enumerate(request_counts.items())
                for number, fault in enumerate(FAULTS)
                if selection == "faults" or ("even", "odd")[(index + number) % 2] == selection
            ]
            selected += [(ANY_ENDPOINT, proxy.request_counts.total(), fault) for fault in PERMANENT_FAULTS]
            cases = [self.run_with_fault(number, *case) for number, case in enumerate(selected)]
        async with StallMonitor() as monitor:
            case_results = await asyncio.gather(*cases)
        return {
            "baseline": baseline["results"],
            "endpoints": list(request_counts),
            "cases": case_results,
            "longest_stall_seconds": monitor.longest_seconds,
        }


if __name__ == "__main__":
    service, url, model, folder, selection = sys.argv[1:]
    Path(folder).mkdir()
    print(json.dumps(asyncio.run(FaultRunner(service, url, model, Path(folder)).run_cases(selection))))
