"""Tests for the local engine's sampler: samples follow the reported distribution."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from torch import Tensor

from instar.engines.local.sampling import SampledTokens, Sampler
from instar.errors import EngineError
from instar.types import SamplingParams

ROWS = 4000


def draw(logits_V: Tensor, params: SamplingParams, rows: int = ROWS) -> SampledTokens:
    rng = Random(0)
    return Sampler("cpu").draw(logits_V.expand(rows, -1), [params] * rows, [rng] * rows)


def assert_frequencies(ids: list[int], probabilities: Tensor) -> None:
    """Check that the ids follow the distribution: their chi-square statistic is within six sigma.

    The statistic includes only tokens with an expected count of at least five.
    """
    counts = torch.bincount(torch.tensor(ids), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(ids)
    common = expected >= 5
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum().item()
    degrees = int(common.sum())
    assert chi_square < degrees + 6 * math.sqrt(2 * degrees)
    assert counts[probabilities == 0].sum() == 0


@pytest.mark.parametrize("vocab_size", [7, 128, 300])
def test_default_params_sample_from_the_softmax(vocab_size: int) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    drawn = draw(logits, SamplingParams())
    assert_frequencies(drawn.ids, logits.softmax(-1))
    expected = logits.log_softmax(-1)[drawn.ids]
    assert drawn.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert drawn.behavior_logprobs == [None] * ROWS


def test_tokens_with_zero_probability_are_never_sampled() -> None:
    logits = torch.full((260,), -torch.inf)
    logits[[0, 130, 259]] = torch.tensor([1.0, 1.0, 1.0])
    assert set(draw(logits, SamplingParams()).ids) == {0, 130, 259}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    ],
)
def test_behavior_logprobs_match_the_sampled_distribution(params: SamplingParams) -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(2)) * 2
    drawn = draw(logits, params)
    expected = compute_expected_probabilities(logits, params)
    assert_frequencies(drawn.ids, expected)
    assert drawn.behavior_logprobs == pytest.approx(expected[drawn.ids].log().tolist(), abs=1e-4)
    assert drawn.logprobs == pytest.approx(logits.log_softmax(-1)[drawn.ids].tolist(), abs=1e-5)


def compute_expected_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    probabilities = (logits / params.temperature).softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    if params.top_k:
        order = order[: params.top_k]
    total = sum(float(probabilities[i]) for i in order)
    kept: list[int] = []
    mass = 0.0
    for i in order:
        kept.append(i)
        mass += float(probabilities[i]) / total
        if mass >= params.top_p:
            break
    result = torch.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5)]
)
def test_non_finite_logits_raise_an_error(params: SamplingParams) -> None:
    with pytest.raises(EngineError, match="non-finite"):
        draw(torch.full((200,), torch.nan), params, rows=2)


def test_rows_with_different_params_are_sampled_independently() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 300, generator=generator) * 2
    row_params = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.6),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=0),
        SamplingParams(top_k=3),
    ]
    sampler = Sampler("cpu")
    batched = sampler.draw(logits, row_params, [Random(n) for n in range(6)])
    for n, params in enumerate(row_params):
        single = sampler.draw(logits[n : n + 1], [params], [Random(n)])
        assert single.ids == [batched.ids[n]]
        assert single.logprobs == pytest.approx([batched.logprobs[n]], abs=1e-6)
        assert (batched.behavior_logprobs[n] is None) == (params == SamplingParams())
    assert batched.ids[1] == int(logits[1].argmax())
    assert batched.behavior_logprobs[1] == 0.0
