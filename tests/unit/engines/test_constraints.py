"""Tests for constrained replies of the local engine: a tiny model with random weights."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from instar.config import LocalEngineConfig, ModelConfig
from instar.engines.local.engine import LocalEngine
from instar.engines.local.grammar import GrammarCompiler
from instar.engines.local.model import EngineModel
from instar.errors import ConstraintError
from instar.types import CallForm, OutputConstraint, SamplingParams, TokenChunk
from tests.tiny import make_tiny_tokenizer
from tests.unit.engines.conformance import TOKENIZER, collect, get_ids, get_logprobs, wait_until_idle
from tests.unit.engines.test_local import PROMPT, compute_expected_logprobs, load_reference_model

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "degrees": {"type": "integer", "minimum": -50, "maximum": 50},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["city", "degrees", "note"],
    "additionalProperties": False,
}
CONSTRAINT = OutputConstraint(schema=json.dumps(SCHEMA))
CALC = CallForm(
    begin='<tool_call>\n{"name": "calc", "arguments": ',
    schema='{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},'
    ' "required": ["n"], "additionalProperties": false}',
    end="}\n</tool_call>",
)
EOS: Any = TOKENIZER.eos_token_id


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[LocalEngine]:
    model = ModelConfig(name=str(tiny_model), dtype="fp32", device="cpu", max_context=512)
    engine = LocalEngine(model, LocalEngineConfig(threads=1, prefill_tokens=16))
    yield engine
    await engine.close()


def decode(chunks: list[TokenChunk]) -> str:
    return str(TOKENIZER.decode(get_ids(chunks), skip_special_tokens=True))


def get_behavior(chunks: list[TokenChunk]) -> list[float]:
    return [value for chunk in chunks for value in chunk.behavior_logprobs or [float("nan")]]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.0}, {"temperature": 2.0}, {"top_p": 0.9}, {"top_k": 5}]
)
async def test_constrained_replies_follow_the_schema_and_end_at_eos(
    engine: LocalEngine, settings: dict[str, Any]
) -> None:
    for seed in range(5):
        params: dict[str, Any] = {"max_tokens": 400, "seed": seed, "constraint": CONSTRAINT, **settings}
        chunks = await collect(engine, PROMPT, **params)
        jsonschema.validate(json.loads(decode(chunks)), SCHEMA)
        assert chunks[-1].finish_reason == "stop"
        assert get_ids(chunks)[-1] == EOS


async def test_constrained_reply_has_logprobs_of_the_full_and_of_the_constrained_softmax(
    engine: LocalEngine, tiny_model: Path
) -> None:
    model = load_reference_model(tiny_model)
    compiler = GrammarCompiler(TOKENIZER, [EOS])
    for settings in ({}, {"temperature": 0.7}):
        params: dict[str, Any] = {"max_tokens": 400, "seed": 3, "constraint": CONSTRAINT, **settings}
        chunks = await collect(engine, PROMPT, **params)
        ids = get_ids(chunks)
        expected = compute_expected_logprobs(model, PROMPT, ids)
        assert get_logprobs(chunks) == pytest.approx(expected, abs=1e-4)
        matcher = compiler.start(CONSTRAINT, ())
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + ids])).logits[0]
        constrained: list[float] = []
        for position, token in enumerate(ids):
            row = logits[len(PROMPT) + position - 1] / settings.get("temperature", 1.0)
            row[~torch.from_numpy(matcher.compute_mask(len(row)))] = -torch.inf
            constrained.append(float(row.log_softmax(-1)[token]))
            assert matcher.consume(token) is None
        assert get_behavior(chunks) == pytest.approx(constrained, abs=1e-4)


async def test_greedy_constrained_reply_has_behavior_logprob_zero(engine: LocalEngine) -> None:
    chunks = await collect(engine, PROMPT, max_tokens=400, temperature=0.0, constraint=CONSTRAINT)
    assert set(get_behavior(chunks)) == {0.0}
    assert all(value < 0 for value in get_logprobs(chunks))


async def test_constraints_do_not_affect_other_requests_of_the_batch(engine: LocalEngine) -> None:
    prompts = [PROMPT[: 4 + n] for n in range(6)]
    settings: list[dict[str, Any]] = [
        {},
        {"constraint": CONSTRAINT},
        {"temperature": 0.0},
        {"temperature": 0.0, "constraint": CONSTRAINT},
        {"top_p": 0.8},
        {"constraint": OutputConstraint(calls=(CALC,), separator="\n")},
    ]

    def start(n: int) -> Any:
        return collect(engine, prompts[n], max_tokens=120, seed=n, **settings[n])

    alone = [await start(n) for n in range(6)]
    mixed = await asyncio.gather(*(start(n) for n in range(6)))
    for first, second in zip(alone, mixed, strict=True):
        assert get_ids(first) == get_ids(second)
        assert get_logprobs(first) == pytest.approx(get_logprobs(second), abs=1e-4)
    assert [chunks[0].behavior_logprobs is None for chunks in mixed] == [True] + [False] * 5
    await wait_until_idle(engine)


async def test_constraint_with_calls_samples_a_call(engine: LocalEngine) -> None:
    other = CallForm('<tool_call>\n{"name": "stop", "arguments": ', '{"const": {}}', "}\n</tool_call>")
    texts = [
        decode(
            await collect(
                engine,
                PROMPT,
                max_tokens=400,
                seed=seed,
                constraint=OutputConstraint(calls=(CALC, other), separator=None),
            )
        )
        for seed in range(8)
    ]
    for text in texts:
        call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert (call["name"], list(call["arguments"])) in (("calc", ["n"]), ("stop", []))
    assert len({json.loads(text[11:-12])["name"] for text in texts}) == 2


def sample_text(compiler: GrammarCompiler, constraint: OutputConstraint, ids: list[int]) -> list[int]:
    """Return the tokens that can follow ``ids``."""
    matcher = compiler.start(constraint, ())
    for token in ids:
        assert matcher.compute_mask(400)[token]
        assert matcher.consume(token) is None
    return matcher.compute_mask(400).nonzero()[0].tolist()


@pytest.mark.parametrize("is_added", [True, False])
def test_constraint_allows_reasoning_before_the_reply(is_added: bool) -> None:
    tokenizer = make_tiny_tokenizer()
    if is_added:
        tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])  # type: ignore[list-item]
    compiler = GrammarCompiler(tokenizer, [EOS])
    optional = OutputConstraint(schema='{"enum": ["a"]}', reasoning=("<think>", "</think>"))
    first = sample_text(compiler, optional, [])
    assert set(tokenizer.encode("<think>")[:1]) <= set(first)
    assert tokenizer.encode('"')[0] in first
    reasoned = tokenizer.encode('<think>Why "b"?</think>\n\n"a"')
    assert sample_text(compiler, optional, reasoned) == [EOS]
    required = OutputConstraint(schema='{"enum": ["a"]}', reasoning=("", "</think>"))
    assert len(sample_text(compiler, required, [])) > 200
    assert sample_text(compiler, required, tokenizer.encode('Why?</think>"a"')) == [EOS]


def test_additional_stop_tokens_end_only_a_complete_reply() -> None:
    compiler = GrammarCompiler(TOKENIZER, [EOS])
    matcher = compiler.start(OutputConstraint(schema='{"const": 7}'), [0])
    assert matcher.compute_mask(320).nonzero()[0].tolist() == TOKENIZER.encode("7")
    matcher.consume(TOKENIZER.encode("7")[0])
    assert matcher.compute_mask(320).nonzero()[0].tolist() == [0, EOS]
    assert matcher.compute_mask(2).nonzero()[0].tolist() == [0]


def make_large_schema(choices: int, properties: int) -> dict[str, Any]:
    constants = [{f"k{j}": {"const": f"{i}{j}"} for j in range(properties)} for i in range(choices)]
    return {"anyOf": [{"properties": constant} for constant in constants]}


UNSUPPORTED_SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "objct"}, "objct"),
    ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
    ({"type": "string", "pattern": r"(a)\1"}, "backreferences|regex"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    ({"$ref": "#"}, "."),
    (json.loads('{"items":' * 500 + "{}" + "}" * 500), "recursion limit"),
    (
        {"anyOf": [{"properties": {f"k{j}": {"const": f"{i}{j}"} for j in range(9)}} for i in range(3000)]},
        ".",
    ),
    (json.loads('{"items":' * 900 + "{}" + "}" * 900), "recursion"),
]


@pytest.mark.parametrize(("schema", "reason"), UNSUPPORTED_SCHEMAS)
async def test_unsupported_schema_is_rejected_with_the_reason(
    engine: LocalEngine, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConstraintError, match=reason) as caught:
        await collect(engine, PROMPT, constraint=OutputConstraint(schema=json.dumps(schema)))
    assert len(str(caught.value)) < 400
    assert len(get_ids(await collect(engine, PROMPT, max_tokens=3))) == 3  # the engine still works


async def test_schema_that_exceeds_a_limit_during_a_reply_ends_only_this_reply(engine: LocalEngine) -> None:
    choice = {f"k{j}": {"anyOf": [{"const": f"{j}{k}"} for k in range(20)]} for j in range(20)}
    large = {"anyOf": [{"type": "object", "properties": choice, "title": str(i)} for i in range(50)]}
    schema = {"properties": {"a": {"const": 1}, "b": large}, "required": ["a", "b"], "type": "object"}
    constraint = OutputConstraint(schema=json.dumps(schema))
    params = SamplingParams(max_tokens=200, seed=1, constraint=constraint)
    other = asyncio.create_task(collect(engine, PROMPT, max_tokens=60, seed=2))
    sampled: list[int] = []
    with pytest.raises(ConstraintError, match="row has"):  # noqa: PT012 - the error ends the loop
        async for chunk in engine.generate(PROMPT, params):
            sampled += chunk.token_ids
    assert sampled
    assert get_ids(await other)
    await wait_until_idle(engine)


async def test_unsupported_keywords_of_a_tool_are_not_enforced(engine: LocalEngine) -> None:
    schema = '{"type": "array", "uniqueItems": true, "items": {"enum": [1]}, "maxItems": 2}'
    constraint = OutputConstraint(calls=(CallForm("call ", schema, "."),))
    assert decode(await collect(engine, PROMPT, max_tokens=100, constraint=constraint)).startswith("call [")


@pytest.mark.parametrize(
    "schema", ['{"type": "any"}', '{"type": "string", "pattern": "^(?!a).+"}', "[REDACTED"]
)
async def test_tool_whose_schema_cannot_be_enforced_takes_any_object(
    engine: LocalEngine, schema: str
) -> None:
    arguments = f'{{"type": "object", "properties": {{"a": {schema}}}, "required": ["a"]}}'
    calls = (CallForm("other ", arguments, "."), CALC)
    constraint = OutputConstraint(calls=calls, separator="\n")
    text = decode(await collect(engine, PROMPT, max_tokens=40, constraint=constraint))
    assert text.startswith(("other {", "<tool"))
    # The schemas of other tools are still enforced.
    matcher = GrammarCompiler(TOKENIZER, [EOS]).start(constraint, ())
    for token in TOKENIZER.encode(f"{CALC.begin}{{"):
        assert matcher.consume(token) is None
    assert matcher.consume(TOKENIZER.encode("a")[0]) is not None


async def test_compilation_does_not_block_other_requests(engine: LocalEngine) -> None:
    """The event loop keeps running while a large schema is compiled."""
    constraint = OutputConstraint(schema=json.dumps(make_large_schema(choices=400, properties=40)))
    longest, is_done = 0.0, asyncio.Event()

    async def watch() -> None:
        nonlocal longest
        while not is_done.is_set():
            started_at = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - started_at)

    watcher = asyncio.create_task(watch())
    started_at = time.perf_counter()
    with pytest.raises(ConstraintError):
        await collect(engine, PROMPT, max_tokens=3, constraint=constraint)
    duration = time.perf_counter() - started_at
    is_done.set()
    await watcher
    assert longest < max(0.1, duration / 2)


def test_sampling_params_with_a_constraint_modify_the_distribution() -> None:
    assert SamplingParams(constraint=CONSTRAINT).modifies_distribution
    assert not SamplingParams().modifies_distribution


def test_tokenizer_that_is_not_supported_makes_constraints_unavailable() -> None:
    backend = Tokenizer(models.WordLevel({"hi": 0, "[EOS]": 1}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]")
    assert not GrammarCompiler(tokenizer, [1]).is_available


def test_model_without_an_end_token_samples_unconstrained_replies() -> None:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    assert not GrammarCompiler(PreTrainedTokenizerFast(tokenizer_object=backend), []).is_available


async def test_engine_that_shares_a_model_does_not_load_the_vocabulary(tiny_model: Path) -> None:
    config = ModelConfig(name=str(tiny_model), dtype="fp32", device="cpu", max_context=512)
    model = EngineModel(config).share()
    engine = LocalEngine(config, LocalEngineConfig(threads=1), shared_model=model)
    assert not engine.info.constrains_output
    with pytest.raises(ConstraintError):
        await collect(engine, PROMPT, constraint=CONSTRAINT)
    await engine.close()
