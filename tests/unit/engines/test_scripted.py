from __future__ import annotations

import time
from pathlib import Path

import pytest

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.errors import ConfigError
from tests.unit.engines.conformance import TOKENIZER, collect, get_ids, get_logprobs


def shout(prompt: str, seed: int | None) -> str:
    return f"{prompt.upper()}{seed}"


def make_engine(tiny_model: Path, **settings: object) -> ScriptedEngine:
    config = ScriptedEngineConfig.model_validate(settings)
    return ScriptedEngine(ModelConfig(name=str(tiny_model), max_context=256), config)


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids)


async def test_scripted_engine_cycles_through_its_replies(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, replies=["first", "second"])
    prompt = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n")
    replies: list[str] = []
    for _ in range(3):
        chunks = await collect(engine, prompt)
        assert chunks[-1].finish_reason == "stop"
        replies.append(decode(get_ids(chunks)))
        prompt = prompt + get_ids(chunks) + TOKENIZER.encode("\n<|im_start|>user\nmore<|im_end|>\n")
    assert replies == ["first<|im_end|>", "second<|im_end|>", "first<|im_end|>"]


async def test_scripted_engine_calls_the_function_with_prompt_text_and_seed(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, function=f"{__name__}:shout")
    chunks = await collect(engine, TOKENIZER.encode("say it"), seed=7)
    assert decode(get_ids(chunks)) == "SAY IT7<|im_end|>"


async def test_scripted_logprobs_depend_only_on_tokens_and_seed(tiny_model: Path) -> None:
    engine, other_engine = (
        make_engine(tiny_model, replies=["aaaa"]),
        make_engine(tiny_model, replies=["aaaa"]),
    )
    logprobs = get_logprobs(await collect(engine, [5, 6], seed=1))
    assert logprobs == get_logprobs(await collect(other_engine, [5, 6], seed=1))
    assert len(set(logprobs)) == len(logprobs)
    assert all(-3 < value < 0 for value in logprobs)
    assert logprobs != get_logprobs(await collect(engine, [5, 7], seed=1))
    assert logprobs != get_logprobs(await collect(engine, [5, 6], seed=2))


async def test_scripted_engine_waits_before_each_token(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, replies=["abc"], delay=0.02)
    start = time.monotonic()
    count = len(get_ids(await collect(engine, [5])))
    assert time.monotonic() - start >= 0.02 * count


def test_scripted_engine_requires_replies_or_a_function(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="replies"):
        make_engine(tiny_model, replies=[])
