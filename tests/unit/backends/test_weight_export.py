"""Tests for the weights that a backend exports for live updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from instar.backends.base import Backend
from instar.backends.local.backend import LocalBackend
from instar.config import AdamConfig, LocalBackendConfig, LoraConfig, LossConfig, ModelConfig
from tests.unit.backends.conformance import make_tree_samples


def make_backend(folder: Path, lora: LoraConfig | None, dtype: str = "fp32") -> LocalBackend:
    model = ModelConfig.model_validate({"name": str(folder), "dtype": dtype, "device": "cpu"})
    return LocalBackend(model, LocalBackendConfig(lora=lora))


async def train_and_export(backend: Backend) -> dict[str, Tensor]:
    for _ in range(2):
        await backend.forward_backward(make_tree_samples(), LossConfig())
        await backend.optim_step(AdamConfig(lr=1e-2))
    return {name: tensor.clone() async for name, tensor in backend.tensors()}


def compute_logprobs(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[1:, None])[:, 0]


async def test_exported_tensors_include_adapter_and_use_checkpoint_names(model_folder: Path) -> None:
    backend = make_backend(model_folder, LoraConfig(rank=4))
    assert backend.capabilities.can_sync_live
    tensors = await train_and_export(backend)
    files = load_file(model_folder / "model.safetensors")
    assert tensors.keys() == files.keys()
    assert {name: t.shape for name, t in tensors.items()} == {name: t.shape for name, t in files.items()}
    merged = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    merged.load_state_dict(tensors, strict=False)
    sample = make_tree_samples()[0]
    ids = torch.from_numpy(sample.token_ids).long()
    (expected,) = await backend.forward([sample])
    expected_logprobs = torch.from_numpy(expected[1:])
    assert (compute_logprobs(merged, ids) - expected_logprobs).abs().max() < 1e-4
    assert (compute_logprobs(base, ids) - expected_logprobs).abs().max() > 1e-2
    await backend.close()


async def test_exported_weights_match_published_folder(model_folder: Path, tmp_path: Path) -> None:
    backend = make_backend(model_folder, None, dtype="bf16")
    tensors = await train_and_export(backend)
    await backend.publish(tmp_path / "v1")
    files = load_file(tmp_path / "v1" / "model.safetensors")
    assert tensors.keys() == files.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, files[name]), name
    await backend.close()


async def test_exported_tensors_merge_small_updates_in_full_precision(model_folder: Path) -> None:
    """The merged weight is bf16(base + delta), which differs from bf16(base) + bf16(delta)."""
    backend = make_backend(model_folder, LoraConfig(rank=4), dtype="bf16")
    tensors = await train_and_export(backend)
    layer = backend._model.model.get_submodule("model.layers.0.mlp.up_proj")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    exact = layer.base_layer.weight.float() + layer.scaling["default"] * b @ a
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], exact.to(torch.bfloat16))
    await backend.close()


@pytest.mark.parametrize(("targets", "can_sync_live"), [(["lm_head", "q_proj"], False), (["q_proj"], True)])
async def test_live_sync_is_supported_unless_the_tied_output_layer_has_an_adapter(
    model_folder: Path, targets: list[str], can_sync_live: bool
) -> None:
    backend = make_backend(model_folder, LoraConfig(rank=4, targets=targets))
    assert backend.capabilities.can_sync_live is can_sync_live
    await backend.close()
