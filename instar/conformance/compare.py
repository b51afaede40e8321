"""From what two backends showed to checks that passed or failed, each with its figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.config import LossConfig
from instar.conformance.batches import edge_samples, tree_samples
from instar.conformance.losses import reference_loss
from instar.conformance.runner import ConformanceResult
from instar.types import Floats, Sample

Arrays = dict[str, NDArray[Any]]
Weights = dict[str, NDArray[Any]]
ENGINE_GAP = 10
"""Times the tolerance, between an engine's logprobs and the trainer's: their kernels sum in another order."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class BackendRecord:
    result: ConformanceResult
    arrays: Arrays
    weights: Weights | None
    """Of the adapter after five steps; None where they cannot be read."""


def compare(
    expected: BackendRecord, found: BackendRecord, context: int, tolerance: float
) -> list[CheckResult]:
    checks: list[CheckResult] = []
    for name in found.result.cases:
        if name in found.result.failures:
            checks.append(CheckResult(name, False, found.result.failures[name]))
        else:
            checks += _scene(name, expected.arrays, found.arrays, tolerance)
    checks += _losses_against_float64(found, context, tolerance)
    if "five" not in found.result.failures:
        checks.append(_weights(expected.weights, found.weights, tolerance))
    return checks


def _scene(name: str, expected: Arrays, found: Arrays, tolerance: float) -> Iterator[CheckResult]:
    if name == "refused":
        for key in sorted(k for k in found if k.startswith("refused/")):
            yield CheckResult(key, bool(found[key]), "" if found[key] else "was accepted")
        return
    if name in ("sampled", "collected"):
        gap = difference(found[f"{name}/scored"], found[f"{name}/logprobs"])
        yield _within(f"{name}: the sampler's logprobs are the trained policy's", gap, ENGINE_GAP * tolerance)
        version = 1 if name == "sampled" else 2
        right = bool((found[f"{name}/versions"] == version).all())
        yield CheckResult(f"{name}: tokens carry their version", right, "")
        return
    if name == "resume":
        gap = difference(found["resume/straight"], found["resume/resumed"])
        yield _within("resume: the next step is the same", gap, tolerance)
        gap = difference(found["resume/saved"], found["resume/weights"])
        yield _within("resume: weights alone can be loaded", gap, tolerance)
    for key in sorted(k for k in found if k == name or k.startswith(f"{name}/")):
        if key.endswith("/grad_norm") and np.isnan(found[key]):
            continue  # the service does not say
        yield _within(key, difference(expected[key], found[key]), tolerance)


def _losses_against_float64(found: BackendRecord, context: int, tolerance: float) -> Iterator[CheckResult]:
    batches: dict[str, tuple[LossConfig, list[Sample]]] = {
        name: (LossConfig.model_validate({"name": name}), tree_samples()) for name in found.result.losses
    }
    batches["edges"] = (LossConfig(), edge_samples(context))
    for name, (loss, samples) in batches.items():
        if name in found.result.failures or f"{name}/loss" not in found.arrays:
            continue
        value = reference_loss(loss, samples, _cut(found.arrays[f"{name}/logprobs"], samples))
        gap = abs(float(found.arrays[f"{name}/loss"]) - value) / max(abs(value), 1e-3)
        yield _within(f"{name}: the loss in float64", gap, max(tolerance, 1e-5))


def _cut(flat: Floats, samples: list[Sample]) -> list[Floats]:
    ends = np.cumsum([len(sample) for sample in samples])
    return np.split(flat, ends[:-1])


def _weights(expected: Weights | None, found: Weights | None, tolerance: float) -> CheckResult:
    name = "weights after five steps"
    if expected is None or found is None:
        return CheckResult(name, True, "not compared: the service keeps them to itself")
    if expected.keys() != found.keys():
        return CheckResult(name, False, f"{len(expected.keys() ^ found.keys())} tensors are in one only")
    worst = max(difference(expected[key], found[key]) for key in expected)
    return _within(name, worst, tolerance)


def difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """The largest difference, relative to the largest value; infinite where one lacks what the other has."""
    if expected.shape != found.shape:
        return float("inf")
    here, there = np.isnan(expected), np.isnan(found)
    if (here != there).any():
        return float("inf")
    if here.all():
        return 0.0
    gap = np.abs(expected[~here].astype(np.float64) - found[~here]).max()
    return float(gap / max(np.abs(expected[~here]).max(), 1e-3))


def _within(name: str, gap: float, tolerance: float) -> CheckResult:
    return CheckResult(name, gap <= tolerance, f"{gap:.1e} (at most {tolerance:.0e})")
