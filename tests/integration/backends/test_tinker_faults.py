"""Training at Tinker through a line that fails all the time ends where an undisturbed run does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from instar.backends.local.backend import LocalBackend
from instar.backends.tinker import TinkerBackend
from instar.config import LocalBackendConfig, ModelConfig, TinkerBackendConfig
from instar.conformance.batches import tree_samples
from instar.gateway.serve import bind, serve
from instar.protocol.base import Limits
from instar.protocol.operations import LocalOperations
from instar.protocol.tinker.app import create_app
from instar.protocol.workshop import LocalWorkshop
from tests.integration.backends.test_weaver_faults import STEPS, BadLine, step, train
from tests.sdk_leaks import LEAKS, collected
from tests.tiny import make_tiny_model

KEY = "tml-faults"
pytestmark = LEAKS


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


@pytest.mark.timeout(480)
async def test_no_batch_is_trained_twice_or_lost(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    model = ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=256)
    with collected():
        async with served(model, tmp_path / "checkpoints") as (url, line):
            section = TinkerBackendConfig(base_url=url, api_key=KEY, base_model="tiny", deadline=120)
            far = TinkerBackend(model, section)
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
