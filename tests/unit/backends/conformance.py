"""Conformance tests for training backends, checked against transformers, peft and torch.optim.

A backend's test module subclasses `BackendConformance` and overrides the ``make_backend`` fixture, which
returns a function that creates a backend. Every backend trains a LoRA adapter in fp32 on the tiny model in
``model_folder``, and all of them have the same seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from instar.backends.base import Backend
from instar.config import AdamConfig, LossConfig
from instar.conformance.batches import make_sample, make_tree_samples
from instar.conformance.cases import LOSS
from instar.errors import BackendError, NonFiniteError
from instar.types import Artifact, Sample

ADAM = AdamConfig(lr=0.01, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5)


def compute_base_logprobs(model: Any, token_ids: Any) -> Any:
    """Return the logprobs of all tokens but the first, computed with transformers and without an adapter."""
    ids = torch.from_numpy(np.asarray(token_ids, np.int64))
    with torch.no_grad():
        logits = model(ids.unsqueeze(0)).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()


class ReferenceModel:
    """A published adapter, evaluated with transformers and peft, one sample at a time."""

    def __init__(self, model_folder: Path, adapter: Path) -> None:
        logging.disable_progress_bar()
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def compute_logprobs(self, sample: Sample) -> torch.Tensor:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        logits = self.model(ids.unsqueeze(0)).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, ids[1:].unsqueeze(-1)).squeeze(-1)

    def compute_loss(self, sample: Sample, loss: LossConfig) -> torch.Tensor:
        is_trained = torch.from_numpy(sample.mask[1:] > 0)
        logprobs = self.compute_logprobs(sample)[is_trained]
        advantage = torch.from_numpy(sample.advantages[1:])[is_trained]
        ratio = (logprobs - torch.from_numpy(sample.logprobs[1:])[is_trained]).exp()
        if loss.name == "cross_entropy":
            return -(advantage * logprobs).sum()
        if loss.name == "importance_sampling":
            return -(advantage * ratio).sum()
        if loss.name == "ppo":
            return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
        return -(ratio.detach().clamp(0, 4) * advantage * logprobs).sum()

    def accumulate(self, samples: Sequence[Sample], loss: LossConfig) -> float:
        """Accumulate the gradient of the loss, and return the loss."""
        total = 0.0
        for sample in samples:
            value = self.compute_loss(sample, loss)
            value.backward()
            total += value.item()
        return total

    def compute_grad_norm(self) -> float:
        return float(
            torch.sqrt(sum((p.grad**2).sum() for p in self.parameters.values() if p.grad is not None))
        )


async def start_backend(make_backend: Callable[[], Backend]) -> Backend:
    backend = make_backend()
    await backend.start()
    return backend


class BackendConformance:
    names_non_finite_samples = True
    """True if the error for a non-finite loss names the sample."""
    adapter_has_optimizer_state = False
    """True if `Backend.load_adapter` also restores the optimizer state."""

    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        raise NotImplementedError

    @pytest.fixture
    def make_trained_backend(self, make_backend: Callable[[], Backend]) -> Callable[[], Any]:
        """Return a function that creates a backend and trains one step, so that its adapter is not zero."""

        async def make() -> Backend:
            backend = await start_backend(make_backend)
            await backend.forward_backward(make_tree_samples(5), LOSS)
            await backend.optim_step(AdamConfig(lr=0.02))
            return backend

        return make

    async def load_reference(self, backend: Backend, model_folder: Path, tmp_path: Path) -> ReferenceModel:
        return ReferenceModel(
            model_folder, self.get_adapter_folder(await backend.publish(tmp_path / "published"))
        )

    def get_adapter_folder(self, artifact: Artifact) -> Path:
        """Return the folder of the published adapter."""
        assert artifact.kind == "adapter"
        return Path(artifact.path)

    async def test_published_adapter_reproduces_backend_logprobs(
        self, make_trained_backend: Callable[[], Any], model_folder: Path, tmp_path: Path
    ) -> None:
        backend = await make_trained_backend()
        reference = await self.load_reference(backend, model_folder, tmp_path)
        samples = make_tree_samples()
        for sample, actual in zip(samples, await backend.forward(samples), strict=True):
            assert np.isnan(actual[0])
            with torch.no_grad():
                np.testing.assert_allclose(actual[1:], reference.compute_logprobs(sample).numpy(), atol=2e-5)
        await backend.close()

    @pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "cross_entropy"])
    async def test_forward_backward_matches_reference_loss_and_gradient(
        self, make_trained_backend: Callable[[], Any], model_folder: Path, tmp_path: Path, name: Any
    ) -> None:
        backend = await make_trained_backend()
        reference = await self.load_reference(backend, model_folder, tmp_path)
        samples, loss = make_tree_samples(), LossConfig(name=name)
        result = await backend.forward_backward(samples, loss)
        assert result.loss == pytest.approx(reference.accumulate(samples, loss), rel=1e-5, abs=1e-5)
        assert result.metrics["tokens"] == sum(sample.trained_tokens for sample in samples)
        for sample, actual in zip(samples, result.logprobs, strict=True):
            assert not np.isnan(actual[sample.mask > 0]).any()
            assert np.isnan(actual[sample.mask == 0]).all()
        step = await backend.optim_step(ADAM)
        assert step.grad_norm == pytest.approx(reference.compute_grad_norm(), rel=1e-5)
        await backend.close()

    async def test_reference_logprobs_match_base_model(
        self, make_trained_backend: Callable[[], Any], model_folder: Path
    ) -> None:
        backend = await make_trained_backend()
        if not backend.capabilities.has_reference:
            with pytest.raises(BackendError, match="base model's logprobs"):
                await backend.reference_logprobs(make_tree_samples())
            await backend.close()
            return
        logging.disable_progress_bar()
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        samples = make_tree_samples()
        before = await backend.forward(samples)
        for sample, actual in zip(samples, await backend.reference_logprobs(samples), strict=True):
            assert np.isnan(actual[0])
            np.testing.assert_allclose(actual[1:], compute_base_logprobs(base, sample.token_ids), atol=2e-5)
        for before_logprobs, after_logprobs in zip(before, await backend.forward(samples), strict=True):
            np.testing.assert_array_equal(
                before_logprobs, after_logprobs, "the adapter was not enabled again"
            )
        await backend.forward_backward(samples, LOSS)
        assert (await backend.optim_step(ADAM)).grad_norm > 0
        await backend.close()

    async def test_optim_step_matches_adamw(
        self, make_backend: Callable[[], Backend], model_folder: Path, tmp_path: Path
    ) -> None:
        backend = await start_backend(make_backend)
        reference = await self.load_reference(backend, model_folder, tmp_path)
        optimizer = torch.optim.AdamW(
            reference.parameters.values(), betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=0.1
        )
        for step, lr in enumerate([0.01, 0.002, 0.03]):
            samples = make_tree_samples(step)
            await backend.forward_backward(samples, LOSS)
            await backend.optim_step(ADAM.model_copy(update={"lr": lr}))
            reference.accumulate(samples, LOSS)
            torch.nn.utils.clip_grad_norm_(reference.parameters.values(), ADAM.grad_clip_norm)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        after = await self.load_reference(backend, model_folder, tmp_path)
        for name, parameter in after.parameters.items():
            torch.testing.assert_close(parameter, reference.parameters[name], rtol=1e-4, atol=2e-5)
        await backend.close()

    async def test_two_forward_backward_calls_accumulate_the_same_gradient_as_one(
        self, make_backend: Callable[[], Backend], model_folder: Path, tmp_path: Path
    ) -> None:
        samples = make_tree_samples()
        single_call, two_calls = await start_backend(make_backend), await start_backend(make_backend)
        await single_call.forward_backward(samples, LOSS)
        await two_calls.forward_backward(samples[:5], LOSS)
        await two_calls.forward_backward(samples[5:], LOSS)
        norms = [(await backend.optim_step(ADAM)).grad_norm for backend in (single_call, two_calls)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        logprobs = [await backend.forward(samples) for backend in (single_call, two_calls)]
        for x, y in zip(*logprobs, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)
        await single_call.close()
        await two_calls.close()

    async def test_loaded_state_continues_bit_for_bit(
        self, make_backend: Callable[[], Backend], tmp_path: Path
    ) -> None:
        async def train(backend: Backend, steps: range) -> None:
            for step in steps:
                await backend.forward_backward(make_tree_samples(step), LOSS)
                await backend.optim_step(ADAM)

        uninterrupted, interrupted, resumed = (
            await start_backend(make_backend),
            await start_backend(make_backend),
            await start_backend(make_backend),
        )
        await train(uninterrupted, range(5))
        await train(interrupted, range(2))
        await interrupted.save_state(tmp_path / "state")
        await resumed.load_state(tmp_path / "state")
        await train(resumed, range(2, 5))
        expected = await uninterrupted.publish(tmp_path / "a")
        actual = await resumed.publish(tmp_path / "b")
        assert read_files(self.get_adapter_folder(expected)) == read_files(self.get_adapter_folder(actual))
        for backend in (uninterrupted, interrupted, resumed):
            await backend.close()

    async def test_load_adapter_continues_with_the_same_loss(
        self, make_backend: Callable[[], Backend], make_trained_backend: Callable[[], Any], tmp_path: Path
    ) -> None:
        first, second = await make_trained_backend(), make_backend()
        await second.load_adapter(await self.save_adapter(first, tmp_path))
        losses: list[float] = []
        for backend in (first, second):
            losses.append((await backend.forward_backward(make_tree_samples(), LOSS)).loss)
            await backend.optim_step(ADAM)
        assert losses[1] == pytest.approx(losses[0], abs=1e-6)
        after = [await backend.forward(make_tree_samples()) for backend in (first, second)]
        differences = [np.nanmax(np.abs(x - y)) for x, y in zip(*after, strict=True)]
        if self.adapter_has_optimizer_state:
            assert max(differences) < 1e-6
        else:
            assert min(differences) > 1e-4
        for backend in (first, second):
            await backend.close()

    async def save_adapter(self, backend: Backend, folder: Path) -> str:
        """Save an adapter for `Backend.load_adapter`, and return its source."""
        return (await backend.publish(folder / "adapter")).path

    async def test_load_state_without_optimizer_restores_weights(
        self, make_trained_backend: Callable[[], Any], make_backend: Callable[[], Backend], tmp_path: Path
    ) -> None:
        trained, restored = await make_trained_backend(), await start_backend(make_backend)
        await trained.save_state(tmp_path / "state")
        await restored.load_state(tmp_path / "state", optimizer=False)
        for x, y in zip(
            await trained.forward(make_tree_samples()),
            await restored.forward(make_tree_samples()),
            strict=True,
        ):
            np.testing.assert_array_equal(x, y)
        await trained.close()
        await restored.close()

    async def test_non_finite_loss_raises_and_accumulates_no_gradient(
        self, make_backend: Callable[[], Backend], tmp_path: Path
    ) -> None:
        non_finite = make_sample("bad", [4, 5, 6, 7], 2, logprobs=np.full(4, -1000, np.float32))
        clean, failed = await start_backend(make_backend), await start_backend(make_backend)
        for backend in (clean, failed):
            await backend.forward_backward(make_tree_samples(), LOSS)
        loss = LOSS
        with pytest.raises(NonFiniteError, match="bad" if self.names_non_finite_samples else "loss"):
            await failed.forward_backward([*make_tree_samples(1), non_finite], loss)
        for backend in (clean, failed):
            await backend.optim_step(ADAM)
        a, b = await clean.publish(tmp_path / "a"), await failed.publish(tmp_path / "b")
        assert read_files(self.get_adapter_folder(a)) == read_files(self.get_adapter_folder(b))
        await clean.close()
        await failed.close()

    async def test_non_finite_gradient_raises_and_changes_no_weights(
        self, make_trained_backend: Callable[[], Any], tmp_path: Path
    ) -> None:
        backend = await make_trained_backend()
        before = await backend.publish(tmp_path / "before")
        # The loss is finite in fp32, but the norm of its gradient is not.
        huge = make_sample("huge", [4, 5, 6, 7], 2, advantages=np.full(4, 1e37, np.float32))
        await backend.forward_backward([huge], LossConfig(name="cross_entropy"))
        with pytest.raises(NonFiniteError):
            await backend.optim_step(ADAM)
        after = await backend.publish(tmp_path / "after")
        assert read_files(self.get_adapter_folder(before)) == read_files(self.get_adapter_folder(after))
        with pytest.raises(BackendError, match="gradient"):
            await backend.optim_step(ADAM)
        await backend.forward_backward(make_tree_samples(), LOSS)
        assert np.isfinite((await backend.optim_step(ADAM)).grad_norm)
        await backend.close()

    @pytest.mark.parametrize("field", ["logprobs", "advantages"])
    async def test_forward_backward_rejects_missing_values(
        self, make_backend: Callable[[], Backend], field: str
    ) -> None:
        backend = await start_backend(make_backend)
        values = np.array([0, 0, -1, np.nan], np.float32)
        with pytest.raises(BackendError, match=r"incomplete.*3"):
            await backend.forward_backward(
                [make_sample("incomplete", [4, 5, 6, 7], 2, **{field: values})], LOSS
            )
        with pytest.raises(BackendError, match="gradient"):
            await backend.optim_step(ADAM)
        await backend.close()

    async def test_backend_rejects_trained_first_token_and_unknown_tokens(
        self, make_backend: Callable[[], Backend]
    ) -> None:
        backend = await start_backend(make_backend)
        sample = make_sample("first", [4, 5], 0)
        with pytest.raises(BackendError, match="first"):
            await backend.forward_backward([sample], LOSS)
        with pytest.raises(BackendError, match="999999"):
            await backend.forward([make_sample("unknown", [4, 999999], 1)])
        await backend.close()

    async def test_closed_backend_raises(self, make_backend: Callable[[], Backend]) -> None:
        backend = await start_backend(make_backend)
        await backend.close()
        await backend.close()
        with pytest.raises(BackendError, match="closed"):
            await backend.forward(make_tree_samples())

    async def test_backend_accepts_pipelined_calls(self, make_backend: Callable[[], Backend]) -> None:
        backend = await start_backend(make_backend)
        samples = make_tree_samples()
        before, _, _, after = await asyncio.gather(
            backend.forward(samples),
            backend.forward_backward(samples, LOSS),
            backend.optim_step(ADAM),
            backend.forward(samples),
        )
        assert all(np.isfinite(x[1:]).all() for x in before)
        assert not np.allclose(before[0][1:], after[0][1:])
        await backend.close()


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
