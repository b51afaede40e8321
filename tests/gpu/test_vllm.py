"""Tests for the vLLM engine on a GPU, with adapters and with merged weights.

Run them on a machine with a GPU: `python -m pytest tests/gpu/test_vllm.py`. Set INSTAR_TEST_VLLM to
a Python interpreter with vLLM if the current one does not have it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
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
    VllmEngineConfig,
)
from instar.conformance.batches import make_sample
from instar.engines.vllm.command import find_vllm
from instar.engines.vllm.engine import VllmEngine
from instar.errors import ConfigError
from instar.types import Policy, SamplingParams
from tests.tiny import make_tiny_model
from tests.unit.engines.conformance import TOKENIZER, collect, get_ids, get_logprobs, get_versions

PYTHON = os.environ.get("INSTAR_TEST_VLLM")
PROMPT = TOKENIZER.encode("What is 615 plus 278?")
MAX_MEAN_LOGPROB_DIFFERENCE = 0.06
"""The maximum mean difference between the logprobs of two implementations in bf16."""


def has_vllm() -> bool:
    try:
        return not find_vllm(PYTHON).is_cpu_build
    except ConfigError:
        return False


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not has_vllm(), reason="no interpreter with vLLM for GPUs; set INSTAR_TEST_VLLM"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=256, heads=4, kv_heads=2)
    return ModelConfig(name=str(folder), dtype="bf16", device="cuda", max_context=512)


@pytest.fixture(params=["adapter", "merged"])
async def engine(
    model: ModelConfig, request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[VllmEngine]:
    config = VllmEngineConfig(policy=request.param, python=PYTHON, gpu_memory=0.2, lora_rank=8)
    engine = VllmEngine(model, config)
    await engine.start(tmp_path / "engine.log", print)
    yield engine
    await engine.close()


async def test_engine_logprobs_match_the_trainer_after_each_update(
    engine: VllmEngine, model: ModelConfig, tmp_path: Path
) -> None:
    backend = LocalBackend(model, LocalBackendConfig(lora=LoraConfig(rank=8)), seed=1)
    await backend.start()
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=400, seed=1))
    streamed = [await anext(stream)]
    for version in (1, 2):
        ids = np.random.default_rng(version).integers(3, 300, 24).tolist()
        sample = make_sample("s", ids, 1, advantages=np.ones(24, np.float32))
        await backend.forward_backward([sample], LossConfig(name="cross_entropy"))
        await backend.optim_step(AdamConfig(lr=0.004))
        await engine.load(Policy("p", version, await backend.publish(tmp_path / f"v{version}")))
        chunks = await collect(engine, PROMPT, max_tokens=64, seed=version)
        assert set(get_versions(chunks)) == {version}
        sequence = [*PROMPT, *get_ids(chunks)]
        (expected,) = await backend.forward([make_sample("s", sequence, 1)])
        assert np.abs(expected[len(PROMPT) :] - get_logprobs(chunks)).mean() < MAX_MEAN_LOGPROB_DIFFERENCE
        assert np.abs(expected - await engine.logprobs(sequence))[1:].mean() < MAX_MEAN_LOGPROB_DIFFERENCE
    streamed += [chunk async for chunk in stream]
    assert get_versions(streamed) == sorted(get_versions(streamed))
    assert engine.mislabelled_tokens == 0
    await backend.close()


async def test_engine_completes_256_concurrent_replies(engine: VllmEngine) -> None:
    replies = await asyncio.gather(
        *(collect(engine, [*PROMPT, 3 + n], max_tokens=128, seed=n) for n in range(256))
    )
    assert all(chunks[-1].finish_reason for chunks in replies)
