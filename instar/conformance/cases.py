"""The conformance cases. Each case begins at the same saved state and records arrays by name."""

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
from instar.conformance.batches import edge_samples, make_sample, tree_samples
from instar.engines.base import Engine
from instar.errors import BackendError, NonFiniteError
from instar.types import Artifact, Floats, Policy, Sample, SamplingParams

ADAM = AdamConfig(lr=0.01, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5)
RATES = (0.01, 0.002, 0.03, 0.005, 0.02)
"""The learning rates of the five steps."""
LOSSES: tuple[LossName, ...] = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
PROMPT = [int(t) for t in np.random.default_rng(11).integers(3, 300, 40)]
REPLY_TOKENS = 24

EngineFactory = Callable[[], Engine]


@dataclass
class CaseContext:
    """The backend under test, a folder that it may write to, and the arrays that the cases recorded."""

    backend: Backend
    create_engine: EngineFactory
    """Creates an engine that loads what the backend publishes."""
    folder: Path
    context: int
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    artifacts: dict[str, Artifact] = field(default_factory=dict[str, Artifact])

    def record(self, name: str, values: Any) -> None:
        self.arrays[name] = np.asarray(values)

    def record_logprobs(self, name: str, values: Sequence[Floats]) -> None:
        self.arrays[name] = np.concatenate(values)

    async def restore_initial_state(self) -> None:
        """Load the state that every case begins with, so that no case depends on another."""
        await self.backend.load_state(self.folder / "begin")

    async def train_step(self, number: int, adam: AdamConfig = ADAM) -> None:
        await self.backend.forward_backward(tree_samples(number), LossConfig())
        await self.backend.optim_step(adam)

    async def publish(self, name: str) -> Artifact:
        self.artifacts[name] = await self.backend.publish(self.folder / "policies" / name)
        return self.artifacts[name]


async def first_forward(context: CaseContext) -> None:
    context.record_logprobs("forward", await context.backend.forward(tree_samples()))


async def reference(context: CaseContext) -> None:
    """Record the base model's logprobs after a step has changed the adapter."""
    await context.train_step(0)
    context.record_logprobs("reference", await context.backend.reference_logprobs(tree_samples()))


def one_loss(name: LossName) -> Callable[[CaseContext], Awaitable[None]]:
    async def case(context: CaseContext) -> None:
        await context.train_step(5)
        result = await context.backend.forward_backward(tree_samples(), LossConfig(name=name))
        context.record(f"{name}/loss", result.loss)
        context.record(f"{name}/tokens", result.metrics["tokens"])
        context.record_logprobs(f"{name}/logprobs", result.logprobs)
        step = await context.backend.optim_step(ADAM)
        context.record(f"{name}/grad_norm", step.grad_norm)
        context.record_logprobs(f"{name}/after", await context.backend.forward(tree_samples()))

    return case


async def clipped_loss(context: CaseContext) -> None:
    """Record a clipped loss with non-default bounds, on ratios that reach the bounds."""
    loss = LossConfig(name="ppo", clip_low=0.5, clip_high=1.05)
    context.record("clipped/loss", (await context.backend.forward_backward(tree_samples(), loss)).loss)
    await context.backend.optim_step(ADAM)


async def edges(context: CaseContext) -> None:
    samples = edge_samples(context.context)
    result = await context.backend.forward_backward(samples, LossConfig())
    context.record("edges/loss", result.loss)
    context.record_logprobs("edges/logprobs", result.logprobs)
    await context.backend.optim_step(ADAM)
    context.record_logprobs("edges/after", await context.backend.forward(samples))


async def accumulation(context: CaseContext) -> None:
    """Check that two backward passes before a step add up."""
    samples = tree_samples()
    await context.backend.forward_backward(samples[:5], LossConfig())
    await context.backend.forward_backward(samples[5:], LossConfig())
    await context.backend.optim_step(ADAM)
    context.record_logprobs("accumulated", await context.backend.forward(samples))


async def five_steps(context: CaseContext) -> None:
    losses: list[float] = []
    for number, lr in enumerate(RATES):
        result = await context.backend.forward_backward(tree_samples(number), LossConfig())
        losses.append(result.loss)
        await context.backend.optim_step(ADAM.model_copy(update={"lr": lr}))
    context.record("five/losses", losses)
    context.record_logprobs("five/forward", await context.backend.forward(tree_samples()))
    await context.publish("five")


async def pipelined(context: CaseContext) -> None:
    """Record the results of calls that are all issued before the first is awaited."""
    issued: list[asyncio.Future[Any]] = []
    for number, lr in enumerate(RATES):
        issued.append(
            asyncio.ensure_future(context.backend.forward_backward(tree_samples(number), LossConfig()))
        )
        await asyncio.sleep(0)
        issued.append(asyncio.ensure_future(context.backend.optim_step(ADAM.model_copy(update={"lr": lr}))))
        await asyncio.sleep(0)
    await asyncio.gather(*issued)
    context.record_logprobs("pipelined", await context.backend.forward(tree_samples()))


async def resume(context: CaseContext) -> None:
    """Check that a step has the same result after a state is saved and after it is loaded."""
    await context.train_step(0)
    await context.train_step(1)
    await context.backend.save_state(context.folder / "middle")
    context.record_logprobs("resume/saved", await context.backend.forward(tree_samples()))
    await context.train_step(2)
    context.record_logprobs("resume/straight", await context.backend.forward(tree_samples()))
    await context.backend.load_state(context.folder / "middle")
    await context.train_step(2)
    context.record_logprobs("resume/resumed", await context.backend.forward(tree_samples()))
    await context.backend.load_state(context.folder / "middle", optimizer=False)
    context.record_logprobs("resume/weights", await context.backend.forward(tree_samples()))
    await context.train_step(2)
    context.record_logprobs("resume/fresh_optimizer", await context.backend.forward(tree_samples()))


async def sampling(context: CaseContext) -> None:
    """Check that the published policy samples with the trained policy's logprobs."""
    await context.train_step(0)
    await context.train_step(1, ADAM.model_copy(update={"lr": 0.05}))
    await _sample_and_score(context, "sampled", version=1)


async def collected(context: CaseContext) -> None:
    """Check that garbage collection between the calls frees nothing that the backend needs."""
    gc.collect()
    await context.train_step(0)
    gc.collect()
    await _sample_and_score(context, "collected", version=2)


async def _sample_and_score(context: CaseContext, name: str, version: int) -> None:
    artifact = await context.publish(name)
    engine = context.create_engine()
    try:
        await engine.load(Policy("check", version, artifact))
        tokens, logprobs, versions = await _generate(engine)
    finally:
        await engine.close()
    sample = make_sample(name, [*PROMPT, *tokens], len(PROMPT))
    (scored,) = await context.backend.forward([sample])
    context.record(f"{name}/logprobs", logprobs)
    context.record(f"{name}/scored", scored[len(PROMPT) :])
    context.record(f"{name}/versions", versions)


async def _generate(engine: Engine) -> tuple[list[int], list[float], list[int]]:
    params = SamplingParams(max_tokens=REPLY_TOKENS, seed=5)
    tokens, logprobs, versions = list[int](), list[float](), list[int]()
    async with aclosing(engine.generate(PROMPT, params)) as chunks:
        async for chunk in chunks:
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
            versions += chunk.versions
    return tokens, logprobs, versions


async def refusals(context: CaseContext) -> None:
    """Check that samples with missing numbers are rejected before the call, and that a loss that is not
    finite is reported."""
    backend = context.backend
    with_nan = np.array([0, 0, -1, np.nan], np.float32)
    invalid = [
        make_sample("no logprob", [4, 5, 6, 7], 2, logprobs=with_nan),
        make_sample("no advantage", [4, 5, 6, 7], 2, advantages=with_nan),
        make_sample("first token", [4, 5], 0),
    ]
    for sample in invalid:
        context.record(f"refused/{sample.sample_key}", await _rejects(backend, sample, BackendError))
    far = make_sample("far", [4, 5, 6, 7], 2, logprobs=np.full(4, -1000, np.float32))
    context.record("refused/not finite", await _rejects(backend, far, NonFiniteError))


async def _rejects(backend: Backend, sample: Sample, error: type[Exception]) -> bool:
    try:
        await backend.forward_backward([sample], LossConfig())
    except error:
        return True
    return False


def select_cases(backend: Backend) -> dict[str, Callable[[CaseContext], Awaitable[None]]]:
    """Return the cases that fit the backend's capabilities, in order."""
    capabilities = backend.capabilities
    cases: dict[str, Callable[[CaseContext], Awaitable[None]]] = {"forward": first_forward}
    if capabilities.reference:
        cases["reference"] = reference
    cases |= {name: one_loss(name) for name in LOSSES if name in capabilities.losses}
    if "ppo" in capabilities.losses:
        cases["clipped"] = clipped_loss
    cases |= {
        "edges": edges,
        "accumulated": accumulation,
        "five": five_steps,
        "pipelined": pipelined,
        "resume": resume,
        "sampled": sampling,
        "collected": collected,
        "refused": refusals,
    }
    return cases
