"""What every training backend must do, held to plain transformers + peft + torch.optim.

A variant's test module subclasses `BackendConformance` and provides ``make_backend``: a fixture that
gives a function returning a fresh backend with a LoRA adapter, in fp32, on the tiny model of the
``model_folder`` fixture, with the same seed each time.
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
from instar.conformance.batches import make_sample, tree_samples
from instar.errors import BackendError, NonFiniteError
from instar.types import Artifact, Sample

ADAM = AdamConfig(lr=0.01, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5)


def plain_logprobs(model: Any, token_ids: Any) -> Any:
    """Of every token but the first, by transformers alone."""
    ids = torch.from_numpy(np.asarray(token_ids, np.int64))
    with torch.no_grad():
        logits = model(ids.unsqueeze(0)).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()


class Reference:
    """The same adapter, one sample at a time, by the libraries' own code."""

    def __init__(self, model_folder: Path, adapter: Path) -> None:
        logging.disable_progress_bar()
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def logprobs(self, sample: Sample) -> torch.Tensor:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        logits = self.model(ids.unsqueeze(0)).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, ids[1:].unsqueeze(-1)).squeeze(-1)

    def loss(self, sample: Sample, loss: LossConfig) -> torch.Tensor:
        trained = torch.from_numpy(sample.mask[1:] > 0)
        new = self.logprobs(sample)[trained]
        advantage = torch.from_numpy(sample.advantages[1:])[trained]
        ratio = (new - torch.from_numpy(sample.logprobs[1:])[trained]).exp()
        if loss.name == "cross_entropy":
            return -(advantage * new).sum()
        if loss.name == "importance_sampling":
            return -(advantage * ratio).sum()
        if loss.name == "ppo":
            return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
        return -(ratio.detach().clamp(0, 4) * advantage * new).sum()

    def accumulate(self, samples: Sequence[Sample], loss: LossConfig) -> float:
        total = 0.0
        for sample in samples:
            value = self.loss(sample, loss)
            value.backward()
            total += value.item()
        return total

    def grad_norm(self) -> float:
        return float(
            torch.sqrt(sum((p.grad**2).sum() for p in self.parameters.values() if p.grad is not None))
        )


async def begun(make_backend: Callable[[], Backend]) -> Backend:
    backend = make_backend()
    await backend.start()
    return backend


class BackendConformance:
    names_samples = True
    """Whether a loss that is not finite is told with the sample."""

    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        raise NotImplementedError

    @pytest.fixture
    def stepped(self, make_backend: Callable[[], Backend]) -> Callable[[], Any]:
        """A backend whose adapter is not zero."""

        async def make() -> Backend:
            backend = await begun(make_backend)
            await backend.forward_backward(tree_samples(5), LossConfig())
            await backend.optim_step(AdamConfig(lr=0.02))
            return backend

        return make

    async def reference(self, backend: Backend, model_folder: Path, tmp_path: Path) -> Reference:
        return Reference(model_folder, self.published(await backend.publish(tmp_path / "published")))

    def published(self, artifact: Artifact) -> Path:
        """The adapter's folder."""
        assert artifact.kind == "adapter"
        return Path(artifact.path)

    async def test_published_adapter_gives_the_same_logprobs(
        self, stepped: Callable[[], Any], model_folder: Path, tmp_path: Path
    ) -> None:
        backend = await stepped()
        reference = await self.reference(backend, model_folder, tmp_path)
        samples = tree_samples()
        for sample, found in zip(samples, await backend.forward(samples), strict=True):
            assert np.isnan(found[0])
            with torch.no_grad():
                np.testing.assert_allclose(found[1:], reference.logprobs(sample).numpy(), atol=2e-5)
        await backend.close()

    @pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "cross_entropy"])
    async def test_loss_logprobs_and_gradient(
        self, stepped: Callable[[], Any], model_folder: Path, tmp_path: Path, name: Any
    ) -> None:
        backend = await stepped()
        reference = await self.reference(backend, model_folder, tmp_path)
        samples, loss = tree_samples(), LossConfig(name=name)
        done = await backend.forward_backward(samples, loss)
        assert done.loss == pytest.approx(reference.accumulate(samples, loss), rel=1e-5, abs=1e-5)
        assert done.metrics["tokens"] == sum(sample.trained_tokens for sample in samples)
        for sample, found in zip(samples, done.logprobs, strict=True):
            assert not np.isnan(found[sample.mask > 0]).any()
            assert np.isnan(found[sample.mask == 0]).all()
        step = await backend.optim_step(ADAM)
        assert step.grad_norm == pytest.approx(reference.grad_norm(), rel=1e-5)
        await backend.close()

    async def test_reference_logprobs_are_the_base_models(
        self, stepped: Callable[[], Any], model_folder: Path
    ) -> None:
        backend = await stepped()
        if not backend.capabilities.reference:
            with pytest.raises(BackendError, match="base model's logprobs"):
                await backend.reference_logprobs(tree_samples())
            await backend.close()
            return
        logging.disable_progress_bar()
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        samples = tree_samples()
        before = await backend.forward(samples)
        for sample, found in zip(samples, await backend.reference_logprobs(samples), strict=True):
            assert np.isnan(found[0])
            np.testing.assert_allclose(found[1:], plain_logprobs(base, sample.token_ids), atol=2e-5)
        for then, now in zip(before, await backend.forward(samples), strict=True):
            np.testing.assert_array_equal(then, now, "the adapter is on again")
        await backend.forward_backward(samples, LossConfig())
        assert (await backend.optim_step(ADAM)).grad_norm > 0
        await backend.close()

    async def test_steps_follow_adamw(
        self, make_backend: Callable[[], Backend], model_folder: Path, tmp_path: Path
    ) -> None:
        backend = await begun(make_backend)
        reference = await self.reference(backend, model_folder, tmp_path)
        optimizer = torch.optim.AdamW(
            reference.parameters.values(), betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=0.1
        )
        for step, lr in enumerate([0.01, 0.002, 0.03]):
            samples = tree_samples(step)
            await backend.forward_backward(samples, LossConfig())
            await backend.optim_step(ADAM.model_copy(update={"lr": lr}))
            reference.accumulate(samples, LossConfig())
            torch.nn.utils.clip_grad_norm_(reference.parameters.values(), ADAM.grad_clip_norm)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        after = await self.reference(backend, model_folder, tmp_path)
        for name, parameter in after.parameters.items():
            torch.testing.assert_close(parameter, reference.parameters[name], rtol=1e-4, atol=2e-5)
        await backend.close()

    async def test_two_calls_accumulate_as_one(
        self, make_backend: Callable[[], Backend], model_folder: Path, tmp_path: Path
    ) -> None:
        samples = tree_samples()
        once, twice = await begun(make_backend), await begun(make_backend)
        await once.forward_backward(samples, LossConfig())
        await twice.forward_backward(samples[:5], LossConfig())
        await twice.forward_backward(samples[5:], LossConfig())
        a, b = await once.optim_step(ADAM), await twice.optim_step(ADAM)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
        logprobs = [await backend.forward(samples) for backend in (once, twice)]
        for x, y in zip(*logprobs, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)
        await once.close()
        await twice.close()

    async def test_state_continues_bit_for_bit(
        self, make_backend: Callable[[], Backend], tmp_path: Path
    ) -> None:
        async def train(backend: Backend, steps: range) -> None:
            for step in steps:
                await backend.forward_backward(tree_samples(step), LossConfig())
                await backend.optim_step(ADAM)

        straight, first, second = (
            await begun(make_backend),
            await begun(make_backend),
            await begun(make_backend),
        )
        await train(straight, range(5))
        await train(first, range(2))
        await first.save_state(tmp_path / "state")
        await second.load_state(tmp_path / "state")
        await train(second, range(2, 5))
        expected = await straight.publish(tmp_path / "a")
        found = await second.publish(tmp_path / "b")
        assert read_all(self.published(expected)) == read_all(self.published(found))
        for backend in (straight, first, second):
            await backend.close()

    async def test_weights_alone_can_be_loaded(
        self, stepped: Callable[[], Any], make_backend: Callable[[], Backend], tmp_path: Path
    ) -> None:
        old, fresh = await stepped(), await begun(make_backend)
        await old.save_state(tmp_path / "state")
        await fresh.load_state(tmp_path / "state", optimizer=False)
        for x, y in zip(await old.forward(tree_samples()), await fresh.forward(tree_samples()), strict=True):
            np.testing.assert_array_equal(x, y)
        await old.close()
        await fresh.close()

    async def test_non_finite_loss_adds_nothing(
        self, make_backend: Callable[[], Backend], tmp_path: Path
    ) -> None:
        bad = make_sample("bad", [4, 5, 6, 7], 2, logprobs=np.full(4, -1000, np.float32))
        clean, hit = await begun(make_backend), await begun(make_backend)
        for backend in (clean, hit):
            await backend.forward_backward(tree_samples(), LossConfig())
        with pytest.raises(NonFiniteError, match="bad" if self.names_samples else "loss"):
            await hit.forward_backward([*tree_samples(1), bad], LossConfig())
        for backend in (clean, hit):
            await backend.optim_step(ADAM)
        a, b = await clean.publish(tmp_path / "a"), await hit.publish(tmp_path / "b")
        assert read_all(self.published(a)) == read_all(self.published(b))
        await clean.close()
        await hit.close()

    async def test_non_finite_gradient_changes_nothing(
        self, stepped: Callable[[], Any], tmp_path: Path
    ) -> None:
        backend = await stepped()
        before = await backend.publish(tmp_path / "before")
        # The loss is finite in fp32 and its gradient's norm is not.
        huge = make_sample("huge", [4, 5, 6, 7], 2, advantages=np.full(4, 1e37, np.float32))
        await backend.forward_backward([huge], LossConfig(name="cross_entropy"))
        with pytest.raises(NonFiniteError):
            await backend.optim_step(ADAM)
        after = await backend.publish(tmp_path / "after")
        assert read_all(self.published(before)) == read_all(self.published(after))
        with pytest.raises(BackendError, match="gradient"):
            await backend.optim_step(ADAM)
        await backend.forward_backward(tree_samples(), LossConfig())
        assert np.isfinite((await backend.optim_step(ADAM)).grad_norm)
        await backend.close()

    @pytest.mark.parametrize("field", ["logprobs", "advantages"])
    async def test_missing_numbers_are_refused(self, make_backend: Callable[[], Backend], field: str) -> None:
        backend = await begun(make_backend)
        values = np.array([0, 0, -1, np.nan], np.float32)
        with pytest.raises(BackendError, match=r"holey.*3"):
            await backend.forward_backward(
                [make_sample("holey", [4, 5, 6, 7], 2, **{field: values})], LossConfig()
            )
        with pytest.raises(BackendError, match="gradient"):
            await backend.optim_step(ADAM)
        await backend.close()

    async def test_first_token_and_unknown_tokens_are_refused(
        self, make_backend: Callable[[], Backend]
    ) -> None:
        backend = await begun(make_backend)
        first = make_sample("first", [4, 5], 0)
        with pytest.raises(BackendError, match="first"):
            await backend.forward_backward([first], LossConfig())
        with pytest.raises(BackendError, match="999999"):
            await backend.forward([make_sample("unknown", [4, 999999], 1)])
        await backend.close()

    async def test_a_closed_backend_says_so(self, make_backend: Callable[[], Backend]) -> None:
        backend = await begun(make_backend)
        await backend.close()
        await backend.close()
        with pytest.raises(BackendError, match="closed"):
            await backend.forward(tree_samples())

    async def test_calls_may_be_pipelined(self, make_backend: Callable[[], Backend]) -> None:
        backend = await begun(make_backend)
        samples = tree_samples()
        before, _, _, after = await asyncio.gather(
            backend.forward(samples),
            backend.forward_backward(samples, LossConfig()),
            backend.optim_step(ADAM),
            backend.forward(samples),
        )
        assert all(np.isfinite(x[1:]).all() for x in before)
        assert not np.allclose(before[0][1:], after[0][1:])
        await backend.close()


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
