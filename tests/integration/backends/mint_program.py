"""Trains, saves, loads, publishes and samples through MinT's adapters, and prints what came of it as JSON.

Run by the interpreter of an environment that has MinT, which does not go with the tests' own tinker. Its
arguments are the service's address, the model's folder and a folder to write in; the key is in MINT_API_KEY.
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


def batch() -> list[Sample]:
    """All of one length: SkyRL compiles for every other one."""
    rng = np.random.default_rng(0)
    return [make_sample(f"s{i}", rng.integers(3, 300, 30).tolist(), 12 + i, i) for i in range(4)]


def listed(arrays: list[Floats]) -> list[list[float | None]]:
    return [[None if np.isnan(x) else float(x) for x in array] for array in arrays]


async def main(url: str, folder: str, scratch: Path) -> dict[str, Any]:
    before = {name: os.environ.get(name) for name in ("TINKER_API_KEY", "TINKER_BASE_URL")}
    model = ModelConfig(name=folder, dtype="fp32", device="cpu", max_context=256)
    section = MintBackendConfig(base_url=url, rank=8, deadline=120)
    backend = MintBackend(model, section, seed=5)
    samples, loss = batch(), LossConfig(name="importance_sampling")
    reported: dict[str, Any] = {}

    async def step() -> float:
        done, _ = await asyncio.gather(backend.forward_backward(samples, loss), backend.optim_step(ADAM))
        return done.loss

    await backend.start()
    reported["forward"] = listed(await backend.forward(samples))
    reported["reference"] = listed(await backend.reference_logprobs(samples))
    reported["losses"] = [await step() for _ in range(STEPS)]
    reported["cross_entropy"] = (
        await backend.forward_backward(samples, LossConfig(name="cross_entropy"))
    ).loss
    await backend.optim_step(ADAM)
    await backend.save_state(scratch / "state")
    reported["straight"] = [await step() for _ in range(2)]
    await backend.load_state(scratch / "state")
    reported["resumed"] = [await step() for _ in range(2)]

    artifact = await backend.publish(scratch / "v000001")
    sampler = MintSampler(model, section, CloudEngineConfig())
    (chunk,) = [c async for c in sampler.generate(PROMPT, SamplingParams(max_tokens=2))]
    reported["base_versions"] = chunk.versions
    await sampler.load(Policy("p", 1, artifact))
    (chunk,) = [c async for c in sampler.generate(PROMPT, SamplingParams(max_tokens=8, seed=1))]
    ids = [*PROMPT, *chunk.token_ids]
    (scored,) = await backend.forward([make_sample("reply", ids, len(PROMPT))])
    reported["sampled"] = {
        "ids": chunk.token_ids,
        "logprobs": chunk.logprobs,
        "versions": chunk.versions,
        "trained": [float(x) for x in scored[len(PROMPT) :]],
        "scored": [float(x) for x in (await sampler.logprobs(ids))[len(PROMPT) :]],
    }
    reported["environment_kept"] = before == {name: os.environ.get(name) for name in before}
    await sampler.close()
    await backend.close()
    return reported


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))))
