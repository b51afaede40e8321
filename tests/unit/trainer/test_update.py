"""Tests for `scale_loss`, which scales loss terms that do not depend on the advantages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from instar.backends.local.losses import TrainedTokens, compute_token_loss
from instar.config import LossConfig
from instar.data.advantages import Normalization, compute_divisor, normalize
from instar.trainer.update import scale_loss
from instar.types import Sample


def make_sample(name: str, length: int) -> Sample:
    mask = np.ones(length, np.float32)
    mask[0] = 0
    old_logprobs = np.full(length, -1, np.float32)
    return Sample(
        name, name, np.arange(length, dtype=np.int32), mask, old_logprobs, mask, np.zeros(length, np.int32)
    )


@pytest.mark.parametrize("normalization", ["batch_sessions", "batch_tokens"])
def test_dro_gradient_does_not_depend_on_batch_size(normalization: Normalization) -> None:
    gradients: list[float] = []
    for session_count in (1, 8):
        samples = [make_sample(str(index), 5) for index in range(session_count)]
        loss = scale_loss(LossConfig(name="dro", beta=0.5), compute_divisor(samples, normalization))
        samples = normalize(samples, normalization)
        advantages = np.concatenate([sample.advantages[sample.mask > 0] for sample in samples])
        count = len(advantages)
        new_logprob = torch.tensor(-0.5, requires_grad=True)  # one parameter for all logprobs
        tokens = TrainedTokens(torch.ones(count), torch.from_numpy(advantages), torch.full((count,), -1.0))
        compute_token_loss(loss, new_logprob.expand(count), tokens)[0].backward()
        assert new_logprob.grad is not None
        gradients.append(new_logprob.grad.item())
    assert gradients[0] == pytest.approx(gradients[1])


def test_scale_loss_without_penalty_returns_same_config() -> None:
    loss = LossConfig(name="ppo")
    assert scale_loss(loss, 7.0) is loss
