"""Tests for `engine.deterministic`: replies do not depend on the batch, and settings that prevent it are
rejected."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from instar.config import LocalEngineConfig, ModelConfig, RunConfig
from instar.engines.factory import create_engine
from instar.engines.local.attention import MIN_GEMM_ROWS
from instar.engines.local.determinism import find_obstacle
from instar.engines.local.engine import LocalEngine
from instar.errors import ConfigError
from tests.tiny import make_tiny_model
from tests.unit.engines.conformance import TOKENIZER, collect, get_ids, get_logprobs
from tests.unit.engines.conftest import save_adapter
from tests.unit.engines.test_local import PROMPT, make_adapter_policy

Precision = Literal["fp32", "bf16"]
PROMPTS = [PROMPT[:n] + TOKENIZER.encode("x" * n) for n in (1, 2, 5, 17, 30, 33, 40, 70)]


def make_model_config(folder: Path, dtype: Precision) -> ModelConfig:
    return ModelConfig(name=str(folder), dtype=dtype, device="cpu", max_context=512)


async def sample(engine: LocalEngine, number: int) -> tuple[list[int], list[float]]:
    chunks = await collect(engine, PROMPTS[number], max_tokens=4 + 3 * number, seed=number)
    return get_ids(chunks), get_logprobs(chunks)


async def sample_all(engine: LocalEngine, *, is_concurrent: bool) -> list[Any]:
    """Return the tokens and logprobs of all replies, and the scores of these tokens."""
    numbers = range(len(PROMPTS))
    if is_concurrent:
        replies = await asyncio.gather(*(sample(engine, number) for number in numbers))
    else:
        replies = [await sample(engine, number) for number in numbers]
    scores = [await engine.logprobs(prompt + ids) for prompt, (ids, _) in zip(PROMPTS, replies, strict=True)]
    return [*replies, *(score[1:].tolist() for score in scores)]


@pytest.mark.parametrize(
    ("dtype", "threads"), [("fp32", None), ("fp32", 1), ("bf16", 1), ("bf16", 2), ("bf16", 8)]
)
async def test_deterministic_replies_do_not_depend_on_the_batch(
    tiny_model: Path, tmp_path: Path, dtype: Precision, threads: int | None
) -> None:
    """Alone or together, with cached or split prompts, the tokens and logprobs have the same bits."""
    save_adapter(tiny_model, tmp_path / "adapter", LoraConfig(r=4, target_modules="all-linear"))
    results: list[Any] = []
    for prefill_tokens, is_concurrent in ((512, False), (512, True), (7, True)):
        settings = LocalEngineConfig(threads=threads, deterministic=True, prefill_tokens=prefill_tokens)
        engine = LocalEngine(make_model_config(tiny_model, dtype), settings, stop_at_eos=False)
        engine.use_cores(8)  # ignored if the number of threads is fixed
        await engine.load(make_adapter_policy(tmp_path / "adapter"))
        results += [await sample_all(engine, is_concurrent=is_concurrent) for _ in range(2)]
        await engine.close()
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 64), (576, 1536), (1536, 576), (960, 2560)])
def test_product_rows_do_not_depend_on_their_number_from_min_gemm_rows(inputs: int, outputs: int) -> None:
    """The layers of real models use other CPU kernels than those of the tiny one."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    rows = torch.randn(200, inputs, generator=generator)
    counts = [*range(MIN_GEMM_ROWS, 40), 64, 100, 199]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        product = torch.nn.functional.linear(rows, weight)
        products = [torch.nn.functional.linear(rows[:count], weight) for count in counts]
    finally:
        torch.set_num_threads(threads)
    assert [c for c, p in zip(counts, products, strict=True) if not torch.equal(p, product[:c])] == []


@pytest.mark.parametrize(("dtype", "kv_heads"), [("fp32", 2), ("bf16", 1)])
def test_deterministic_engine_rejects_several_threads_if_it_needs_one(
    tmp_path: Path, dtype: Precision, kv_heads: int
) -> None:
    model = make_model_config(make_tiny_model(tmp_path, kv_heads=kv_heads), dtype)
    with pytest.raises(ConfigError, match=r"engine\.threads: 2 is not possible .* set engine\.threads to 1"):
        LocalEngine(model, LocalEngineConfig(threads=2, deterministic=True))


@pytest.fixture(scope="module")
def expert_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = Qwen3MoeConfig(vocab_size=len(TOKENIZER), num_experts=4, num_experts_per_tok=2, **sizes, **heads)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def test_obstacle_is_a_gpu_or_experts_in_fp32(tiny_model: Path, expert_model: Path) -> None:
    assert "GPU" in str(find_obstacle("cuda", "bf16", tiny_model))
    assert "experts" in str(find_obstacle("cpu", "fp32", expert_model))
    assert find_obstacle("cpu", "bf16", expert_model) is None
    assert find_obstacle("cpu", "fp32", tiny_model) is None


async def test_experts_in_fp32_reject_deterministic_only_if_it_is_set(expert_model: Path) -> None:
    model = make_model_config(expert_model, "fp32")
    with pytest.raises(ConfigError, match=r"engine\.deterministic: true is not possible, because .* experts"):
        LocalEngine(model, LocalEngineConfig(deterministic=True))
    config = RunConfig.model_validate({"model": model, "engine": "local", "trainer": {"mode": "sync"}})
    await create_engine(config).close()


async def compare_batches(folder: Path, mode: str) -> bool:
    """Return True if the replies of a run's engine do not depend on the batch."""
    model = make_model_config(folder, "fp32")
    config = RunConfig.model_validate({"model": model, "engine": "local", "trainer": {"mode": mode}})
    results: list[Any] = []
    for is_concurrent in (False, True):
        engine = create_engine(config)
        assert isinstance(engine, LocalEngine)
        engine.use_cores(1)
        results.append(await sample_all(engine, is_concurrent=is_concurrent))
        await engine.close()
    return results[0] == results[1]


async def test_engine_is_deterministic_by_default_only_in_sync_mode(tiny_model: Path) -> None:
    assert await compare_batches(tiny_model, "sync")
    assert not await compare_batches(tiny_model, "async")
