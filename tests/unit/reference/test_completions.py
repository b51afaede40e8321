"""A teacher behind an OpenAI-compatible server, in all the ways that servers answer."""

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
from tests.unit.reference.teacher import KEY, TeacherServer, long_ids, serve_teacher


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), hidden=16, layers=1)
    return ModelConfig(name=str(folder), max_context=512)


@pytest.fixture
async def teacher(model: ModelConfig) -> AsyncIterator[TeacherServer]:
    async with serve_teacher(ScriptedEngine(model, ScriptedEngineConfig()), make_tiny_tokenizer()) as teacher:
        yield teacher


def reference(
    teacher: TeacherServer, model: ModelConfig, name: str, *, key: str | None = KEY, **changes: Any
) -> CompletionsReference:
    fields = {"type": "completions", "base_url": teacher.url, "model": name, "timeout": 10.0} | changes
    return CompletionsReference(CompletionsReferenceConfig.model_validate(fields), model, key)


def sample(number: int, length: int = 40, trained: slice = slice(20, 30)) -> Sample:
    mask = np.zeros(length, np.float32)
    mask[trained] = 1
    zeros = np.zeros(length, np.float32)
    return Sample(f"s{number}", "s", long_ids(length, number), mask, zeros, zeros, zeros.astype(np.int32))


@pytest.mark.parametrize("name", ["vllm", "openai", "strict", "sglang", "named", "flaky"])
async def test_logprobs_of_every_kind_of_server(
    teacher: TeacherServer, model: ModelConfig, name: str
) -> None:
    asked = reference(teacher, model, name)
    await asked.start()
    samples = [sample(number, 40 + number) for number in range(6)]
    found = await asked.logprobs(samples)
    for one, values in zip(samples, found, strict=True):
        expected = await teacher.engine.logprobs(one.token_ids)
        np.testing.assert_allclose(values[1:30], expected[1:30], atol=1e-6)
        assert np.isnan(values[[0, *range(30, len(one))]]).all(), "nothing behind the last trained token"
    assert [len(body["prompt"]) for body in teacher.bodies[-6:]] == [30] * 6
    assert teacher.keys == {f"Bearer {KEY}"}
    await asked.close()


async def test_so_many_requests_at_once_and_no_more(teacher: TeacherServer, model: ModelConfig) -> None:
    asked = reference(teacher, model, "vllm", max_in_flight=3)
    await asked.start()
    await asked.logprobs([sample(number) for number in range(20)])
    assert teacher.most_running == 3
    await asked.close()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "llama",
            ConfigError,
            r"base_url: .*does not return.*prompt_logprobs: .*logprobs 1, max_tokens 1: .*1 logprobs",
        ),
        ("bos", EngineError, "read .* as they are"),
        ("other", EngineError, "returned the logprob of .* instead of token"),
        ("foreign", ConfigError, r"trainer\.reference\.model: foreign has another vocabulary"),
        ("denied", EngineError, "401"),
        ("garbage", EngineError, "did not return JSON"),
    ],
)
async def test_what_will_not_do_is_said_at_start(
    teacher: TeacherServer, model: ModelConfig, name: str, error: type[InstarError], message: str
) -> None:
    asked = reference(teacher, model, name)
    with pytest.raises(error, match=message) as caught:
        await asked.start()
    assert KEY not in str(caught.value)
    await asked.close()


async def test_a_deadline_ends_the_waiting(teacher: TeacherServer, model: ModelConfig) -> None:
    asked = reference(teacher, model, "silent", timeout=0.4)
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"within 0\.4 s"):
        await asked.start()
    assert time.monotonic() - began < 5
    await asked.close()


async def test_a_server_that_is_not_there(model: ModelConfig, teacher: TeacherServer) -> None:
    asked = reference(teacher, model, "vllm", base_url="http://127.0.0.1:9/v1", timeout=1.0)
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match="did not answer"):
        await asked.start()
    assert 0.25 < time.monotonic() - began < 5, "it was tried again"
    await asked.close()


async def test_a_missing_logprob_is_no_zero(teacher: TeacherServer, model: ModelConfig) -> None:
    asked = reference(teacher, model, "gone")
    (values,) = await asked.logprobs([sample(0, 40, slice(20, 40))])
    assert np.isnan(values[25])
    await asked.close()


async def test_a_missing_key_is_said(model: ModelConfig, tmp_path: Path) -> None:
    section = {"type": "completions", "base_url": "http://x/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}
    config = RunConfig.model_validate({"model": model.model_dump(), "trainer": {"reference": section}})
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        create_penalty(config, None, None)  # type: ignore[arg-type]
