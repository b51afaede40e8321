"""Tests for the local engine: logprobs compared with transformers, cache limits, policies and failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from instar.config import LocalEngineConfig, ModelConfig
from instar.engines.local.adapters import Adapter, AdapterLayers
from instar.engines.local.engine import LocalEngine
from instar.engines.local.lora import LoraPair, pack_weights, replace_linears
from instar.errors import ConfigError, EngineError, EngineUnavailable
from instar.types import Artifact, Policy, SamplingParams
from tests.tiny import make_tiny_model
from tests.unit.engines.conformance import (
    TOKENIZER,
    collect,
    get_ids,
    get_logprobs,
    get_versions,
    wait_until_idle,
)
from tests.unit.engines.conftest import save_adapter

PROMPT = TOKENIZER.encode(
    "<|im_start|>user\nWhat is 615 plus 278? And 12 * 34?<|im_end|>\n<|im_start|>assistant\n"
)


def make_engine(folder: Path, **settings: Any) -> LocalEngine:
    model = ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=512)
    return LocalEngine(model, LocalEngineConfig(threads=1, **settings), stop_at_eos=False)


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[LocalEngine]:
    engine = make_engine(tiny_model, prefill_tokens=16)
    yield engine
    await engine.close()


def load_reference_model(folder: Path, adapter: Path | None = None) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return PeftModel.from_pretrained(model, str(adapter)) if adapter else model


def compute_expected_logprobs(model: Any, prompt: list[int], sampled: list[int]) -> list[float]:
    ids = torch.tensor([prompt + sampled])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    return [float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(sampled)]


def make_adapter_policy(folder: Path, version: int = 1) -> Policy:
    return Policy("p", version, Artifact("adapter", str(folder)))


async def test_logprobs_of_mixed_batches_match_transformers(engine: LocalEngine, tiny_model: Path) -> None:
    """Prompts that are longer and shorter than a prefill chunk arrive in two groups."""
    prompts = [PROMPT[:n] + TOKENIZER.encode("x" * n) for n in (2, 5, 17, 30, 33, 40)]
    first = [
        asyncio.create_task(collect(engine, p, max_tokens=30 - n, seed=n)) for n, p in enumerate(prompts)
    ]
    await asyncio.sleep(0.02)
    second = [
        asyncio.create_task(collect(engine, p, max_tokens=3 + n, seed=n)) for n, p in enumerate(prompts)
    ]
    model = load_reference_model(tiny_model)
    for prompt, chunks in zip(prompts * 2, await asyncio.gather(*first, *second), strict=True):
        assert get_logprobs(chunks) == pytest.approx(
            compute_expected_logprobs(model, prompt, get_ids(chunks)), abs=1e-4
        )


async def test_greedy_reply_matches_transformers_generate(engine: LocalEngine, tiny_model: Path) -> None:
    reply = get_ids(await collect(engine, PROMPT, max_tokens=24, temperature=0))
    ids = torch.tensor([PROMPT])
    generated = load_reference_model(tiny_model).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False
    )
    # Only transformers suppresses the EOS token (min_new_tokens), so the replies differ after it.
    eos = TOKENIZER.eos_token_id
    end = reply.index(eos) if eos in reply else len(reply)
    assert reply[:end] == generated[0, len(PROMPT) :].tolist()[:end]


async def test_logprobs_under_an_adapter_match_peft(
    engine: LocalEngine, tiny_model: Path, adapter: Path
) -> None:
    await engine.load(make_adapter_policy(adapter))
    model = load_reference_model(tiny_model, adapter)
    chunks = await collect(engine, PROMPT, max_tokens=20, seed=1)
    expected = compute_expected_logprobs(model, PROMPT, get_ids(chunks))
    assert get_logprobs(chunks) == pytest.approx(expected, abs=1e-4)
    base = compute_expected_logprobs(load_reference_model(tiny_model), PROMPT, get_ids(chunks))
    assert max(abs(a - b) for a, b in zip(expected, base, strict=True)) > 0.05

    await engine.load(Policy("p", 2, Artifact("base")))
    chunks = await collect(engine, PROMPT, max_tokens=20, seed=1)
    assert get_logprobs(chunks) == pytest.approx(
        compute_expected_logprobs(load_reference_model(tiny_model), PROMPT, get_ids(chunks)), abs=1e-4
    )


async def test_next_turn_computes_only_new_tokens(engine: LocalEngine, tiny_model: Path) -> None:
    first = get_ids(await collect(engine, PROMPT, max_tokens=20, seed=1))
    next_prompt = PROMPT + first + TOKENIZER.encode("<|im_end|>\n<|im_start|>tool\n893<|im_end|>\n")
    before = await engine.status()
    chunks = await collect(engine, next_prompt, max_tokens=20, seed=2)
    after = await engine.status()
    # The last sampled token is not cached, because it was not fed to the model.
    assert after.cached_tokens - before.cached_tokens == len(PROMPT) + len(first) - 1
    assert get_logprobs(chunks) == pytest.approx(
        compute_expected_logprobs(load_reference_model(tiny_model), next_prompt, get_ids(chunks)), abs=1e-4
    )


async def test_release_memory_frees_the_kv_cache_only_when_idle(engine: LocalEngine) -> None:
    reply = engine.generate(PROMPT, SamplingParams(max_tokens=200, seed=1))
    await anext(reply)
    engine.release_memory()  # Ignored while a reply is running.
    assert len([chunk async for chunk in reply]) == 199
    await collect(engine, PROMPT, max_tokens=4, seed=2)
    before = (await engine.status()).cached_tokens
    assert before == len(PROMPT) - 1
    engine.release_memory()
    await collect(engine, PROMPT, max_tokens=4, seed=2)
    assert (await engine.status()).cached_tokens == before


async def test_set_kv_tokens_limits_concurrent_replies(engine: LocalEngine) -> None:
    async def measure_max_running() -> int:
        """Return the maximum number of concurrent replies out of 32."""
        maximum = 0
        replies = [asyncio.create_task(collect(engine, PROMPT, max_tokens=64, seed=n)) for n in range(32)]
        while not all(reply.done() for reply in replies):
            maximum = max(maximum, (await engine.status()).running)
            await asyncio.sleep(0.001)
        return maximum

    engine.set_kv_tokens(1024)
    assert await measure_max_running() == 1024 // 128  # each request reserves 128 tokens
    engine.set_kv_tokens(32 * 512)
    assert await measure_max_running() == 32


async def test_shared_prefix_is_computed_once(engine: LocalEngine) -> None:
    """All requests arrive together. Their shared prefix is longer than a prefill chunk."""
    prompts = [PROMPT + [50 + n // 4] * 3 for n in range(16)]
    await asyncio.gather(*[collect(engine, p, max_tokens=4, seed=n) for n, p in enumerate(prompts)])
    status = await engine.status()
    computed = status.prompt_tokens - status.cached_tokens
    # Each request computes its last prompt token for the logits, and a suffix too short to wait for.
    assert computed <= len(PROMPT) + 16 * 4


async def test_replies_do_not_wait_for_scoring_requests(engine: LocalEngine) -> None:
    """A scored prompt is not cached, so a reply with the same prefix gains nothing by waiting for it."""
    replied = asyncio.Event()

    async def score(index: int) -> None:
        while not replied.is_set():
            await engine.logprobs(PROMPT + [50 + index] * 100)

    scoring_tasks = [asyncio.create_task(score(index)) for index in range(3)]
    await asyncio.sleep(0.05)
    await asyncio.wait_for(collect(engine, [*PROMPT, 60], max_tokens=2), 20)
    replied.set()
    await asyncio.gather(*scoring_tasks)


async def test_small_kv_cache_gives_correct_logprobs(tiny_model: Path) -> None:
    """The cache holds only one context, so requests wait and prefixes are evicted."""
    engine = make_engine(tiny_model, kv_tokens=512, max_batch=8)
    prompts = [[n + 5] * 100 for n in range(8)]
    replies = await asyncio.gather(*[collect(engine, p, max_tokens=50, seed=1) for p in prompts])
    model = load_reference_model(tiny_model)
    for prompt, chunks in zip(prompts, replies, strict=True):
        assert get_logprobs(chunks) == pytest.approx(
            compute_expected_logprobs(model, prompt, get_ids(chunks)), abs=1e-4
        )
    await engine.close()


def test_engine_rejects_a_kv_cache_smaller_than_the_context(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="kv_tokens"):
        make_engine(tiny_model, kv_tokens=511)


async def test_long_request_after_short_ones_stays_within_kv_tokens(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, kv_tokens=600, max_batch=8)
    await asyncio.gather(*[collect(engine, [n + 5] * 10, max_tokens=10) for n in range(8)])
    chunks = await collect(engine, [9] * 400, max_tokens=20, seed=1)
    assert engine._scheduler._rows.capacity_tokens <= 600
    assert get_logprobs(chunks) == pytest.approx(
        compute_expected_logprobs(load_reference_model(tiny_model), [9] * 400, get_ids(chunks)), abs=1e-4
    )
    await engine.close()


async def test_requests_after_a_load_do_not_reuse_keys_cached_under_old_weights(
    tiny_model: Path, adapter: Path
) -> None:
    """After a load, the next turn and other prompts match a new engine with the new weights."""
    engine, new_engine = make_engine(tiny_model), make_engine(tiny_model)
    await new_engine.load(make_adapter_policy(adapter))
    await collect(engine, PROMPT, max_tokens=10, seed=0)

    stream = engine.generate([*PROMPT, 7], SamplingParams(max_tokens=200, seed=1))
    chunks = [await anext(stream) for _ in range(5)]
    await engine.load(make_adapter_policy(adapter))
    chunks += [chunk async for chunk in stream]
    assert set(get_versions(chunks)) == {0, 1}

    next_prompt = [*PROMPT, 7, *get_ids(chunks), *TOKENIZER.encode("next turn")]
    for prompt in (next_prompt, [*PROMPT, 7], PROMPT):
        actual = await collect(engine, prompt, max_tokens=10, seed=2)
        expected = await collect(new_engine, prompt, max_tokens=10, seed=2)
        assert get_ids(actual) == get_ids(expected)
        assert get_logprobs(actual) == pytest.approx(get_logprobs(expected), abs=1e-5)
    await engine.close()
    await new_engine.close()


async def test_load_replaces_full_weights_and_restores_the_base(
    engine: LocalEngine, tiny_model: Path, tmp_path: Path
) -> None:
    other_model = make_tiny_model(tmp_path / "other", seed=5)
    await engine.load(Policy("p", 1, Artifact("weights", str(other_model))))
    chunks = await collect(engine, PROMPT, max_tokens=10, seed=1)
    assert get_logprobs(chunks) == pytest.approx(
        compute_expected_logprobs(load_reference_model(other_model), PROMPT, get_ids(chunks)), abs=1e-4
    )
    await engine.load(Policy("p", 2, Artifact("base")))
    chunks = await collect(engine, PROMPT, max_tokens=10, seed=1)
    assert get_logprobs(chunks) == pytest.approx(
        compute_expected_logprobs(load_reference_model(tiny_model), PROMPT, get_ids(chunks)), abs=1e-4
    )
    wider_model = make_tiny_model(tmp_path / "wider", hidden=128)
    with pytest.raises(EngineError, match="do not have the architecture"):
        await engine.load(Policy("p", 3, Artifact("weights", str(wider_model))))
    with pytest.raises(EngineError, match="cannot be read"):
        await engine.load(Policy("p", 3, Artifact("weights", str(tmp_path / "missing"))))
    assert (await engine.status()).version == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["input_layernorm"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
    ],
)
async def test_load_rejects_unsupported_adapters(
    engine: LocalEngine, tiny_model: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    save_adapter(tiny_model, tmp_path, LoraConfig(r=4, target_modules=["q_proj"], **settings))
    with pytest.raises(EngineError, match=message):
        await engine.load(make_adapter_policy(tmp_path))
    with pytest.raises(EngineError, match="cannot be read"):
        await engine.load(make_adapter_policy(tmp_path / "missing"))
    assert (await engine.status()).version == 0


@pytest.mark.parametrize("settings", [{"r": None}, {"r": 0}, {"lora_alpha": "high"}, {}])
async def test_load_rejects_an_adapter_without_valid_rank_and_alpha(
    engine: LocalEngine, tiny_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    save_adapter(tiny_model, tmp_path, LoraConfig(r=4, target_modules=["q_proj"]))
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps(config if settings else {"peft_type": "LORA"}))
    with pytest.raises(EngineError, match="`r` and `lora_alpha` in"):
        await engine.load(make_adapter_policy(tmp_path))


async def test_model_failure_is_raised_to_every_caller(tiny_model: Path) -> None:
    """Requests in flight, later requests, `load` and `status` raise the error instead of hanging."""
    engine = make_engine(tiny_model)
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=400, temperature=0))
    await anext(stream)
    engine._model._model.model.layers[0].mlp = None
    with pytest.raises(EngineError, match="stopped"):
        async for _ in stream:
            pass
    with pytest.raises(EngineError, match="stopped"):
        await engine.status()
    with pytest.raises(EngineError, match="stopped"):
        await collect(engine, PROMPT)
    with pytest.raises(EngineError, match="stopped"):
        await engine.load(Policy("p", 1, Artifact("base")))
    await engine.close()


async def test_close_aborts_requests_in_flight(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    task = asyncio.create_task(collect(engine, PROMPT, max_tokens=400))
    await asyncio.sleep(0.05)
    await engine.close()
    with pytest.raises(EngineUnavailable):
        await task


async def test_logprobs_are_correct_under_random_arrivals_and_cancellations(tiny_model: Path) -> None:
    """KV cache rows are moved, swapped and freed in any order."""
    engine = make_engine(tiny_model, prefill_tokens=8, max_batch=10)
    model = load_reference_model(tiny_model)

    async def send_request(n: int) -> None:
        await asyncio.sleep(0.003 * (n % 7))
        prompt = [(n * 7 + i * i) % 200 + 5 for i in range(1 + (n * 13) % 90)]
        stream = engine.generate(prompt, SamplingParams(max_tokens=1 + (n * 5) % 23, seed=n))
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if n % 5 == 0 and len(chunks) == 4:
                await stream.aclose()
                return
        expected = compute_expected_logprobs(model, prompt, get_ids(chunks))
        assert get_logprobs(chunks) == pytest.approx(expected, abs=1e-4)

    await asyncio.gather(*[send_request(n) for n in range(60)])
    await wait_until_idle(engine)
    await engine.close()


async def test_reply_ends_at_the_eos_token(tiny_model: Path) -> None:
    model = ModelConfig(name=str(tiny_model), dtype="fp32", device="cpu", max_context=512)
    engine = LocalEngine(model, LocalEngineConfig(threads=1))
    eos = TOKENIZER.eos_token_id
    replies = await asyncio.gather(*[collect(engine, PROMPT, max_tokens=200, seed=s) for s in range(40)])
    assert any(chunks[-1].finish_reason == "stop" for chunks in replies)
    for chunks in replies:
        is_stopped = chunks[-1].finish_reason == "stop"
        assert (get_ids(chunks)[-1] == eos) == is_stopped
        assert (eos in get_ids(chunks)) == is_stopped
    await engine.close()


def select_adapters(layers: AdapterLayers, spans: list[tuple[Adapter, int]], *, stacks: bool = True) -> None:
    count = sum(count for _, count in spans)
    layers.select(spans, torch.arange(count), count, stacks=stacks)


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_packed_bf16_layers_match_plain_layers(rows: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 32, bias=False)).bfloat16()
    x = torch.randn(1, rows, 48, dtype=torch.bfloat16)
    pair = LoraPair(torch.randn(4, 48).bfloat16(), torch.randn(4, 64).bfloat16())
    with torch.inference_mode():
        base, adapted = model(x), model[1](model[0](x) + (x @ pair.down.T) @ pair.up)
        replace_linears(model)
        pack_weights(model)
        assert torch.equal(model(x), base)
        layers = AdapterLayers(model)
        select_adapters(layers, [(Adapter({"0": pair}), rows)])
        torch.testing.assert_close(model(x), adapted, rtol=0.05, atol=0.2)
        select_adapters(layers, [(Adapter({}), rows)])
        assert torch.equal(model(x), base)
