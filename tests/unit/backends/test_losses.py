"""Tests that losses and their gradients match the formulas, which are computed with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from instar.backends.local.losses import TrainedTokens, compute_metrics, compute_token_loss
from instar.config import LossConfig

NEW_LOGPROBS = np.array([-1.0, -2.0, -0.5, -3.0, -0.1], np.float32)
OLD_LOGPROBS = np.array([-1.2, -1.0, -0.5, -5.0, -3.0], np.float32)
ADVANTAGES = np.array([1.0, -2.0, 0.5, 1.5, -1.0], np.float32)
MASK = np.array([1.0, 1.0, 1.0, 1.0, 0.5], np.float32)
RATIO = np.exp(NEW_LOGPROBS - OLD_LOGPROBS)


def compute_loss(**config: Any) -> tuple[float, np.ndarray, dict[str, float]]:
    loss = LossConfig.model_validate(config)
    new_logprobs = torch.from_numpy(NEW_LOGPROBS.copy()).requires_grad_()
    value, sums = compute_token_loss(
        loss, new_logprobs, TrainedTokens(*(torch.from_numpy(x) for x in (MASK, ADVANTAGES, OLD_LOGPROBS)))
    )
    value.backward()
    assert new_logprobs.grad is not None
    return float(value.detach()), new_logprobs.grad.numpy(), compute_metrics(loss, [sums])


def test_cross_entropy_matches_formula() -> None:
    value, grad, loss_metrics = compute_loss(name="cross_entropy")
    assert value == pytest.approx(-(MASK * ADVANTAGES * NEW_LOGPROBS).sum())
    np.testing.assert_allclose(grad, -MASK * ADVANTAGES, rtol=1e-6)
    assert loss_metrics == {"tokens": 5.0}


def test_importance_sampling_matches_formula() -> None:
    value, grad, loss_metrics = compute_loss(name="importance_sampling")
    assert value == pytest.approx(-(MASK * ADVANTAGES * RATIO).sum(), rel=1e-6)
    np.testing.assert_allclose(grad, -MASK * ADVANTAGES * RATIO, rtol=1e-6)
    assert loss_metrics["ratio_mean"] == pytest.approx(RATIO.mean(), rel=1e-6)
    assert loss_metrics["ratio_max"] == pytest.approx(RATIO.max(), rel=1e-6)
    assert loss_metrics["kl"] == pytest.approx((OLD_LOGPROBS - NEW_LOGPROBS).mean(), rel=1e-6)
    assert loss_metrics["clipped"] == 0


@pytest.mark.parametrize(("low", "high"), [(None, None), (0.9, 1.1)])
def test_ppo_matches_formula(low: float | None, high: float | None) -> None:
    value, grad, loss_metrics = compute_loss(name="ppo", clip_low=low, clip_high=high)
    clipped_ratio = np.clip(RATIO, low or 0.8, high or 1.2)
    unclipped, clipped = RATIO * ADVANTAGES, clipped_ratio * ADVANTAGES
    assert value == pytest.approx(-(MASK * np.minimum(unclipped, clipped)).sum(), rel=1e-6)
    # Tokens whose objective is reduced by clipping have no gradient.
    np.testing.assert_allclose(grad, np.where(clipped < unclipped, 0, -MASK * unclipped), rtol=1e-6)
    assert loss_metrics["clipped"] == pytest.approx((clipped < unclipped).mean())


def test_ppo_with_infinite_ratio_has_no_gradient_unless_the_advantage_is_negative() -> None:
    new_logprobs = torch.tensor([-1.0, -1.0, -1.0]).requires_grad_()
    old_logprobs = torch.tensor([-1000.0, -1.0, -1000.0])
    tokens = TrainedTokens(torch.ones(3), torch.tensor([1.0, 1.0, 0.0]), old_logprobs)
    value, sums = compute_token_loss(LossConfig(name="ppo"), new_logprobs, tokens)
    value.backward()
    assert float(value.detach()) == pytest.approx(-2.2)
    assert new_logprobs.grad is not None
    assert new_logprobs.grad.tolist() == [0.0, -1.0, 0.0]
    assert sums.clipped_count == 1


def test_cispo_matches_formula() -> None:
    value, grad, loss_metrics = compute_loss(name="cispo", clip_high=2.0)
    clipped_ratio = np.clip(RATIO, 0, 2)
    assert value == pytest.approx(-(MASK * clipped_ratio * ADVANTAGES * NEW_LOGPROBS).sum(), rel=1e-6)
    np.testing.assert_allclose(grad, -MASK * clipped_ratio * ADVANTAGES, rtol=1e-6)
    assert loss_metrics["clipped"] == pytest.approx((RATIO > 2).mean())


def test_cispo_without_bounds_uses_defaults() -> None:
    _, grad, _ = compute_loss(name="cispo")
    np.testing.assert_allclose(grad, -MASK * np.clip(RATIO, 0, 4) * ADVANTAGES, rtol=1e-6)
