"""Tests that the local engine and backend match transformers on a GPU.

Run them on a machine with a GPU: `python -m pytest tests/gpu`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from instar.backends.local.backend import LocalBackend
from instar.config import AdamConfig, LocalBackendConfig, LocalEngineConfig, LossConfig, ModelConfig
from instar.engines.local.engine import LocalEngine
from instar.types import Policy, Sample, SamplingParams
from tests.tiny import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
PROMPTS = [list(range(3, 90)) + [10 + n] * (n + 1) for n in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return ModelConfig(name=str(folder), dtype="fp32", device="cuda", max_context=512)


async def sample(engine: LocalEngine, prompt: list[int], seed: int) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    logprobs: list[float] = []
    async for chunk in engine.generate(prompt, SamplingParams(max_tokens=24, seed=seed)):
        ids += chunk.token_ids
        logprobs += chunk.logprobs
    return ids, logprobs


def compute_logprobs(model: Any, prompt: list[int], sampled: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt + sampled])).logits[0].log_softmax(-1)
    return [float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(sampled)]


def make_sample(number: int, prompt: list[int], sampled: list[int], logprobs: list[float]) -> Sample:
    length = len(prompt) + len(sampled)
    mask = np.zeros(length, np.float32)
    mask[len(prompt) :] = 1
    padded_logprobs = np.full(length, np.nan, np.float32)
    padded_logprobs[len(prompt) :] = logprobs
    return Sample(
        sample_key=str(number),
        session_id=str(number),
        token_ids=np.asarray(prompt + sampled, np.int32),
        mask=mask,
        logprobs=padded_logprobs,
        advantages=mask * (1 if number % 2 else -1),
        versions=np.where(mask > 0, 0, -1).astype(np.int32),
    )


def test_engine_and_backend_logprobs_match_before_and_after_each_step(
    model: ModelConfig, tmp_path: Path
) -> None:
    async def run() -> None:
        engine = LocalEngine(model, LocalEngineConfig(), stop_at_eos=False)
        backend = LocalBackend(model, LocalBackendConfig())
        for version in range(3):
            replies = await asyncio.gather(*(sample(engine, p, seed) for seed, p in enumerate(PROMPTS)))
            samples = [
                make_sample(n, p, *reply) for n, (p, reply) in enumerate(zip(PROMPTS, replies, strict=True))
            ]
            for expected, logprobs in zip(samples, await backend.forward(samples), strict=True):
                trained = expected.mask > 0
                np.testing.assert_allclose(logprobs[trained], expected.logprobs[trained], atol=1e-3)
            if version == 0:
                reference = AutoModelForCausalLM.from_pretrained(model.name)
                for prompt, (ids, sampled_logprobs) in zip(PROMPTS, replies, strict=True):
                    reference_logprobs = compute_logprobs(reference, prompt, ids)
                    np.testing.assert_allclose(sampled_logprobs, reference_logprobs, atol=1e-3)
            await backend.forward_backward(samples, LossConfig())
            await backend.optim_step(AdamConfig(lr=1e-2))
            artifact = await backend.publish(tmp_path / f"v{version + 1}")
            await engine.load(Policy("p", version + 1, artifact))
        await engine.close()
        await backend.close()

    asyncio.run(run())
