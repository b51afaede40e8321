"""What the loss sums up beside the advantages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from instar.backends.local.losses import TrainedTokens, token_loss
from instar.config import LossConfig
from instar.data.advantages import Normalization, compute_divisor, normalize
from instar.trainer.update import scale_loss
from instar.types import Sample


def make_sample(name: str, length: int) -> Sample:
    mask = np.ones(length, np.float32)
    mask[0] = 0
    old = np.full(length, -1, np.float32)
    return Sample(name, name, np.arange(length, dtype=np.int32), mask, old, mask, np.zeros(length, np.int32))


@pytest.mark.parametrize("how", ["batch_sessions", "batch_tokens"])
def test_dro_holds_a_large_batch_to_the_old_logprobs_as_it_does_a_small_one(how: Normalization) -> None:
    gradients: list[float] = []
    for times in (1, 8):
        samples = [make_sample(str(index), 5) for index in range(times)]
        loss = scale_loss(LossConfig(name="dro", beta=0.5), compute_divisor(samples, how))
        samples = normalize(samples, how)
        advantages = np.concatenate([sample.advantages[sample.mask > 0] for sample in samples])
        count = len(advantages)
        new = torch.tensor(-0.5, requires_grad=True)  # one parameter moves every logprob
        tokens = TrainedTokens(torch.ones(count), torch.from_numpy(advantages), torch.full((count,), -1.0))
        token_loss(loss, new.expand(count), tokens)[0].backward()
        assert new.grad is not None
        gradients.append(new.grad.item())
    assert gradients[0] == pytest.approx(gradients[1])


def test_other_losses_have_nothing_else_to_divide() -> None:
    loss = LossConfig(name="ppo")
    assert scale_loss(loss, 7.0) is loss
