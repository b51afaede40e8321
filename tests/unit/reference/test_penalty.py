"""Tests for the values of the reference penalty and the inputs that it rejects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from instar.config import RunConfig
from instar.data.advantages import compute_token_scales
from instar.errors import InstarError
from instar.reference.base import Reference
from instar.reference.factory import create_penalty
from instar.reference.penalty import ReferencePenalty
from instar.trainer.monitor import read_steps
from instar.types import Floats, Sample
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN
from tests.unit.trainer.harness import FaultInjector, SimulatedCrash, fill_store, make_config, open_trainer


class FixedReference(Reference):
    """A reference that returns fixed values."""

    def __init__(self, values: Sequence[Floats]) -> None:
        self.values = list(values)

    async def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return self.values

    async def close(self) -> None:
        pass


def make_sample(key: str = "a", **overrides: object) -> Sample:
    nan = np.nan
    fields: dict[str, object] = {
        "token_ids": np.array([1, 2, 7, 8, 3, 9], np.int32),
        "mask": np.array([0, 0, 1, 1, 0, 1], np.float32),
        "logprobs": np.array([nan, nan, -0.2, -0.9, nan, -0.1], np.float32),
        "advantages": np.array([0, 0, 0.5, 0.5, 0, 0.5], np.float32),
        "versions": np.zeros(6, np.int32),
    }
    return Sample(key, f"session-{key}", **(fields | overrides))  # type: ignore[arg-type]


TEACHER_LOGPROBS = np.array([np.nan, np.nan, -1.2, -0.4, np.nan, -0.1], np.float32)


async def test_penalty_subtracts_log_ratio_from_trained_tokens() -> None:
    sample = make_sample()
    penalty = ReferencePenalty(FixedReference([TEACHER_LOGPROBS]), 0.5)
    scale = np.array([0, 0, 2, 2, 0, 4], np.float32)
    (adjusted,), metrics = await penalty.apply([sample], [scale])
    # (-0.2 + 1.2) = 1 and (-0.9 + 0.4) = -0.5, times -weight × scale.
    np.testing.assert_allclose(adjusted.advantages, [0, 0, 0.5 - 1.0, 0.5 + 0.5, 0, 0.5], atol=1e-6)
    assert adjusted.aux["reference"] is TEACHER_LOGPROBS
    assert metrics["reference_kl"] == pytest.approx((1 - 0.5 + 0) / 3, abs=1e-6)
    assert metrics["reference_seconds"] >= 0
    assert sample.advantages[2] == 0.5, "the claimed sample is unchanged"


async def test_penalty_with_truncated_softmax_uses_reward_weights() -> None:
    """The penalty has the same weight as the reward's part of the advantage."""
    behavior = np.array([np.nan, np.nan, -0.2, -0.4, np.nan, -0.1], np.float32)
    samples = [make_sample(behavior_logprobs=behavior), make_sample("b")]
    scales = compute_token_scales(samples, "batch_sessions")
    (adjusted, _), _ = await ReferencePenalty(
        FixedReference([TEACHER_LOGPROBS, TEACHER_LOGPROBS]), 1.0
    ).apply(samples, scales)
    penalty_added = adjusted.advantages - samples[0].advantages
    np.testing.assert_allclose(penalty_added[[2, 3, 5]], [-0.5, 0.25 * np.exp(-0.5), 0], atol=1e-6)


@pytest.mark.parametrize(
    ("logprobs_override", "reference_logprobs", "message"),
    [
        (
            None,
            np.where(np.arange(6) == 3, np.nan, TEACHER_LOGPROBS),
            "a: the reference's logprob of the trained token at index 3 is missing",
        ),
        (
            None,
            np.where(np.arange(6) == 3, -np.inf, TEACHER_LOGPROBS),
            "a: the reference's logprob of the trained token at index 3 is missing",
        ),
        (None, TEACHER_LOGPROBS[:5], "5 logprobs for 6"),
        (
            np.full(6, np.nan, np.float32),
            TEACHER_LOGPROBS,
            "a: the logprob of the trained token at index 2 is missing",
        ),
    ],
)
async def test_penalty_with_missing_logprobs_raises(
    logprobs_override: Floats | None, reference_logprobs: Floats, message: str
) -> None:
    sample = make_sample() if logprobs_override is None else make_sample(logprobs=logprobs_override)
    with pytest.raises(InstarError, match=message):
        await ReferencePenalty(FixedReference([reference_logprobs]), 1.0).apply([sample], [sample.mask])


# --- through the trainer --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


def make_penalty_config(folder: Path, model: Path) -> RunConfig:
    return make_config(folder, model, reference={"type": "base", "weight": 0.3})


async def train_and_hash(config: RunConfig, faults: FaultInjector | None = None) -> str:
    async with open_trainer(config, faults) as harness:
        harness.trainer.penalty = create_penalty(config, harness.backend, None)
        await harness.trainer.run()
        return await harness.hash_latest_adapter()


async def test_penalty_after_crash_gives_same_weights(model: Path, tmp_path: Path) -> None:
    plain, uninterrupted, interrupted = (
        tmp_path / name for name in ("plain", "uninterrupted", "interrupted")
    )
    hashes = []
    for folder in (plain, uninterrupted):
        config = make_penalty_config(folder, model) if folder is uninterrupted else make_config(folder, model)
        await fill_store(config)
        hashes.append(await train_and_hash(config))
    assert hashes[0] != hashes[1], "the penalty changes the weights"
    config = make_penalty_config(interrupted, model)
    await fill_store(config)
    with pytest.raises(SimulatedCrash):
        await train_and_hash(config, FaultInjector("optim_step", 2))
    assert await train_and_hash(config) == hashes[1]


async def test_trainer_with_penalty_reports_reference_kl(model: Path, tmp_path: Path) -> None:
    """The divergence equals the one computed with plain transformers from the recorded logprobs."""
    config = make_penalty_config(tmp_path / "run", model)
    await fill_store(config)
    async with open_trainer(config) as harness:
        harness.trainer.penalty = create_penalty(config, harness.backend, None)
        batch = await harness.trainer.batcher.next_batch(1, 0, 0)
        assert batch is not None
        await harness.trainer.run()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    log_ratios: list[float] = []
    for sample in batch.samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = base(ids[None]).logits[0].log_softmax(-1)
        for position in np.flatnonzero(sample.mask > 0):
            log_ratios.append(float(sample.logprobs[position] - logprobs[position - 1, ids[position]]))
    step = read_steps(config.run_dir)[0]
    assert step["reference_kl"] == pytest.approx(np.mean(log_ratios), abs=1e-4)
    assert step["reference_seconds"] > 0
    async with open_trainer(config) as harness:
        assert (await harness.store.steps(RUN))[0].metrics["reference_kl"] == step["reference_kl"]


async def test_create_penalty_without_weight_returns_none(model: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", model)
    async with open_trainer(config) as harness:
        assert create_penalty(config, harness.backend, None) is None
