"""Train, save, load, publish and sample through the MinT adapters, and print the results as JSON.

Runs in its own environment, because MinT and the tests require different versions of tinker. Its arguments
are the service's URL, the model folder and an output folder. The API key is read from MINT_API_KEY.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from instar.backends.tinker import MintBackend
from instar.config import AdamConfig, CloudEngineConfig, LossConfig, MintBackendConfig, ModelConfig
from instar.conformance.batches import make_sample
from instar.engines.cloud.tinker import MintSampler
from instar.types import Floats, Policy, Sample, SamplingParams

ADAM = AdamConfig(lr=0.01, eps=1e-8, grad_clip_norm=0.0)
STEPS = 3
PROMPT = [5, 6, 7, 8, 9]


def make_batch() -> list[Sample]:
    """Return samples of equal length, because SkyRL recompiles for each new length."""
    rng = np.random.default_rng(0)
    return [make_sample(f"s{i}", rng.integers(3, 300, 30).tolist(), 12 + i, i) for i in range(4)]


def to_json_lists(arrays: list[Floats]) -> list[list[float | None]]:
    return [[None if np.isnan(x) else float(x) for x in array] for array in arrays]


async def main(url: str, model_folder: str, scratch: Path) -> dict[str, Any]:
    environment = {name: os.environ.get(name) for name in ("TINKER_API_KEY", "TINKER_BASE_URL")}
    model = ModelConfig(name=model_folder, dtype="fp32", device="cpu", max_context=256)
    config = MintBackendConfig(base_url=url, rank=8, deadline=120)
    backend = MintBackend(model, config, seed=5)
    samples, loss = make_batch(), LossConfig(name="importance_sampling")
    results: dict[str, Any] = {}

    async def step() -> float:
        result, _ = await asyncio.gather(backend.forward_backward(samples, loss), backend.optim_step(ADAM))
        return result.loss

    await backend.start()
    results["forward"] = to_json_lists(await backend.forward(samples))
    results["reference"] = to_json_lists(await backend.reference_logprobs(samples))
    results["losses"] = [await step() for _ in range(STEPS)]
    results["cross_entropy"] = (
        await backend.forward_backward(samples, LossConfig(name="cross_entropy"))
    ).loss
    await backend.optim_step(ADAM)
    await backend.save_state(scratch / "state")
    results["uninterrupted"] = [await step() for _ in range(2)]
    await backend.load_state(scratch / "state")
    results["resumed"] = [await step() for _ in range(2)]

    artifact = await backend.publish(scratch / "v000001")
    sampler = MintSampler(model, config, CloudEngineConfig())
    (chunk,) = [c async for c in sampler.generate(PROMPT, SamplingParams(max_tokens=2))]
    results["base_versions"] = chunk.versions
    await sampler.load(Policy("p", 1, artifact))
    (chunk,) = [c async for c in sampler.generate(PROMPT, SamplingParams(max_tokens=8, seed=1))]
    ids = [*PROMPT, *chunk.token_ids]
    (logprobs,) = await backend.forward([make_sample("reply", ids, len(PROMPT))])
    results["sampled"] = {
        "ids": chunk.token_ids,
        "logprobs": chunk.logprobs,
        "versions": chunk.versions,
        "backend_logprobs": [float(x) for x in logprobs[len(PROMPT) :]],
        "scored_logprobs": [float(x) for x in (await sampler.logprobs(ids))[len(PROMPT) :]],
    }
    results["is_environment_unchanged"] = environment == {name: os.environ.get(name) for name in environment}
    await sampler.close()
    await backend.close()
    return results


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))))
