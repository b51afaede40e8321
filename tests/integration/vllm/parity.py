"""Check that an engine serves the trainer's weights: its greedy replies and logprobs must match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from instar.backends.local.backend import LocalBackend
from instar.config import AdamConfig, LocalBackendConfig, LoraConfig, LossConfig
from instar.conformance.batches import make_sample
from instar.engines.base import Engine
from instar.types import Artifact, Floats, Policy
from tests.integration.vllm.servers import make_model_config
from tests.unit.engines.conformance import TOKENIZER, collect, get_ids, get_logprobs

PROMPT = TOKENIZER.encode("What is 615 plus 278?")
LOGPROB_TOLERANCE = 1e-4
"""The maximum difference between two implementations of an fp32 model. Policy versions differ far more."""


class Training:
    """Trains the tiny model in steps that are large enough to change its replies."""

    def __init__(self, model: Path, folder: Path, *, lora: bool = True) -> None:
        section = LocalBackendConfig(lora=LoraConfig(rank=4) if lora else None, threads=1)
        self.backend = LocalBackend(make_model_config(model), section, seed=1)
        self._model, self._folder = model, folder
        self.version = 0

    async def step(self) -> Policy:
        """Train one step and return the new policy, whose weights are published to a folder."""
        if self.version == 0:
            await self.backend.start()
        self.version += 1
        ids = np.random.default_rng(self.version).integers(3, 300, 24).tolist()
        sample = make_sample("s", ids, 1, advantages=np.ones(24, np.float32))
        await self.backend.forward_backward([sample], LossConfig(name="cross_entropy"))
        await self.backend.optim_step(AdamConfig(lr=0.004, grad_clip_norm=0))
        artifact = await self.backend.publish(self._folder / f"v{self.version}")
        return Policy("p", self.version, artifact)

    async def compute_logprobs(self, ids: list[int]) -> Floats:
        (logprobs,) = await self.backend.forward([make_sample("s", ids, 1)])
        return logprobs

    def compute_max_logprobs(self, artifact: Artifact, ids: list[int]) -> list[float]:
        """Return the highest logprob after each token, computed by transformers and peft."""
        logging.disable_progress_bar()
        has_full_weights = artifact.kind == "weights"
        model: Any = AutoModelForCausalLM.from_pretrained(artifact.path if has_full_weights else self._model)
        if not has_full_weights:
            model = PeftModel.from_pretrained(model, artifact.path)
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1).max(-1).values.tolist()


async def check_parity(engine: Engine, training: Training, policy: Policy) -> None:
    """Assert that greedy replies, their logprobs and the prompt logprobs match the trainer's."""
    for prompt in (PROMPT, PROMPT[::-1], [*PROMPT, *PROMPT]):
        await _check_reply(engine, training, policy, prompt)


async def _check_reply(engine: Engine, training: Training, policy: Policy, prompt: list[int]) -> None:
    chunks = await collect(engine, prompt, max_tokens=24, temperature=0)
    ids = get_ids(chunks)
    assert [v for chunk in chunks for v in chunk.versions] == [policy.version] * len(ids)
    sequence = [*prompt, *ids]
    max_logprobs = training.compute_max_logprobs(policy.artifact, sequence)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(get_logprobs(chunks), max_logprobs, atol=LOGPROB_TOLERANCE)
    expected = await training.compute_logprobs(sequence)
    np.testing.assert_allclose(get_logprobs(chunks), expected[len(prompt) :], atol=LOGPROB_TOLERANCE)
    np.testing.assert_allclose((await engine.logprobs(sequence))[1:], expected[1:], atol=LOGPROB_TOLERANCE)
