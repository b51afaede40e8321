"""Compare the local engine with generation in transformers, with a LoRA adapter loaded.

    python bench/engine.py [--quick] [--json]

Throughput: concurrent clients send requests of mixed length to the engine, compared with static batches in
``model.generate``, each of which runs until its longest reply is complete; only requested tokens count.
Neither side stops at an end-of-sequence token. The engine is measured again with requests for two adapters in
turn. For reference, transformers' continuous batching is measured on a part of the requests. Time to first
token: a second turn that extends a session is compared with the same prompt and an empty cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from instar.config import LocalEngineConfig, ModelConfig
from instar.engines.local.engine import LocalEngine
from instar.engines.local.model import DTYPES
from instar.models import device_and_dtype, resolve_model
from instar.types import Artifact, Policy, PolicyRef, SamplingParams

WORDS = ["the", "sum", "of", "two", "numbers", "is", "what", "you", "get", "when", "one", "adds", "them"]


@dataclass(frozen=True)
class RequestLoad:
    prompts: list[list[int]]
    reply_lengths: list[int]
    clients: int
    session_tokens: int
    """The length of the history before a second turn."""
    repeats: int
    """The number of second turns to measure."""

    @property
    def reply_tokens(self) -> int:
        return sum(self.reply_lengths)

    def take(self, count: int) -> RequestLoad:
        """Return a load with only the first ``count`` requests."""
        return replace(self, prompts=self.prompts[:count], reply_lengths=self.reply_lengths[:count])


def make_load(tokenizer: Any, quick: bool) -> RequestLoad:
    rng = random.Random(0)
    request_count, max_length = (8, 12) if quick else (64, 256)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(24, 120))) for _ in range(request_count)]
    return RequestLoad(
        prompts=[tokenizer.encode(text) for text in texts],
        reply_lengths=[rng.randint(4 if quick else 16, max_length) for _ in range(request_count)],
        clients=4 if quick else 16,
        session_tokens=100 if quick else 1000,
        repeats=1 if quick else 5,
    )


def make_adapter(model_folder: Path, adapter_folder: Path) -> None:
    """Save a rank 16 adapter for all linear layers, with small random weights."""
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16),
        LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    model.save_pretrained(str(adapter_folder))


async def run_local_engine(
    engine: LocalEngine, load: RequestLoad, policies: Sequence[PolicyRef | None] = (None,)
) -> float:
    """Send all requests with ``load.clients`` concurrent clients, to each of the policies in turn, and return
    the duration in seconds."""
    requests = zip(load.prompts, load.reply_lengths, cycle(policies), strict=False)
    remaining = list(reversed(list(requests)))

    async def run_client() -> None:
        while remaining:
            prompt, length, policy = remaining.pop()
            count = 0
            async for chunk in engine.generate(prompt, SamplingParams(max_tokens=length), policy):
                count += len(chunk.token_ids)
            assert count == length

    start = time.perf_counter()
    await asyncio.gather(*[run_client() for _ in range(load.clients)])
    return time.perf_counter() - start


async def measure_first_token(engine: LocalEngine, prompt: list[int]) -> float:
    """Return the time to the first token in seconds."""
    start = time.perf_counter()
    stream = engine.generate(prompt, SamplingParams(max_tokens=4))
    await anext(stream)
    seconds = time.perf_counter() - start
    async for _ in stream:
        pass
    return seconds


async def measure_second_turns(engine: LocalEngine, load: RequestLoad, policy: Policy) -> tuple[float, float]:
    """Return the median seconds to the first token of a second turn, with a warm and with an empty cache."""
    warm: list[float] = []
    cold: list[float] = []
    for n in range(load.repeats):
        history = [(17 * i + n) % 20000 + 100 for i in range(load.session_tokens - 32)]
        reply = [c.token_ids[0] async for c in engine.generate(history, SamplingParams(max_tokens=32))]
        prompt = history + reply + [(31 * i + n) % 20000 + 100 for i in range(24)]
        warm.append(await measure_first_token(engine, prompt))
        await engine.load(policy)  # empties the cache
        cold.append(await measure_first_token(engine, prompt))
    return statistics.median(warm), statistics.median(cold)


def make_generation_config() -> GenerationConfig:
    """Return settings that sample at temperature 1 from the full vocabulary and never stop early."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None
    )


def run_static_batches(model: Any, load: RequestLoad) -> float:
    """Generate all replies in left-padded batches of ``load.clients`` and return the duration in seconds."""
    config = make_generation_config()
    seconds = 0.0
    for start in range(0, len(load.prompts), load.clients):
        log(f"model.generate: requests {start + 1} to {start + load.clients} of {len(load.prompts)}")
        prompts = load.prompts[start : start + load.clients]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        config.max_new_tokens = max(load.reply_lengths[start : start + load.clients])
        started_at = time.perf_counter()
        with torch.inference_mode():
            model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        seconds += time.perf_counter() - started_at
    return seconds


def run_transformers_continuous(model: Any, load: RequestLoad) -> float:
    """Generate all replies with transformers' continuous batching and return the duration in seconds."""
    config = make_generation_config()
    config.max_new_tokens, config.eos_token_id = max(load.reply_lengths), -1
    batching = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=2048,
        max_batch_tokens=512,
        max_requests_per_batch=load.clients,
        use_cuda_graph=False,
        return_logprobs=True,
    )
    with model.continuous_batching_context_manager(config, continuous_batching_config=batching) as manager:
        start = time.perf_counter()
        for prompt, length in zip(load.prompts, load.reply_lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        tokens = 0
        for _ in load.prompts:
            result = manager.get_result(timeout=300)
            assert result is not None, "transformers' continuous batching returned no result within 300 s"
            assert result.error is None, result.error
            tokens += len(result.generated_tokens)
        seconds = time.perf_counter() - start
    assert tokens == load.reply_tokens
    return seconds


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(quick: bool) -> dict[str, float]:
    config = ModelConfig(max_context=2048)
    folder = resolve_model(config.name)
    device, dtype = device_and_dtype(config)
    load = make_load(AutoTokenizer.from_pretrained(folder), quick)
    metrics: dict[str, float] = {
        "requests": len(load.prompts),
        "tokens": load.reply_tokens,
        "clients": load.clients,
    }
    with tempfile.TemporaryDirectory() as scratch:
        make_adapter(folder, Path(scratch))
        log("measuring the local engine")
        metrics |= asyncio.run(measure_local_engine(config, load, Path(scratch)))
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).to(device).eval()
        # Keep the adapter in the precision of the base model, because peft's default (fp32) is slower.
        model: Any = PeftModel.from_pretrained(base, scratch, autocast_adapter_dtype=False)
    metrics["static_tokens_per_second"] = load.reply_tokens / run_static_batches(model, load)
    try:
        # A quarter of the requests is enough for a point of reference, and this is slow on a CPU.
        log("measuring transformers' continuous batching")
        subset = load.take(max(load.clients, len(load.prompts) // 4))
        seconds = run_transformers_continuous(model.get_base_model(), subset)
        metrics["transformers_cb_tokens_per_second"] = subset.reply_tokens / seconds
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        # This API changes between transformers releases, and the main comparison does not need it.
        warnings.warn(f"transformers' continuous batching did not run: {error}", stacklevel=1)
    metrics["ratio_static"] = metrics["tokens_per_second"] / metrics["static_tokens_per_second"]
    metrics["ratio_warm_turn"] = metrics["cold_turn_seconds"] / metrics["warm_turn_seconds"]
    return metrics


async def measure_local_engine(config: ModelConfig, load: RequestLoad, adapter: Path) -> dict[str, float]:
    engine = LocalEngine(config, LocalEngineConfig(), stop_at_eos=False)
    policy = Policy("bench", 1, Artifact("adapter", str(adapter)))
    await engine.load(policy)
    await measure_first_token(engine, load.prompts[0])  # warm-up
    await engine.load(policy)  # empties the cache
    seconds = await run_local_engine(engine, load)
    await engine.load(policy)  # empties the cache
    other = Policy("bench", 2, policy.artifact)
    await engine.keep(other)
    mixed_seconds = await run_local_engine(engine, load, (policy.ref, other.ref))
    warm, cold = await measure_second_turns(engine, load, policy)
    await engine.close()
    return {
        "tokens_per_second": load.reply_tokens / seconds,
        "two_adapters_tokens_per_second": load.reply_tokens / mixed_seconds,
        "warm_turn_seconds": warm,
        "cold_turn_seconds": cold,
    }


def show(metrics: dict[str, float]) -> None:
    title = "{requests:.0f} requests, {tokens:.0f} tokens, {clients:.0f} clients".format(**metrics)
    table = Table("engine", "tokens/s", "relative to static", title=title)
    static = metrics["static_tokens_per_second"]
    rows = {
        "instar local": "tokens_per_second",
        "instar local, two adapters": "two_adapters_tokens_per_second",
        "model.generate, static batches": "static_tokens_per_second",
        "transformers continuous batching": "transformers_cb_tokens_per_second",
    }
    for name, key in rows.items():
        value = metrics.get(key)
        table.add_row(
            name, *(("did not run", "") if value is None else (f"{value:.0f}", f"{value / static:.2f}×"))
        )
    console = Console()
    console.print(table)
    turns = Table("second turn of a long session", "seconds to first token")
    turns.add_row("cold", f"{metrics['cold_turn_seconds']:.3f}")
    turns.add_row("warm", f"{metrics['warm_turn_seconds']:.3f}")
    turns.add_row("ratio", f"{metrics['ratio_warm_turn']:.1f}×")
    console.print(turns)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the local engine.")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="send only a few short requests, to check that the benchmark works",
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as a JSON object at the end")
    arguments = parser.parse_args()
    metrics = measure(arguments.quick)
    show(metrics)
    if arguments.json:
        print(json.dumps(metrics))


if __name__ == "__main__":
    main()
