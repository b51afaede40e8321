"""Each loss and its gradient against the formula, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from instar.backends.local.losses import TrainedTokens, metrics, token_loss
from instar.config import LossConfig

NEW = np.array([-1.0, -2.0, -0.5, -3.0, -0.1], np.float32)
OLD = np.array([-1.2, -1.0, -0.5, -5.0, -3.0], np.float32)
ADVANTAGES = np.array([1.0, -2.0, 0.5, 1.5, -1.0], np.float32)
MASK = np.array([1.0, 1.0, 1.0, 1.0, 0.5], np.float32)
RATIO = np.exp(NEW - OLD)


def run(**config: Any) -> tuple[float, np.ndarray, dict[str, float]]:
    loss = LossConfig.model_validate(config)
    new = torch.from_numpy(NEW.copy()).requires_grad_()
    value, sums = token_loss(
        loss, new, TrainedTokens(*(torch.from_numpy(x) for x in (MASK, ADVANTAGES, OLD)))
    )
    value.backward()
    assert new.grad is not None
    return float(value.detach()), new.grad.numpy(), metrics(loss, [sums])


def test_cross_entropy() -> None:
    value, grad, found = run(name="cross_entropy")
    assert value == pytest.approx(-(MASK * ADVANTAGES * NEW).sum())
    np.testing.assert_allclose(grad, -MASK * ADVANTAGES, rtol=1e-6)
    assert found == {"tokens": 5.0}


def test_importance_sampling() -> None:
    value, grad, found = run(name="importance_sampling")
    assert value == pytest.approx(-(MASK * ADVANTAGES * RATIO).sum(), rel=1e-6)
    np.testing.assert_allclose(grad, -MASK * ADVANTAGES * RATIO, rtol=1e-6)
    assert found["ratio_mean"] == pytest.approx(RATIO.mean(), rel=1e-6)
    assert found["ratio_max"] == pytest.approx(RATIO.max(), rel=1e-6)
    assert found["kl"] == pytest.approx((OLD - NEW).mean(), rel=1e-6)
    assert found["clipped"] == 0


@pytest.mark.parametrize(("low", "high"), [(None, None), (0.9, 1.1)])
def test_ppo(low: float | None, high: float | None) -> None:
    value, grad, found = run(name="ppo", clip_low=low, clip_high=high)
    bounded = np.clip(RATIO, low or 0.8, high or 1.2)
    free, limited = RATIO * ADVANTAGES, bounded * ADVANTAGES
    assert value == pytest.approx(-(MASK * np.minimum(free, limited)).sum(), rel=1e-6)
    # No gradient where clipping made the objective smaller.
    np.testing.assert_allclose(grad, np.where(limited < free, 0, -MASK * free), rtol=1e-6)
    assert found["clipped"] == pytest.approx((limited < free).mean())


def test_cispo() -> None:
    value, grad, found = run(name="cispo", clip_high=2.0)
    bounded = np.clip(RATIO, 0, 2)
    assert value == pytest.approx(-(MASK * bounded * ADVANTAGES * NEW).sum(), rel=1e-6)
    np.testing.assert_allclose(grad, -MASK * bounded * ADVANTAGES, rtol=1e-6)
    assert found["clipped"] == pytest.approx((RATIO > 2).mean())


def test_cispo_default_bounds() -> None:
    _, grad, _ = run(name="cispo")
    np.testing.assert_allclose(grad, -MASK * np.clip(RATIO, 0, 4) * ADVANTAGES, rtol=1e-6)
