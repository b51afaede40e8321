"""The conformance cases. Each case starts from the same saved state and records arrays by name."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.backends.base import Backend
from instar.config import AdamConfig, LossConfig, LossName
from instar.conformance.batches import make_edge_samples, make_sample, make_token_generator, make_tree_samples
from instar.engines.base import Engine
from instar.errors import BackendError, NonFiniteError
from instar.types import Artifact, Floats, Policy, SamplingParams

ADAM = AdamConfig(lr=0.01, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5)
LEARNING_RATES = (0.01, 0.002, 0.03, 0.005, 0.02)
LOSS = LossConfig(name="importance_sampling")
"""Supported by all services."""
LOSSES: tuple[LossName, ...] = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
PROMPT = make_token_generator(11)(40)
SAMPLING_PARAMS = SamplingParams(max_tokens=24, seed=5)
FIVE_STEPS = "five_steps"
"""The case whose published adapter is compared."""

ConformanceCase = Callable[["CaseContext"], Awaitable[None]]


@dataclass
class CaseContext:
    backend: Backend
    create_engine: Callable[[], Engine]
    """Creates an engine that can load the backend's policies."""
    folder: Path
    max_context: int
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    artifacts: dict[str, Artifact] = field(default_factory=dict[str, Artifact])

    def record(self, name: str, values: Any) -> None:
        self.arrays[name] = np.asarray(values)

    def record_logprobs(self, name: str, values: Sequence[Floats]) -> None:
        self.arrays[name] = np.concatenate(values)

    async def record_forward(self, name: str) -> None:
        self.record_logprobs(name, await self.backend.forward(make_tree_samples()))

    async def train_step(self, batch_seed: int, adam: AdamConfig = ADAM) -> None:
        await self.backend.forward_backward(make_tree_samples(batch_seed), LOSS)
        await self.backend.optim_step(adam)

    async def publish(self, name: str) -> Artifact:
        self.artifacts[name] = await self.backend.publish(self.folder / "policies" / name)
        return self.artifacts[name]


async def record_reference(context: CaseContext) -> None:
    """Record the base model's logprobs after a step has changed the adapter."""
    await context.train_step(0)
    context.record_logprobs("reference", await context.backend.reference_logprobs(make_tree_samples()))


def make_loss_case(name: LossName) -> ConformanceCase:
    async def case(context: CaseContext) -> None:
        await context.train_step(5)
        result = await context.backend.forward_backward(make_tree_samples(), LossConfig(name=name))
        context.record(f"{name}/loss", result.loss)
        context.record(f"{name}/tokens", result.metrics["tokens"])
        context.record_logprobs(f"{name}/logprobs", result.logprobs)
        context.record(f"{name}/grad_norm", (await context.backend.optim_step(ADAM)).grad_norm)
        await context.record_forward(f"{name}/after")

    return case


async def record_clipped_loss(context: CaseContext) -> None:
    loss = LossConfig(name="ppo", clip_low=0.5, clip_high=1.05)
    context.record("clipped/loss", (await context.backend.forward_backward(make_tree_samples(), loss)).loss)
    await context.backend.optim_step(ADAM)


async def record_edge_cases(context: CaseContext) -> None:
    samples = make_edge_samples(context.max_context)
    result = await context.backend.forward_backward(samples, LOSS)
    context.record("edges/loss", result.loss)
    context.record_logprobs("edges/logprobs", result.logprobs)
    await context.backend.optim_step(ADAM)
    context.record_logprobs("edges/after", await context.backend.forward(samples))


async def record_accumulation(context: CaseContext) -> None:
    """Record the result of a step after two backward passes, whose gradients must add up."""
    samples = make_tree_samples()
    await context.backend.forward_backward(samples[:5], LOSS)
    await context.backend.forward_backward(samples[5:], LOSS)
    await context.backend.optim_step(ADAM)
    context.record_logprobs("accumulated", await context.backend.forward(samples))


async def record_five_steps(context: CaseContext) -> None:
    losses: list[float] = []
    for number, lr in enumerate(LEARNING_RATES):
        result = await context.backend.forward_backward(make_tree_samples(number), LOSS)
        losses.append(result.loss)
        await context.backend.optim_step(ADAM.model_copy(update={"lr": lr}))
    context.record(f"{FIVE_STEPS}/losses", losses)
    await context.record_forward(f"{FIVE_STEPS}/forward")
    await context.publish(FIVE_STEPS)


async def record_pipelined_steps(context: CaseContext) -> None:
    """Issue all calls before awaiting the first one, and record the resulting logprobs."""
    tasks: list[asyncio.Future[Any]] = []
    for number, lr in enumerate(LEARNING_RATES):
        for call in (
            context.backend.forward_backward(make_tree_samples(number), LOSS),
            context.backend.optim_step(ADAM.model_copy(update={"lr": lr})),
        ):
            tasks.append(asyncio.ensure_future(call))
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    await context.record_forward("pipelined")


async def record_resume(context: CaseContext) -> None:
    """Record a step after saving a state, after loading it, and after loading only its weights."""
    await context.train_step(0)
    await context.train_step(1)
    await context.backend.save_state(context.folder / "two-steps")
    await context.record_forward("resume/saved")
    await context.train_step(2)
    await context.record_forward("resume/uninterrupted")
    await context.backend.load_state(context.folder / "two-steps")
    await context.train_step(2)
    await context.record_forward("resume/resumed")
    await context.backend.load_state(context.folder / "two-steps", optimizer=False)
    await context.record_forward("resume/weights")
    await context.train_step(2)
    await context.record_forward("resume/fresh_optimizer")


async def record_sampling(context: CaseContext) -> None:
    await context.train_step(0)
    await context.train_step(1, ADAM.model_copy(update={"lr": 0.05}))
    await _sample_and_score(context, "sampled", version=1)


async def record_sampling_after_gc(context: CaseContext) -> None:
    """Record samples after garbage collection, which must not free objects that are still needed."""
    gc.collect()
    await context.train_step(0)
    gc.collect()
    await _sample_and_score(context, "sampled_after_gc", version=2)


async def _sample_and_score(context: CaseContext, name: str, version: int) -> None:
    artifact = await context.publish(name)
    engine = context.create_engine()
    try:
        await engine.load(Policy("check", version, artifact))
        tokens, logprobs, versions = list[int](), list[float](), list[int]()
        async with aclosing(engine.generate(PROMPT, SAMPLING_PARAMS)) as chunks:
            async for chunk in chunks:
                tokens += chunk.token_ids
                logprobs += chunk.logprobs
                versions += chunk.versions
    finally:
        await engine.close()
    sample = make_sample(name, [*PROMPT, *tokens], len(PROMPT))
    (scored,) = await context.backend.forward([sample])
    context.record(f"{name}/logprobs", logprobs)
    context.record(f"{name}/scored", scored[len(PROMPT) :])
    context.record(f"{name}/versions", versions)


async def record_rejections(context: CaseContext) -> None:
    """Record whether the backend rejects NaN values, a trained first token and a non-finite loss."""
    values_with_nan = np.array([0, 0, -1, np.nan], np.float32)
    tiny_logprobs = np.full(4, -1000, np.float32)
    invalid = [
        (make_sample("no logprob", [4, 5, 6, 7], 2, logprobs=values_with_nan), BackendError),
        (make_sample("no advantage", [4, 5, 6, 7], 2, advantages=values_with_nan), BackendError),
        (make_sample("first token", [4, 5], 0), BackendError),
        (make_sample("not finite", [4, 5, 6, 7], 2, logprobs=tiny_logprobs), NonFiniteError),
    ]
    for sample, expected_error in invalid:
        is_rejected = False
        try:
            await context.backend.forward_backward([sample], LOSS)
        except expected_error:
            is_rejected = True
        context.record(f"rejected/{sample.sample_key}", is_rejected)


def select_cases(backend: Backend) -> dict[str, ConformanceCase]:
    """Return the cases that the backend supports, in the order in which they run."""
    capabilities = backend.capabilities
    cases: dict[str, ConformanceCase] = {"forward": lambda context: context.record_forward("forward")}
    if capabilities.has_reference:
        cases["reference"] = record_reference
    cases |= {name: make_loss_case(name) for name in LOSSES if name in capabilities.losses}
    if "ppo" in capabilities.losses:
        cases["clipped"] = record_clipped_loss
    cases |= {
        "edges": record_edge_cases,
        "accumulated": record_accumulation,
        FIVE_STEPS: record_five_steps,
        "pipelined": record_pipelined_steps,
        "resume": record_resume,
        "sampled": record_sampling,
        "sampled_after_gc": record_sampling_after_gc,
        "rejected": record_rejections,
    }
    return cases
