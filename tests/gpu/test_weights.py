"""Tests for sending weights through GPU memory.

Run them on a machine with a GPU: `python -m pytest tests/gpu/test_weights.py`. Set INSTAR_TEST_VLLM
to a Python interpreter with vLLM if the current one does not have it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from instar.backends.local.backend import LocalBackend
from instar.config import (
    AdamConfig,
    LocalBackendConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    RunConfig,
    SyncConfig,
)
from instar.conformance.batches import make_sample
from instar.engines.remote import RemoteEngine
from instar.sync.factory import create_sync_route
from instar.sync.shared import SharedBuffer
from instar.types import Artifact, Policy
from tests.integration.vllm.servers import TOKEN, ServedEngine, make_vllm_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
PYTHON = os.environ.get("INSTAR_TEST_VLLM")
needs_vllm = pytest.mark.skipif(
    PYTHON is None and find_spec("vllm") is None, reason="no interpreter with vLLM; set INSTAR_TEST_VLLM"
)
READER_SCRIPT = """
import json, sys, torch
from instar.engines.vllm.extension import create_buffer_views, open_buffer
handle, layout = json.loads(sys.stdin.readline())
torch.cuda.init()
tensors = dict(create_buffer_views(open_buffer(handle, torch.device("cuda", 0)), layout))
for line in sys.stdin:
    print(json.dumps({name: tensor.float().sum().item() for name, tensor in tensors.items()}), flush=True)
"""


def test_open_buffer_in_another_process_sees_later_writes() -> None:
    buffer = SharedBuffer([("a", "bfloat16", [2, 3], 0), ("b", "float32", [4], 256)], "cuda")
    with subprocess.Popen(
        [sys.executable, "-c", READER_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(json.dumps([buffer.handle, buffer.layout]) + "\n")
        for value in (1.0, 2.0):
            buffer.views["a"].fill_(value)
            buffer.views["b"].fill_(10 * value)
            buffer.synchronize()
            reader.stdin.write("read\n")
            reader.stdin.flush()
            assert json.loads(reader.stdout.readline()) == {"a": 6 * value, "b": 40 * value}
        reader.stdin.close()
    buffer.close()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder: Path = make_vllm_model(tmp_path_factory.mktemp("tiny"))
    return RunConfig.model_validate(
        {
            "model": {"name": str(folder), "dtype": "bf16", "device": "cuda", "max_context": 256},
            "engine": {
                "type": "vllm",
                "policy": "merged",
                "gpu_memory": 0.2,
                "eager": True,
                "python": PYTHON,
            },
        }
    )


@pytest.fixture(scope="module")
def served(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """Serve an engine whose NCCL host id differs from the trainer's, because NCCL rejects two ranks with the
    same host id on one GPU."""
    log_path = tmp_path_factory.mktemp("logs") / "engine.log"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NCCL_MNNVL_ENABLE", "0")
        environment.setenv("NCCL_HOSTID", "engine")
        served = ServedEngine(config, log_path)
        environment.setenv("NCCL_HOSTID", "trainer")
        yield served
        served.close()


@needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("route", "first_version"), [("auto", 1), ("nccl", 11)])
async def test_push_from_gpu_to_gpu_updates_the_served_weights(
    config: RunConfig, served: ServedEngine, route: str, first_version: int
) -> None:
    engine = await RemoteEngine.connect(served.url, TOKEN)
    model = ModelConfig.model_validate(config.model.model_dump())
    backend = LocalBackend(model, LocalBackendConfig(lora=LoraConfig(rank=4)))
    config = config.model_copy(update={"sync": SyncConfig.model_validate({"route": route})})
    sync = await create_sync_route(config, backend, [engine])
    assert sync.description.startswith("ipc" if route == "auto" else "nccl")
    ids = np.random.default_rng(0).integers(3, 300, 40).tolist()
    sample = make_sample("s", ids, 1, advantages=np.ones(40, np.float32))
    (before,) = await backend.forward([sample])
    for version in range(first_version, first_version + 3):
        await backend.forward_backward([sample], LossConfig(name="cross_entropy"))
        await backend.optim_step(AdamConfig(lr=0.004, grad_clip_norm=0))
        assert await sync.push(Policy("p", version, Artifact("live")), [engine]) == [None]
        (expected,) = await backend.forward([sample])
        actual = await engine.logprobs(ids)
        assert np.abs(actual - expected)[1:].mean() < 0.06
        assert np.abs(actual - before)[1:].mean() > 0.2
    await sync.close()
    await engine.close()
    await backend.close()
