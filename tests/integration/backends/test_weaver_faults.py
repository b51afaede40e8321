"""Training at Weaver through a line that fails all the time ends where an undisturbed run does."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from instar.backends.base import Backend
from instar.backends.local.backend import LocalBackend
from instar.backends.weaver import WeaverBackend
from instar.config import AdamConfig, LocalBackendConfig, LossConfig, ModelConfig, WeaverBackendConfig
from instar.conformance.batches import tree_samples
from instar.errors import BackendLost
from instar.gateway.serve import bind, serve
from instar.protocol.base import Limits
from instar.protocol.operations import LocalOperations
from instar.protocol.weaver.app import create_app
from instar.protocol.workshop import LocalWorkshop
from tests.tiny import make_tiny_model

KEY = "sk-weaver-faults"
ADAM = AdamConfig(lr=0.01)
STEPS, SAVE_EVERY = 16, 4
REFUSALS = [
    (503, b'{"error": "unavailable", "message": "not now", "retryable": true}'),
    (429, b'{"error": "rate_limited", "message": "slowly", "retryable": true}'),
    (502, b"<html>bad gateway"),
    (200, b"<html>log in first"),
]


class BadLine:
    """Before the server: turns requests away, or lets them through and loses the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._rng = random.Random(1)
        self.bad = False
        self.faults: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chance = self._rng.random() if self.bad else 1.0
        if chance < 0.15:
            status, body = self._rng.choice(REFUSALS)
            self.faults[str(status)] += 1
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": body})
        elif chance < 0.3:
            self.faults["answer lost"] += 1
            await self._lose_answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _lose_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """More is announced than comes, so that the connection is cut."""

        async def cut(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send({**message, "headers": [(b"content-length", b"99999")]})

        await self._app(scope, receive, cut)


@asynccontextmanager
async def served(model: ModelConfig, folder: Path) -> AsyncGenerator[tuple[str, BadLine]]:
    limits = Limits(max_models=64)
    workshop = LocalWorkshop(model, folder, base_model="tiny", limits=limits, threads=1)
    await workshop.start()
    operations = LocalOperations(limits)
    line = BadLine(create_app(workshop, operations, [KEY]))
    listener, stop = bind("127.0.0.1", 0), asyncio.Event()
    server = asyncio.create_task(serve(line, listener, stop=stop, grace=1))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", line
    finally:
        await operations.close()
        stop.set()
        await server
        await workshop.close()


async def step(backend: Backend, number: int) -> None:
    await asyncio.gather(
        backend.forward_backward(tree_samples(number), LossConfig()), backend.optim_step(ADAM)
    )


async def train(backend: WeaverBackend, folder: Path) -> None:
    """As the trainer does: what is lost is done again from the last saved state."""
    await backend.save_state(folder / "0")
    done = saved = 0
    lost = False
    while done < STEPS:
        try:
            if lost:
                await backend.load_state(folder / str(saved))
                done, lost = saved, False
            await step(backend, done)
            done += 1
            if done % SAVE_EVERY == 0:
                await backend.save_state(folder / str(done))
                saved = done
        except BackendLost:
            lost = True


@pytest.mark.timeout(300)
async def test_no_batch_is_trained_twice_or_lost(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    model = ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=256)
    async with served(model, tmp_path / "checkpoints") as (url, line):
        given = {"base_url": url, "api_key": KEY, "base_model": "tiny", "deadline": 60}
        far = WeaverBackend(model, WeaverBackendConfig.model_validate(given))
        await far.start()
        line.bad = True
        await train(far, tmp_path / "states")
        line.bad = False
        assert line.faults["answer lost"] > 3
        assert sum(line.faults.values()) > 8
        found = await far.forward(tree_samples())
        await far.close()
    here = LocalBackend(model, LocalBackendConfig(threads=1))
    for number in range(STEPS):
        await step(here, number)
    for x, y in zip(found, await here.forward(tree_samples()), strict=True):
        np.testing.assert_array_equal(x, y)
    await here.close()
