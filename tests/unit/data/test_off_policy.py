from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from instar.cli.config_errors import explain
from instar.config import OffPolicyConfig, RunConfig
from instar.data.off_policy import compute_importance, decouple
from instar.errors import BackendError
from instar.types import Floats, Sample

RECOMPUTE = OffPolicyConfig(proximal="recompute")


def drawn(rng: np.random.Generator, *, truncated_softmax: bool) -> tuple[Sample, Floats, Floats]:
    """A sample whose tokens several versions have sampled, its scales and the proximal logprobs."""
    length = 40
    mask = (rng.random(length) < 0.6).astype(np.float32)
    mask[0] = 0
    logprobs = np.where(mask > 0, -3 * rng.random(length), np.nan).astype(np.float32)
    behavior = (logprobs + rng.normal(0, 0.5, length)).astype(np.float32) if truncated_softmax else None
    sample = Sample(
        sample_key="k",
        session_id="s",
        token_ids=np.arange(length, dtype=np.int32),
        mask=mask,
        logprobs=logprobs,
        advantages=(mask * rng.normal(0, 1, length)).astype(np.float32),
        versions=np.where(mask > 0, rng.integers(3, 6, length), -1).astype(np.int32),
        behavior_logprobs=behavior,
    )
    proximal = (-3 * rng.random(length)).astype(np.float32)
    proximal[0] = np.nan
    return sample, (mask * 0.25).astype(np.float32), proximal


@pytest.mark.parametrize("truncated_softmax", [False, True])
@pytest.mark.parametrize(
    ("truncate", "drop_above"), [(None, None), (1.3, None), (None, 3.0), (1.1, 1.5), (0.5, None)]
)
def test_against_python_floats(
    truncated_softmax: bool, truncate: float | None, drop_above: float | None
) -> None:
    config = OffPolicyConfig(proximal="recompute", truncate=truncate, drop_above=drop_above)
    rng = np.random.default_rng(7)
    drawn_samples = [drawn(rng, truncated_softmax=truncated_softmax) for _ in range(3)]
    samples, scales, proximal = (list(column) for column in zip(*drawn_samples, strict=True))
    corrected, weighted, told = decouple(samples, scales, proximal, config)
    cut = left_out = count = 0
    for sample, scale, logprobs, found, weights in zip(
        samples, scales, proximal, corrected, weighted, strict=True
    ):
        for i in range(len(sample)):
            if sample.mask[i] == 0:
                assert (found.mask[i], found.advantages[i], weights[i]) == (0, 0, 0)
                assert math.isnan(found.logprobs[i]), "a token not trained stays without a logprob"
                continue
            count += 1
            source = sample.logprobs if sample.behavior_logprobs is None else sample.behavior_logprobs
            ratio = math.exp(float(logprobs[i]) - float(source[i]))
            kept = drop_above is None or 1 / drop_above <= ratio <= drop_above
            weight = min(ratio, truncate or 2.0) if kept else 0.0
            left_out += not kept
            cut += kept and ratio > (truncate or 2.0)
            assert found.mask[i] == float(kept)
            assert found.logprobs[i] == logprobs[i]
            assert found.advantages[i] == pytest.approx(weight * float(sample.advantages[i]), rel=1e-6)
            assert weights[i] == pytest.approx(weight * float(scale[i]), rel=1e-6)
    assert told == {"truncated": pytest.approx(cut / count), "left_out_tokens": left_out}
    assert cut > 0
    assert (left_out > 0) == (drop_above is not None)


def test_on_policy_nothing_changes() -> None:
    sample, scale, _ = drawn(np.random.default_rng(1), truncated_softmax=False)
    (same,), (weights,), told = decouple([sample], [scale], [sample.logprobs], RECOMPUTE)
    for name in ("mask", "logprobs", "advantages"):
        np.testing.assert_array_equal(getattr(same, name), getattr(sample, name))
    np.testing.assert_array_equal(weights, scale)
    assert told == {"truncated": 0.0, "left_out_tokens": 0}


def test_figures_against_python_floats() -> None:
    rng = np.random.default_rng(3)
    sample, _, proximal = drawn(rng, truncated_softmax=True)
    other, _, theirs = drawn(rng, truncated_softmax=False)
    ratios: list[float] = []
    assert sample.behavior_logprobs is not None
    for new, old, mask in (
        (proximal, sample.behavior_logprobs, sample.mask),
        (theirs, other.logprobs, other.mask),
    ):
        ratios += [math.exp(float(a) - float(b)) for a, b, m in zip(new, old, mask, strict=True) if m]
    told = compute_importance([sample, other], [proximal, theirs])
    assert told["importance_mean"] == pytest.approx(sum(ratios) / len(ratios))
    assert told["importance_max"] == pytest.approx(max(ratios))
    ordered = sorted(ratios)
    place = 0.99 * (len(ratios) - 1)
    below = ordered[int(place)]
    assert told["importance_p99"] == pytest.approx(
        below + (place - int(place)) * (ordered[int(place) + 1] - below)
    )
    square = sum(ratios) ** 2 / sum(ratio**2 for ratio in ratios)
    assert told["ess"] == pytest.approx(square / len(ratios))
    on_policy = compute_importance([other], [other.logprobs])
    assert on_policy["ess"] == on_policy["importance_max"] == 1.0
    assert compute_importance([], []) == {}


def test_figures_stay_finite() -> None:
    sample, _, proximal = drawn(np.random.default_rng(3), truncated_softmax=False)
    hopeless = replace(sample, logprobs=np.where(sample.mask > 0, -1e4, np.nan).astype(np.float32))
    assert all(math.isfinite(value) for value in compute_importance([hopeless], [proximal]).values())


def test_a_logprob_that_the_backend_does_not_tell_is_an_error() -> None:
    sample, scale, proximal = drawn(np.random.default_rng(1), truncated_softmax=False)
    where = int(np.flatnonzero(sample.mask)[2])
    proximal[where] = np.nan
    with pytest.raises(BackendError, match=f"sample k: .* trained at {where}"):
        decouple([sample], [scale], [proximal], RECOMPUTE)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"truncate": 3},
            "trainer.off_policy: truncate: given 3, but proximal is 'behavior', which has no weights; "
            "leave truncate out, or set proximal to 'recompute'",
        ),
        ({"drop_above": 3, "proximal": "behavior"}, "drop_above: given 3, but proximal is 'behavior'"),
        (
            {"proximal": "recompute", "truncate": 4, "drop_above": 3},
            "truncate: given 4; must be below drop_above, 3",
        ),
        ({"proximal": "recompute", "drop_above": 1}, "trainer.off_policy.drop_above: given 1; it must be"),
        ({"proximal": "recompute", "truncate": 0}, "trainer.off_policy.truncate: given 0; it must be"),
    ],
)
def test_what_would_do_nothing_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        RunConfig.model_validate({"trainer": {"off_policy": section}})
    assert said in "; ".join(explain(raised.value))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"loss": {"name": "cross_entropy"}, "off_policy": {"proximal": "recompute"}},
            "trainer: off_policy.proximal: given 'recompute', but cross_entropy has no importance ratio",
        ),
        (
            {"loss_fallback": "dro", "advantage": {"normalize": "session_tokens"}},
            "trainer: advantage.normalize: given 'session_tokens', but dro needs one weight",
        ),
    ],
)
def test_losses_that_do_not_go_with_other_settings_are_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        RunConfig.model_validate({"trainer": section})
    assert said in "; ".join(explain(raised.value))
