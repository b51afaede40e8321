"""Tests for a teacher on an OpenAI-compatible server, in every response format that servers use."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.config import CompletionsReferenceConfig, ModelConfig, RunConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.errors import ConfigError, EngineError, EngineUnavailable, InstarError
from instar.reference.completions import CompletionsReference
from instar.reference.factory import create_penalty
from instar.types import Sample
from tests.tiny import make_tiny_model, make_tiny_tokenizer
from tests.unit.reference.teacher import KEY, TeacherServer, make_token_ids, serve_teacher


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), hidden=16, layers=1)
    return ModelConfig(name=str(folder), max_context=512)


@pytest.fixture
async def teacher(model: ModelConfig) -> AsyncIterator[TeacherServer]:
    async with serve_teacher(ScriptedEngine(model, ScriptedEngineConfig()), make_tiny_tokenizer()) as teacher:
        yield teacher


def make_reference(
    teacher: TeacherServer, model: ModelConfig, name: str, *, key: str | None = KEY, **overrides: Any
) -> CompletionsReference:
    fields = {"type": "completions", "base_url": teacher.url, "model": name, "timeout": 10.0} | overrides
    return CompletionsReference(CompletionsReferenceConfig.model_validate(fields), model, key)


def make_sample(seed: int, length: int = 40, trained: slice = slice(20, 30)) -> Sample:
    mask = np.zeros(length, np.float32)
    mask[trained] = 1
    zeros = np.zeros(length, np.float32)
    return Sample(f"s{seed}", "s", make_token_ids(length, seed), mask, zeros, zeros, zeros.astype(np.int32))


@pytest.mark.parametrize("name", ["vllm", "openai", "strict", "sglang", "token_ids", "flaky"])
async def test_completions_reference_reads_every_response_format(
    teacher: TeacherServer, model: ModelConfig, name: str
) -> None:
    reference = make_reference(teacher, model, name)
    await reference.start()
    samples = [make_sample(number, 40 + number) for number in range(6)]
    logprobs = await reference.logprobs(samples)
    for sample, values in zip(samples, logprobs, strict=True):
        expected = await teacher.engine.logprobs(sample.token_ids)
        np.testing.assert_allclose(values[1:30], expected[1:30], atol=1e-6)
        assert np.isnan(values[[0, *range(30, len(sample))]]).all(), (
            "there are no logprobs after the last trained token"
        )
    assert [len(body["prompt"]) for body in teacher.bodies[-6:]] == [30] * 6
    assert teacher.authorizations == {f"Bearer {KEY}"}
    await reference.close()


async def test_completions_reference_limits_requests_in_flight(
    teacher: TeacherServer, model: ModelConfig
) -> None:
    reference = make_reference(teacher, model, "vllm", max_in_flight=3)
    await reference.start()
    await reference.logprobs([make_sample(number) for number in range(20)])
    assert teacher.max_active_requests == 3
    await reference.close()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "llama",
            ConfigError,
            r"base_url: .*does not return.*prompt_logprobs: .*logprobs 1, max_tokens 1: .*1 logprobs",
        ),
        ("bos", EngineError, "read .* tokens instead of"),
        ("wrong_ids", EngineError, "returned no logprob for token .*, only for"),
        ("foreign", ConfigError, r"trainer\.reference\.model: the vocabulary of foreign differs"),
        ("denied", EngineError, "401"),
        ("malformed", EngineError, "did not return JSON"),
    ],
)
async def test_completions_reference_rejects_unsuitable_server_at_start(
    teacher: TeacherServer, model: ModelConfig, name: str, error: type[InstarError], message: str
) -> None:
    reference = make_reference(teacher, model, name)
    with pytest.raises(error, match=message) as caught:
        await reference.start()
    assert KEY not in str(caught.value)
    await reference.close()


async def test_completions_reference_with_unresponsive_server_times_out(
    teacher: TeacherServer, model: ModelConfig
) -> None:
    reference = make_reference(teacher, model, "unresponsive", timeout=0.4)
    started_at = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"unavailable after 0\.4 s"):
        await reference.start()
    assert time.monotonic() - started_at < 5
    await reference.close()


async def test_completions_reference_with_unreachable_server_retries_then_fails(
    model: ModelConfig, teacher: TeacherServer
) -> None:
    reference = make_reference(teacher, model, "vllm", base_url="http://127.0.0.1:9/v1", timeout=1.0)
    started_at = time.monotonic()
    with pytest.raises(EngineUnavailable, match="is still unavailable after"):
        await reference.start()
    assert 0.25 < time.monotonic() - started_at < 5, "the request was retried"
    await reference.close()


async def test_completions_reference_returns_nan_for_missing_logprob(
    teacher: TeacherServer, model: ModelConfig
) -> None:
    reference = make_reference(teacher, model, "incomplete")
    (values,) = await reference.logprobs([make_sample(0, 40, slice(20, 40))])
    assert np.isnan(values[25])
    await reference.close()


async def test_create_penalty_with_missing_key_names_variable(model: ModelConfig, tmp_path: Path) -> None:
    section = {"type": "completions", "base_url": "http://x/v1", "model": "m", "api_key_env": "UNSET_KEY"}
    config = RunConfig.model_validate({"model": model.model_dump(), "trainer": {"reference": section}})
    with pytest.raises(ConfigError, match="UNSET_KEY is not set"):
        create_penalty(config, None, None)  # type: ignore[arg-type]
