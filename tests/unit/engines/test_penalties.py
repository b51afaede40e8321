"""Tests for min_p, penalties and biases of the local engine: a tiny model with random weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from instar.config import LocalEngineConfig, ModelConfig
from instar.engines.base import EngineInfo
from instar.engines.checks import check_request
from instar.engines.local.engine import LocalEngine
from instar.errors import EngineError
from instar.types import OutputConstraint, SamplingParams
from tests.unit.engines.conformance import TOKENIZER, collect, get_ids, get_logprobs, wait_until_idle
from tests.unit.engines.test_constraints import get_behavior
from tests.unit.engines.test_local import PROMPT, compute_expected_logprobs, load_reference_model

SETTINGS: list[dict[str, Any]] = [
    {"min_p": 0.5},
    {"min_p": 0.3, "temperature": 1.5, "top_p": 0.95, "top_k": 40},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 2.0},
    {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "temperature": 0.7},
    {"logit_bias": {40: 6.0, 41: -100.0, 319: 3.5}},
    {
        "logit_bias": {40: 6.0, 60: -2.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "temperature": 0.8,
        "min_p": 0.05,
        "top_p": 0.97,
    },
]


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[LocalEngine]:
    model = ModelConfig(name=str(tiny_model), dtype="fp32", device="cpu", max_context=512)
    engine = LocalEngine(model, LocalEngineConfig(threads=1, prefill_tokens=16), stop_at_eos=False)
    yield engine
    await engine.close()


def adjust_logits(logits_V: Tensor, prompt: list[int], sampled: list[int], params: SamplingParams) -> Tensor:
    """Return the logits that are sampled from, in the order of vLLM: the bias, the penalties, the
    temperature, min_p, top_k and top_p."""
    logits = logits_V.clone()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in {*prompt, *sampled}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(sampled):
        logits[token] -= params.frequency_penalty * sampled.count(token) + params.presence_penalty
    logits /= params.temperature
    probabilities = logits.softmax(-1)
    logits[probabilities < params.min_p * probabilities.max()] = -torch.inf
    if params.top_k:
        logits[logits < logits.topk(params.top_k).values[-1]] = -torch.inf
    ordered, order = logits.softmax(-1).sort(descending=True)
    logits[order[ordered.cumsum(-1) - ordered >= params.top_p]] = -torch.inf
    return logits


def compute_behavior(
    model: Any, prompt: list[int], sampled: list[int], params: SamplingParams
) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0]
    adjusted = [
        adjust_logits(logits[len(prompt) + i - 1], prompt, sampled[:i], params) for i in range(len(sampled))
    ]
    return [float(row.log_softmax(-1)[token]) for row, token in zip(adjusted, sampled, strict=True)]


@pytest.mark.parametrize("settings", SETTINGS)
async def test_adjusted_replies_have_logprobs_of_the_full_and_of_the_sampled_distribution(
    engine: LocalEngine, tiny_model: Path, settings: dict[str, Any]
) -> None:
    model = load_reference_model(tiny_model)
    for seed in range(2):
        chunks = await collect(engine, PROMPT, max_tokens=60, seed=seed, **settings)
        ids = get_ids(chunks)
        assert get_logprobs(chunks) == pytest.approx(compute_expected_logprobs(model, PROMPT, ids), abs=1e-4)
        expected = compute_behavior(model, PROMPT, ids, SamplingParams(**settings))
        assert get_behavior(chunks) == pytest.approx(expected, abs=1e-4)
        assert np.abs(np.subtract(expected, get_logprobs(chunks))).max() > 0.05


async def test_greedy_reply_maximizes_the_adjusted_logits(engine: LocalEngine, tiny_model: Path) -> None:
    model = load_reference_model(tiny_model)
    for settings in ({"frequency_penalty": 2.0, "presence_penalty": 2.0}, {"repetition_penalty": 5.0}):
        chunks = await collect(engine, PROMPT, max_tokens=30, temperature=0.0, **settings)
        plain = await collect(engine, PROMPT, max_tokens=30, temperature=0.0)
        ids = get_ids(chunks)
        assert ids != get_ids(plain)
        assert set(get_behavior(chunks)) == {0.0}
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + ids])).logits[0]
        for i, token in enumerate(ids):
            row = adjust_logits(
                logits[len(PROMPT) + i - 1],
                PROMPT,
                ids[:i],
                SamplingParams(**settings),  # type: ignore[arg-type]
            )
            assert int(row.argmax()) == token


async def test_logit_bias_forces_and_forbids_tokens(engine: LocalEngine) -> None:
    forced = await collect(engine, PROMPT, max_tokens=20, logit_bias={77: 100.0})
    assert set(get_ids(forced)) == {77}
    assert get_behavior(forced) == pytest.approx([0.0] * 20, abs=1e-4)
    plain = get_ids(await collect(engine, PROMPT, max_tokens=20, seed=4))
    forbidden = dict.fromkeys(plain, -100.0)
    chunks = await collect(engine, PROMPT, max_tokens=20, seed=4, logit_bias=forbidden)
    assert not set(get_ids(chunks)) & set(plain)


@pytest.mark.parametrize("is_deterministic", [False, True])
async def test_adjusted_replies_do_not_depend_on_other_requests_of_the_batch(
    tiny_model: Path, is_deterministic: bool
) -> None:
    model = ModelConfig(name=str(tiny_model), dtype="fp32", device="cpu", max_context=512)
    config = LocalEngineConfig(threads=1, prefill_tokens=16, deterministic=is_deterministic)
    engine = LocalEngine(model, config, stop_at_eos=False)
    settings: list[dict[str, Any]] = [
        *SETTINGS,
        {},
        {"top_p": 0.8},
        {"temperature": 0.0, "frequency_penalty": 1.0},
        {"temperature": 0.0},
    ]
    prompts = [PROMPT[: 6 + n] for n in range(len(settings))]

    def start(n: int) -> Any:
        return collect(engine, prompts[n], max_tokens=20 + 3 * n, seed=n, **settings[n])

    alone = [await start(n) for n in range(len(settings))]
    mixed = await asyncio.gather(*(start(n) for n in range(len(settings))))
    tolerance = 0.0 if is_deterministic else 1e-4
    for first, second in zip(alone, mixed, strict=True):
        assert get_ids(first) == get_ids(second)
        assert get_logprobs(first) == pytest.approx(get_logprobs(second), abs=tolerance, rel=0)
        if first[0].behavior_logprobs is not None:
            assert get_behavior(first) == pytest.approx(get_behavior(second), abs=tolerance, rel=0)
    assert [chunks[0].behavior_logprobs is None for chunks in mixed].index(True) == len(SETTINGS)
    await wait_until_idle(engine)
    await engine.close()


async def test_bias_chooses_among_the_tokens_that_a_constraint_allows(tiny_model: Path) -> None:
    model = ModelConfig(name=str(tiny_model), dtype="fp32", device="cpu", max_context=512)
    engine = LocalEngine(model, LocalEngineConfig(threads=1))
    constraint = OutputConstraint(schema='{"enum": ["a", "b"]}')
    a, b = TOKENIZER.convert_tokens_to_ids(["a", "b"])
    for temperature in (0.0, 1.0):
        for bias, expected in (({a: 50.0, b: -50.0}, '"a"'), ({a: -50.0, b: 50.0}, '"b"')):
            params: dict[str, Any] = {
                "temperature": temperature,
                "constraint": constraint,
                "logit_bias": bias,
            }
            chunks = await collect(engine, PROMPT, max_tokens=20, **params)
            assert TOKENIZER.decode(get_ids(chunks), skip_special_tokens=True) == expected
    await engine.close()


INVALID_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"min_p": 1.5}, "min_p must be between 0 and 1, got 1.5"),
    ({"min_p": float("nan")}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty must be between 0.01 and 100"),
    ({"logit_bias": {320: 1.0}}, r"logit_bias\[320\]: the token is not in the vocabulary"),
    ({"logit_bias": {-1: 1.0}}, r"logit_bias\[-1\]"),
    ({"logit_bias": {3: 100.5}}, r"logit_bias\[3\] must be between -100 and 100, got 100.5"),
]
INFO = EngineInfo("local", "m", 320, 64, (), sampling_fields=("min_p", "logit_bias"))


@pytest.mark.parametrize(("settings", "message"), INVALID_PARAMS)
def test_invalid_sampling_params_are_rejected_by_name(settings: dict[str, Any], message: str) -> None:
    info = msgspec.structs.replace(INFO, sampling_fields=tuple(SamplingParams.__struct_fields__))
    with pytest.raises(EngineError, match=message):
        check_request(info, [1], SamplingParams(**settings))


def test_engine_rejects_fields_that_it_does_not_support() -> None:
    check_request(INFO, [1], SamplingParams(min_p=0.1, logit_bias={3: 1.0}))
    with pytest.raises(EngineError, match="The local engine does not support presence_penalty"):
        check_request(INFO, [1], SamplingParams(min_p=0.1, presence_penalty=0.1))
    both = INFO.intersect(msgspec.structs.replace(INFO, sampling_fields=("logit_bias", "presence_penalty")))
    assert both.sampling_fields == ("logit_bias",)
