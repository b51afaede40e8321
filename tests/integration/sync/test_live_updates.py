"""Tests for sending weights to a real vLLM server through shared memory and Ray's object store."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from instar.config import RunConfig
from instar.engines.base import Engine
from instar.engines.remote import RemoteEngine
from instar.engines.vllm.client import VllmClient
from instar.errors import ConfigError, SyncError
from instar.sync.factory import create_sync_route
from instar.sync.shared import SharedBuffer, WeightPlacement
from instar.types import Artifact, Policy, SamplingParams
from tests.integration.backends.environments import ROOT
from tests.integration.vllm.parity import LOGPROB_TOLERANCE, PROMPT, Training, check_parity
from tests.integration.vllm.servers import (
    TOKEN,
    ServedEngine,
    make_model_config,
    make_vllm_config,
    make_vllm_model,
)
from tests.tiny import make_tiny_model
from tests.unit.engines.conformance import get_versions

pytestmark = pytest.mark.timeout(600)
MAX_CONTEXT = 2048
LONG_REPLY_TOKENS = 2000
"""A reply of this length does not end before new weights arrive, even if this process is rarely scheduled."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def served(tiny: Path, cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """Serve a vLLM engine. It starts after the cluster, because its workers need the cluster's token."""
    config = RunConfig(model=make_model_config(tiny, MAX_CONTEXT), engine=make_vllm_config(policy="merged"))
    served = ServedEngine(config, tmp_path_factory.mktemp("logs") / "engine.log")
    yield served
    served.close()


@pytest.fixture
async def engine(served: ServedEngine) -> AsyncIterator[RemoteEngine]:
    engine = await RemoteEngine.connect(served.url, TOKEN)
    yield engine
    await engine.close()


def make_config(tiny: Path, route: str) -> RunConfig:
    return RunConfig.model_validate(
        {"model": make_model_config(tiny, MAX_CONTEXT).model_dump(), "sync": {"route": route, "chunk_mib": 1}}
    )


@pytest.mark.parametrize(("route", "lora"), [("ipc", True), ("ipc", False), ("ray", True)])
async def test_engine_matches_the_trainer_after_each_push(
    route: str, lora: bool, engine: RemoteEngine, tiny: Path, tmp_path: Path
) -> None:
    """Covers a merged adapter and full weights, with tied input and output embeddings."""
    training = Training(tiny, tmp_path, lora=lora)
    sync = await create_sync_route(make_config(tiny, route), training.backend, [engine])
    assert sync.is_live
    assert sync.description.startswith(route)
    previous = await engine.logprobs(PROMPT)
    for _ in range(2):
        policy = await training.step()
        assert await sync.push(Policy("p", policy.version, Artifact("live")), [engine]) == [None]
        await check_parity(engine, training, policy)
        logprobs = await engine.logprobs(PROMPT)
        assert np.abs(logprobs - previous)[1:].max() > 10 * LOGPROB_TOLERANCE, (
            "the new version must differ from the previous one"
        )
        previous = logprobs
    await engine.load(Policy("p", 0, Artifact("base")))
    await sync.close()
    await training.backend.close()


async def test_reply_continues_under_new_weights(engine: RemoteEngine, tiny: Path, tmp_path: Path) -> None:
    training = Training(tiny, tmp_path)
    sync = await create_sync_route(make_config(tiny, "ipc"), training.backend, [engine])
    version = (await training.step()).version
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=LONG_REPLY_TOKENS, temperature=0))
    chunks = [await anext(stream)]
    assert await sync.push(Policy("p", version, Artifact("live")), [engine]) == [None]
    chunks += [chunk async for chunk in stream]
    versions = get_versions(chunks)
    assert len(versions) == LONG_REPLY_TOKENS or chunks[-1].finish_reason == "stop"
    assert versions == sorted(versions)
    assert {versions[0], versions[-1]} == {0, 1}
    await engine.load(Policy("p", 0, Artifact("base")))
    await sync.close()
    await training.backend.close()


async def test_unreachable_engine_does_not_affect_others(
    engine: RemoteEngine, tiny: Path, tmp_path: Path
) -> None:
    training = Training(tiny, tmp_path)
    unreachable = RemoteEngine("http://127.0.0.1:9", TOKEN)
    policy = await training.step()
    sync = await create_sync_route(make_config(tiny, "ray"), training.backend, [engine])
    error, no_error = await sync.push(Policy("p", policy.version, Artifact("live")), [unreachable, engine])
    assert isinstance(error, SyncError)
    assert no_error is None
    await check_parity(engine, training, policy)
    await engine.load(Policy("p", 0, Artifact("base")))
    await sync.close()
    await unreachable.close()
    await training.backend.close()


async def test_push_rejects_weights_of_a_different_shape(
    engine: RemoteEngine, tiny: Path, tmp_path: Path
) -> None:
    mismatched = Training(make_tiny_model(tmp_path / "mismatched", hidden=64, heads=2, kv_heads=2), tmp_path)
    await mismatched.step()
    before = await engine.logprobs(PROMPT)
    for route in ("ipc", "ray"):
        sync = await create_sync_route(make_config(tiny, route), mismatched.backend, [engine])
        (error,) = await sync.push(Policy("p", 1, Artifact("live")), [engine])
        assert isinstance(error, SyncError)
        assert "architecture of the base model" in str(error)
        await sync.close()
    assert (await engine.status()).version == 0
    np.testing.assert_array_equal(await engine.logprobs(PROMPT), before)
    await mismatched.backend.close()


async def test_worker_that_fails_during_commit_can_load_weights_again(
    engine: RemoteEngine, served: ServedEngine, tiny: Path
) -> None:
    """Calls vLLM directly, because the engine would reject these weights before vLLM loads them."""
    client: VllmClient = served.engine._server.client  # type: ignore[attr-defined]
    before = await engine.logprobs(PROMPT)
    weights = load_file(tiny / "model.safetensors")
    layout: list[WeightPlacement] = []
    end = 0
    for name, tensor in weights.items():
        shape = [7] if name == "model.norm.weight" else list(tensor.shape)
        layout.append((name, "float32", shape, end))
        end += 4 * tensor.numel()
    buffer = SharedBuffer(layout, "cpu")
    body = {"key": "p:1", "buffer": buffer.name, "handle": buffer.handle, "layout": layout}

    def call_worker(method: str) -> Any:
        return served.run_in_loop(client.rpc(method, {"text": json.dumps(body)}))

    assert await asyncio.to_thread(call_worker, "instar_stage") == [{"known": True}]
    (result,) = await asyncio.to_thread(call_worker, "instar_commit")
    assert result["weights_changed"]
    assert "7" in result["error"]
    (result,) = await asyncio.to_thread(call_worker, "instar_commit")
    assert result == {"error": "No weights are staged for the policy p:1.", "weights_changed": False}
    await engine.load(Policy("p", 0, Artifact("base")))
    np.testing.assert_array_equal(await engine.logprobs(PROMPT), before)
    buffer.close()


async def test_push_sends_a_model_sharded_over_two_ranks(
    engine: RemoteEngine, served: ServedEngine, cluster: str, tiny: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", "0", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "tests.integration.sync.sharded"]
    completed = await asyncio.to_thread(
        subprocess.run,
        [*command, str(tiny), served.url, TOKEN, cluster],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    output = json.loads(completed.stdout.splitlines()[-1])
    assert (await engine.status()).version == 11
    actual = await engine.logprobs(output["ids"])
    np.testing.assert_allclose(actual[1:], output["logprobs"], atol=LOGPROB_TOLERANCE)
    await engine.load(Policy("p", 0, Artifact("base")))


async def test_create_sync_route_rejects_an_unavailable_route(
    engine: Engine, tiny: Path, tmp_path: Path
) -> None:
    training = Training(tiny, tmp_path)
    with pytest.raises(ConfigError, match=r"sync.route: 'nccl' cannot be used: .*Available: ipc, ray, files"):
        await create_sync_route(make_config(tiny, "nccl"), training.backend, [engine])
    await training.backend.close()
