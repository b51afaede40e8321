"""Compares the results of two backends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.config import LossConfig
from instar.conformance.batches import make_edge_samples, make_tree_samples
from instar.conformance.cases import FIVE_STEPS, LOSS
from instar.conformance.runner import ConformanceResult
from instar.types import Floats, Sample

Arrays = dict[str, NDArray[Any]]
ENGINE_TOLERANCE_FACTOR = 10
"""Multiplies the tolerance between an engine and a trainer, because their kernels sum in different orders."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class BackendRecord:
    result: ConformanceResult
    arrays: Arrays
    weights: Arrays | None
    """The adapter published in the case `FIVE_STEPS`, or None if it is not available."""


def compare(
    expected: BackendRecord, actual: BackendRecord, max_context: int, tolerance: float
) -> list[CheckResult]:
    checks: list[CheckResult] = []
    for name in actual.result.cases:
        if name in actual.result.failures:
            checks.append(CheckResult(name, False, actual.result.failures[name]))
        else:
            checks += _compare_case(name, expected.arrays, actual.arrays, tolerance)
    checks += _compare_losses(actual, max_context, tolerance)
    if FIVE_STEPS not in actual.result.failures:
        checks.append(_compare_weights(expected.weights, actual.weights, tolerance))
    return checks


def _compare_case(name: str, expected: Arrays, actual: Arrays, tolerance: float) -> Iterator[CheckResult]:
    """Yield the checks for one case. Rejections and sampled tokens are checked using ``actual`` alone."""
    if name == "rejected":
        for key in sorted(k for k in actual if k.startswith("rejected/")):
            yield CheckResult(key, bool(actual[key]), "" if actual[key] else "the sample was accepted")
        return
    if name in ("sampled", "sampled_after_gc"):
        difference = compute_difference(actual[f"{name}/scored"], actual[f"{name}/logprobs"])
        yield _check_within(
            f"{name}: the sampler's logprobs match the trained policy",
            difference,
            ENGINE_TOLERANCE_FACTOR * tolerance,
        )
        versions, expected_version = set(actual[f"{name}/versions"].tolist()), 1 if name == "sampled" else 2
        detail = f"{sorted(versions)} (expected {expected_version})"
        yield CheckResult(f"{name}: tokens have the policy's version", versions <= {expected_version}, detail)
        return
    if name == "resume":
        difference = compute_difference(actual["resume/uninterrupted"], actual["resume/resumed"])
        yield _check_within("resume: the next step is unchanged", difference, tolerance)
        difference = compute_difference(actual["resume/saved"], actual["resume/weights"])
        yield _check_within("resume: loading without optimizer restores the weights", difference, tolerance)
    for key in sorted(k for k in actual if k == name or k.startswith(f"{name}/")):
        if key.endswith("/grad_norm") and np.isnan(actual[key]):
            continue  # the backend does not report the norm
        yield _check_within(key, compute_difference(expected[key], actual[key]), tolerance)


def _compare_losses(actual: BackendRecord, max_context: int, tolerance: float) -> Iterator[CheckResult]:
    """Compare the losses with float64 values computed from the backend's own logprobs."""
    batches: dict[str, tuple[LossConfig, list[Sample]]] = {
        name: (LossConfig.model_validate({"name": name}), make_tree_samples())
        for name in actual.result.losses
    }
    batches["edges"] = (LOSS, make_edge_samples(max_context))
    for name, (loss, samples) in batches.items():
        if name in actual.result.failures or f"{name}/loss" not in actual.arrays:
            continue
        offsets = np.cumsum([len(sample) for sample in samples])[:-1]
        expected = _compute_loss(loss, samples, np.split(actual.arrays[f"{name}/logprobs"], offsets))
        difference = abs(float(actual.arrays[f"{name}/loss"]) - expected) / max(abs(expected), 1e-3)
        yield _check_within(f"{name}: the loss matches float64", difference, max(tolerance, 1e-5))


def _compute_loss(loss: LossConfig, samples: Sequence[Sample], logprobs: Sequence[Floats]) -> float:
    """Compute the loss as `instar.backends.base` defines it, without using any backend's code."""
    total = 0.0
    for sample, row in zip(samples, logprobs, strict=True):
        for i, weight in enumerate(sample.mask.tolist()):
            if weight > 0:
                old, advantage = float(sample.logprobs[i]), float(sample.advantages[i])
                total -= weight * _compute_objective(loss, float(row[i]), old, advantage)
    return total


def _compute_objective(loss: LossConfig, new: float, old: float, advantage: float) -> float:
    if loss.name == "cross_entropy":
        return advantage * new
    if loss.name == "dro":
        beta = 0.05 if loss.beta is None else loss.beta
        return advantage * new - beta / 2 * (new - old) * (new - old)
    ratio = math.exp(new - old)
    if loss.name == "importance_sampling":
        return ratio * advantage
    low, high = (0.8, 1.2) if loss.name == "ppo" else (0.0, 4.0)
    low = low if loss.clip_low is None else loss.clip_low
    high = high if loss.clip_high is None else loss.clip_high
    clipped_ratio = max(low, min(high, ratio))
    if loss.name == "ppo":
        return min(ratio * advantage, clipped_ratio * advantage)
    return clipped_ratio * advantage * new


def _compare_weights(expected: Arrays | None, actual: Arrays | None, tolerance: float) -> CheckResult:
    name = "weights after five steps"
    if expected is None or actual is None:
        return CheckResult(name, True, "not compared: the backend does not return weights")
    if different := sorted(expected.keys() ^ actual.keys()):
        detail = f"{len(different)} missing or unexpected tensors, for example {different[0]}"
        return CheckResult(name, False, detail)
    return _check_within(
        name, max(compute_difference(expected[key], actual[key]) for key in expected), tolerance
    )


def compute_difference(expected: NDArray[Any], actual: NDArray[Any]) -> float:
    """Return the largest absolute difference relative to the largest expected magnitude (at least 1e-3), or
    infinity if the shapes or the NaN positions differ."""
    if expected.shape != actual.shape or (np.isnan(expected) != np.isnan(actual)).any():
        return float("inf")
    is_nan = np.isnan(expected)
    if is_nan.all():
        return 0.0
    difference = np.abs(expected[~is_nan].astype(np.float64) - actual[~is_nan]).max()
    return float(difference / max(np.abs(expected[~is_nan]).max(), 1e-3))


def _check_within(name: str, difference: float, tolerance: float) -> CheckResult:
    return CheckResult(name, difference <= tolerance, f"{difference:.1e} (tolerance {tolerance:.0e})")
