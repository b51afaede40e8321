"""Tests for the local backend: conformance, and features that only this backend has."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from instar.backends.base import Backend
from instar.backends.local.backend import LocalBackend
from instar.backends.local.state import hash_adapter, write_folder
from instar.config import AdamConfig, LocalBackendConfig, LoraConfig, LossConfig, ModelConfig, RunConfig
from instar.errors import BackendError, NonFiniteError
from instar.live.activity import ACTIVITY_FILE, ActivityRecorder
from instar.live.learning_window import LearningWindow
from tests.unit.backends.conformance import (
    ADAM,
    BackendConformance,
    make_sample,
    make_tree_samples,
    read_files,
)


def make_local(
    folder: Path, config: LocalBackendConfig | None = None, *, dtype: str = "fp32", seed: int = 0
) -> LocalBackend:
    model = ModelConfig.model_validate({"name": str(folder), "dtype": dtype, "device": "cpu"})
    return LocalBackend(model, config or LocalBackendConfig(lora=LoraConfig(rank=4)), seed=seed)


class TestConformance(BackendConformance):
    @pytest.fixture
    def make_backend(self, model_folder: Path) -> Callable[[], Backend]:
        return lambda: make_local(model_folder)


class TestCheckpointedConformance(BackendConformance):
    """Conformance with small micro-batches and recomputed activations."""

    @pytest.fixture
    def make_backend(self, model_folder: Path) -> Callable[[], Backend]:
        config = LocalBackendConfig(
            lora=LoraConfig(rank=4), micro_batch_tokens=60, gradient_checkpointing=True
        )
        return lambda: make_local(model_folder, config)


async def test_micro_batches_count_shared_prefix_once(model_folder: Path) -> None:
    prefix = list(range(3, 103))
    samples = [make_sample(str(i), [*prefix, 200 + i, 210 + i], 100) for i in range(10)]
    config = LocalBackendConfig(lora=LoraConfig(rank=4), micro_batch_tokens=120)
    backend = make_local(model_folder, config)
    result = await backend.forward_backward(samples, LossConfig())
    assert result.metrics["distinct_tokens"] == 120
    assert result.metrics["micro_batches"] == 1
    await backend.close()


async def test_adapter_depends_only_on_seed(model_folder: Path, tmp_path: Path) -> None:
    hashes = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.seed()  # the global random state must not matter
        backend = make_local(model_folder, seed=seed)
        await backend.publish(tmp_path / name)
        await backend.close()
        hashes.append(hash_adapter(tmp_path / name))
    assert hashes[0] == hashes[1] != hashes[2]


async def test_saved_state_depends_only_on_seed(model_folder: Path, tmp_path: Path) -> None:
    """The state includes torch's global random state, so the backend must seed it."""
    for name in ("one", "other"):
        backend = make_local(model_folder, seed=5)
        await backend.save_state(tmp_path / name)
        await backend.close()
        torch.rand(1)  # changes the global random state
    assert hash_adapter(tmp_path / "one") == hash_adapter(tmp_path / "other")


async def test_published_folder_has_peft_format(model_folder: Path, tmp_path: Path) -> None:
    backend = make_local(model_folder)
    artifact = await backend.publish(tmp_path / "v1")
    config = json.loads((tmp_path / "v1" / "adapter_config.json").read_text())
    assert artifact.path == str(tmp_path / "v1")
    assert config["base_model_name_or_path"] == str(model_folder)
    assert (config["peft_type"], config["r"], config["task_type"]) == ("LORA", 4, "CAUSAL_LM")
    assert "model.layers.0.self_attn.q_proj" in config["target_modules"]
    assert "lm_head" not in config["target_modules"]
    tensors = load_file(tmp_path / "v1" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert set(read_files(tmp_path)) == {"v1/adapter_config.json", "v1/adapter_model.safetensors"}
    await backend.close()


async def test_bf16_adapter_keeps_small_updates(model_folder: Path, tmp_path: Path) -> None:
    backend = make_local(model_folder, dtype="bf16")
    adam = AdamConfig(lr=1e-5)
    weights = []
    for step in range(3):
        await backend.forward_backward(make_tree_samples(), LossConfig())
        await backend.optim_step(adam)
        await backend.publish(tmp_path / str(step))
        weights.append(load_file(tmp_path / str(step) / "adapter_model.safetensors"))
    for name in weights[0]:
        if "lora_A" in name:
            change = (weights[2][name] - weights[1][name]).abs()
            assert (change > 1e-6).float().mean() > 0.9, name
    await backend.close()


@pytest.mark.parametrize("lora", [LoraConfig(rank=4), None])
async def test_non_finite_weights_are_neither_saved_nor_published(
    model_folder: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    backend = make_local(model_folder, LocalBackendConfig(lora=lora))
    await backend.forward_backward(make_tree_samples(), LossConfig())
    # `model_copy` does not validate this value, which makes the first step divide by zero.
    adam = AdamConfig().model_copy(update={"beta1": 1.0})
    with pytest.raises(NonFiniteError, match=r"after the step, .* non-finite"):
        await backend.optim_step(adam)
    with pytest.raises(NonFiniteError, match="non-finite"):
        await backend.save_state(tmp_path / "state")
    with pytest.raises(NonFiniteError, match="non-finite"):
        await backend.publish(tmp_path / "policy")
    assert read_files(tmp_path) == {}
    await backend.close()


async def test_load_state_error_names_the_damaged_state(model_folder: Path, tmp_path: Path) -> None:
    backend = make_local(model_folder)
    await backend.save_state(tmp_path / "state")
    file = tmp_path / "state" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(BackendError, match=r"state.* is damaged"):
        await backend.load_state(tmp_path / "state")
    await backend.close()


async def test_bf16_logprobs_are_close_to_fp32(model_folder: Path) -> None:
    results = []
    for dtype in ("fp32", "bf16"):
        backend = make_local(model_folder, dtype=dtype)
        results.append((await backend.forward_backward(make_tree_samples(), LossConfig())).logprobs)
        await backend.close()
    differences = [np.abs(a - b)[s.mask > 0] for a, b, s in zip(*results, make_tree_samples(), strict=True)]
    assert np.concatenate(differences).mean() < 0.03


async def test_reference_under_full_finetuning_stays_frozen(model_folder: Path) -> None:
    """The reference model has the initial weights, even if it is loaded after training steps."""
    backend = make_local(model_folder, LocalBackendConfig(lora=None), dtype="bf16")
    samples = make_tree_samples()
    initial = await backend.forward(samples)
    await backend.forward_backward(samples, LossConfig())
    await backend.optim_step(ADAM)
    for _ in range(2):
        for expected, actual in zip(initial, await backend.reference_logprobs(samples), strict=True):
            np.testing.assert_array_equal(expected, actual)
    assert not np.array_equal((await backend.forward(samples))[0][1:], initial[0][1:])
    await backend.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_full_finetuning_matches_transformers(model_folder: Path, tmp_path: Path, dtype: str) -> None:
    backend = make_local(model_folder, LocalBackendConfig(lora=None), dtype=dtype)
    samples = make_tree_samples()
    reference = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    result = await backend.forward_backward(samples, LossConfig(name="cross_entropy"))
    expected_loss = torch.zeros(())
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        logprobs = reference(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        expected_loss -= (torch.from_numpy(sample.mask * sample.advantages)[1:] * logprobs).sum()
    expected_loss.backward()
    expected_norm = torch.nn.utils.get_total_norm(
        [p.grad for p in reference.parameters() if p.grad is not None]
    )
    tolerance = 1e-5 if dtype == "fp32" else 0.05
    assert result.loss == pytest.approx(float(expected_loss.detach()), rel=tolerance, abs=tolerance)
    assert (await backend.optim_step(ADAM)).grad_norm == pytest.approx(float(expected_norm), rel=tolerance)
    artifact = await backend.publish(tmp_path / "weights")
    assert artifact.kind == "weights"
    loaded = AutoModelForCausalLM.from_pretrained(artifact.path)
    assert loaded.dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
    assert (Path(artifact.path) / "tokenizer.json").is_file()
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    if dtype == "fp32":
        ids = torch.from_numpy(samples[0].token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = loaded(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        np.testing.assert_allclose((await backend.forward(samples[:1]))[0][1:], logprobs.numpy(), atol=2e-5)
    await backend.save_state(tmp_path / "state")
    await backend.load_state(tmp_path / "state")
    await backend.close()


async def test_qk_norm_model_packed_logprobs_match_single_samples(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "qwen")
    backend = make_local(tmp_path / "qwen")
    samples = make_tree_samples()
    packed_logprobs = await backend.forward(samples)
    for sample, actual in zip(samples, packed_logprobs, strict=True):
        (expected,) = await backend.forward([sample])
        np.testing.assert_allclose(actual, expected, atol=2e-5)
    await backend.close()


def test_local_backend_rejects_sliding_window(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "mistral")
    with pytest.raises(BackendError, match="sliding"):
        make_local(tmp_path / "mistral")


def test_local_backend_rejects_unknown_lora_targets(model_folder: Path) -> None:
    config = LocalBackendConfig(lora=LoraConfig(targets=["missing_module"]))
    with pytest.raises(BackendError, match="missing_module"):
        make_local(model_folder, config)


async def test_load_state_rejects_different_adapter_and_missing_folder(
    model_folder: Path, tmp_path: Path
) -> None:
    rank_4 = make_local(model_folder)
    rank_8 = make_local(model_folder, LocalBackendConfig(lora=LoraConfig(rank=8)))
    await rank_4.save_state(tmp_path / "state")
    with pytest.raises(BackendError, match="a different model or adapter"):
        await rank_8.load_state(tmp_path / "state")
    with pytest.raises(BackendError, match="no saved"):
        await rank_8.load_state(tmp_path / "missing")
    await rank_4.close()
    await rank_8.close()


async def test_saved_state_includes_unapplied_gradient(model_folder: Path, tmp_path: Path) -> None:
    first, second = make_local(model_folder), make_local(model_folder)
    await first.forward_backward(make_tree_samples(), LossConfig())
    await first.save_state(tmp_path / "state")
    await second.load_state(tmp_path / "state")
    assert await first.optim_step(ADAM) == await second.optim_step(ADAM)
    for name, backend in (("a", first), ("b", second)):
        await backend.publish(tmp_path / name)
        await backend.close()
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b")


def test_write_folder_is_atomic(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "partial").write_text("x")
        assert not (tmp_path / "target").exists()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_folder(tmp_path / "target", fail)
    assert read_files(tmp_path) == {}
    for text in ("one", "two"):

        def write(folder: Path, text: str = text) -> None:
            (folder / "file").write_text(text)

        write_folder(tmp_path / "target", write)
        assert (tmp_path / "target" / "file").read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


class PauseSwitch:
    """Blocks the backend at the call of `pause` with this number until `resume` is called."""

    def __init__(self, blocking_call: int) -> None:
        self.blocking_call = blocking_call
        self.calls = 0
        self.is_paused = threading.Event()
        self.resumed = threading.Event()

    def pause(self) -> None:
        self.calls += 1
        if self.calls == self.blocking_call:
            self.is_paused.set()
            assert self.resumed.wait(60)

    def resume(self) -> None:
        self.resumed.set()


async def train_two_steps(backend: LocalBackend, folder: Path) -> tuple[str, list[list[float]]]:
    """Return a hash of the trained adapter, and all logprobs."""
    logprobs: list[list[float]] = []
    for _ in range(2):
        result = await backend.forward_backward(make_tree_samples(), LossConfig())
        await backend.optim_step(ADAM)
        logprobs += [row.tolist() for row in (*result.logprobs, *await backend.forward(make_tree_samples()))]
    await backend.publish(folder)
    return hash_adapter(folder), logprobs


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
async def test_pauses_in_every_pass_leave_the_result_bit_identical(
    model_folder: Path, tmp_path: Path, gradient_checkpointing: bool
) -> None:
    config = LocalBackendConfig(
        lora=LoraConfig(rank=4), micro_batch_tokens=60, gradient_checkpointing=gradient_checkpointing
    )
    plain = make_local(model_folder, config)
    expected = await train_two_steps(plain, tmp_path / "expected")
    await plain.close()
    counter = PauseSwitch(0)
    counted = make_local(model_folder, config)
    counted.set_pause(counter.pause)
    await counted.forward_backward(make_tree_samples(), LossConfig())
    await counted.close()
    # In the forward pass, in the backward pass, and in the second call.
    for call in (2, counter.calls // 2 + 1, counter.calls - 1, counter.calls + 3):
        switch = PauseSwitch(call)
        backend = make_local(model_folder, config)
        backend.set_pause(switch.pause)
        training = asyncio.create_task(train_two_steps(backend, tmp_path / str(call)))
        assert await asyncio.to_thread(switch.is_paused.wait, 60)
        await asyncio.sleep(0.05)
        assert switch.calls == call, "nothing may be computed during a pause"
        switch.resume()
        digest, logprobs = await training
        assert digest == expected[0]
        np.testing.assert_array_equal(np.concatenate(logprobs), np.concatenate(expected[1]))
        await backend.close()


async def test_backward_pass_can_pause_as_often_as_the_forward_pass(model_folder: Path) -> None:
    switch = PauseSwitch(0)
    backend = make_local(model_folder)
    backend.set_pause(switch.pause)
    await backend.forward(make_tree_samples())
    forward_calls, switch.calls = switch.calls, 0
    await backend.forward_backward(make_tree_samples(), LossConfig())
    assert switch.calls > 1.5 * forward_calls
    await backend.close()


async def test_step_pauses_while_a_live_request_is_in_progress(model_folder: Path, tmp_path: Path) -> None:
    plain = make_local(model_folder)
    expected = await train_two_steps(plain, tmp_path / "expected")
    await plain.close()
    recorder = ActivityRecorder(tmp_path / ACTIVITY_FILE)
    window = LearningWindow(RunConfig.model_validate({"dir": str(tmp_path), "live": {"window": {"idle": 0}}}))
    calls = [0]

    def pause() -> None:
        calls[0] += 1
        window.pause()

    backend = make_local(model_folder)
    backend.set_pause(pause)
    with recorder.track_request():
        training = asyncio.create_task(train_two_steps(backend, tmp_path / "paused"))
        await asyncio.sleep(0.3)
        assert calls[0] <= 1, "the first layer waits until the request has ended"
    digest, logprobs = await training
    assert digest == expected[0]
    np.testing.assert_array_equal(np.concatenate(logprobs), np.concatenate(expected[1]))
    await backend.close()
