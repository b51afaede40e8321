"""Tests that every adapter which the local backend can train can be served by the local engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from instar.architecture import create_random_copy
from instar.backends.local.backend import LocalBackend
from instar.config import (
    AdamConfig,
    LocalBackendConfig,
    LocalEngineConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
)
from instar.engines.local.engine import LocalEngine
from instar.errors import BackendError
from instar.types import Policy
from tests.tiny import make_tiny_tokenizer
from tests.unit.backends.conformance import make_sample

IDS = list(range(20, 60))


def make_model(folder: Path, model_type: str) -> ModelConfig:
    create_random_copy(AutoConfig.for_model(model_type)).save_pretrained(folder)
    return ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=256)


def make_backend(model: ModelConfig, **settings: Any) -> LocalBackend:
    return LocalBackend(model, LocalBackendConfig(lora=LoraConfig(rank=4, **settings)))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "phimoe"])
async def test_trained_adapter_of_a_model_with_experts_is_served_exactly(
    tmp_path: Path, model_type: str
) -> None:
    model = make_model(tmp_path / "model", model_type)
    backend = make_backend(model)
    await backend.forward_backward([make_sample("s", IDS, 10)], LossConfig(name="cross_entropy"))
    await backend.optim_step(AdamConfig(lr=0.05))
    artifact = await backend.publish(tmp_path / "v1")
    (trained,) = await backend.forward([make_sample("s", IDS, 10)])
    await backend.close()
    engine = LocalEngine(model, LocalEngineConfig(threads=1), tokenizer=make_tiny_tokenizer())
    base = await engine.logprobs(IDS)
    await engine.load(Policy("p", 1, artifact))
    served = await engine.logprobs(IDS)
    await engine.close()
    reference: Any = AutoModelForCausalLM.from_pretrained(model.name, dtype=torch.float32)
    reference = PeftModel.from_pretrained(reference, artifact.path)
    with torch.no_grad():
        logprobs = reference(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0].numpy()
    np.testing.assert_allclose(served[1:], expected, atol=1e-4)
    np.testing.assert_allclose(trained[1:], expected, atol=1e-4)
    assert np.abs(served - base)[1:].max() > 0.05


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [("gpt2", "all-linear"), ("gpt2", ["c_attn"]), ("phimoe", ["router"]), ("mixtral", ["w1", "w2", "w3"])],
)
def test_targets_that_no_engine_can_serve_are_refused_at_start(
    tmp_path: Path, model_type: str, targets: list[str] | str
) -> None:
    model = make_model(tmp_path / "model", model_type)
    with pytest.raises(BackendError, match=r"backend\.lora\.targets: "):
        make_backend(model, targets=targets)
