"""What a backend is put through. Each scene begins at the same saved state and records arrays by name."""

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
"""Learning rates of the five steps."""
LOSSES: tuple[LossName, ...] = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
PROMPT = [int(t) for t in np.random.default_rng(11).integers(3, 300, 40)]
REPLY_TOKENS = 24
"""Tokens that are sampled."""

EngineFactory = Callable[[], Awaitable[Engine]]


@dataclass
class CaseContext:
    """A backend under test, where it may write, and what it has shown so far."""

    backend: Backend
    create_engine: EngineFactory
    """Makes an engine that loads what the backend publishes."""
    folder: Path
    context: int
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    artifacts: dict[str, Artifact] = field(default_factory=dict[str, Artifact])

    def record(self, name: str, values: Any) -> None:
        self.arrays[name] = np.asarray(values)

    def record_logprobs(self, name: str, values: Sequence[Floats]) -> None:
        self.arrays[name] = np.concatenate(values)

    async def restore_initial_state(self) -> None:
        """Where every scene starts, so that none depends on another."""
        await self.backend.load_state(self.folder / "begin")

    async def train_step(self, number: int, adam: AdamConfig = ADAM) -> None:
        await self.backend.forward_backward(tree_samples(number), LossConfig())
        await self.backend.optim_step(adam)

    async def publish(self, name: str) -> Artifact:
        self.artifacts[name] = await self.backend.publish(self.folder / "policies" / name)
        return self.artifacts[name]


async def first_forward(stage: CaseContext) -> None:
    stage.record_logprobs("forward", await stage.backend.forward(tree_samples()))


async def reference(stage: CaseContext) -> None:
    """The base model's logprobs, after the adapter has moved away from it."""
    await stage.train_step(0)
    stage.record_logprobs("reference", await stage.backend.reference_logprobs(tree_samples()))


def one_loss(name: LossName) -> Callable[[CaseContext], Awaitable[None]]:
    async def scene(stage: CaseContext) -> None:
        await stage.train_step(5)
        done = await stage.backend.forward_backward(tree_samples(), LossConfig(name=name))
        stage.record(f"{name}/loss", done.loss)
        stage.record(f"{name}/tokens", done.metrics["tokens"])
        stage.record_logprobs(f"{name}/logprobs", done.logprobs)
        moved = await stage.backend.optim_step(ADAM)
        stage.record(f"{name}/grad_norm", moved.grad_norm)
        stage.record_logprobs(f"{name}/after", await stage.backend.forward(tree_samples()))

    return scene


async def clipped_loss(stage: CaseContext) -> None:
    """Bounds that are not the default, on ratios that reach them."""
    loss = LossConfig(name="ppo", clip_low=0.5, clip_high=1.05)
    stage.record("clipped/loss", (await stage.backend.forward_backward(tree_samples(), loss)).loss)
    await stage.backend.optim_step(ADAM)


async def edges(stage: CaseContext) -> None:
    samples = edge_samples(stage.context)
    done = await stage.backend.forward_backward(samples, LossConfig())
    stage.record("edges/loss", done.loss)
    stage.record_logprobs("edges/logprobs", done.logprobs)
    await stage.backend.optim_step(ADAM)
    stage.record_logprobs("edges/after", await stage.backend.forward(samples))


async def accumulation(stage: CaseContext) -> None:
    """Two calls before a step are as one."""
    samples = tree_samples()
    await stage.backend.forward_backward(samples[:5], LossConfig())
    await stage.backend.forward_backward(samples[5:], LossConfig())
    await stage.backend.optim_step(ADAM)
    stage.record_logprobs("accumulated", await stage.backend.forward(samples))


async def five_steps(stage: CaseContext) -> None:
    losses: list[float] = []
    for number, lr in enumerate(RATES):
        done = await stage.backend.forward_backward(tree_samples(number), LossConfig())
        losses.append(done.loss)
        await stage.backend.optim_step(ADAM.model_copy(update={"lr": lr}))
    stage.record("five/losses", losses)
    stage.record_logprobs("five/forward", await stage.backend.forward(tree_samples()))
    await stage.publish("five")


async def pipelined(stage: CaseContext) -> None:
    """Every call issued before the first is awaited."""
    issued: list[asyncio.Future[Any]] = []
    for number, lr in enumerate(RATES):
        issued.append(
            asyncio.ensure_future(stage.backend.forward_backward(tree_samples(number), LossConfig()))
        )
        await asyncio.sleep(0)
        issued.append(asyncio.ensure_future(stage.backend.optim_step(ADAM.model_copy(update={"lr": lr}))))
        await asyncio.sleep(0)
    await asyncio.gather(*issued)
    stage.record_logprobs("pipelined", await stage.backend.forward(tree_samples()))


async def resume(stage: CaseContext) -> None:
    """What comes after a saved state comes again after it was loaded."""
    await stage.train_step(0)
    await stage.train_step(1)
    await stage.backend.save_state(stage.folder / "middle")
    stage.record_logprobs("resume/saved", await stage.backend.forward(tree_samples()))
    await stage.train_step(2)
    stage.record_logprobs("resume/straight", await stage.backend.forward(tree_samples()))
    await stage.backend.load_state(stage.folder / "middle")
    await stage.train_step(2)
    stage.record_logprobs("resume/resumed", await stage.backend.forward(tree_samples()))
    await stage.backend.load_state(stage.folder / "middle", optimizer=False)
    stage.record_logprobs("resume/weights", await stage.backend.forward(tree_samples()))
    await stage.train_step(2)
    stage.record_logprobs("resume/fresh_optimizer", await stage.backend.forward(tree_samples()))


async def sampling(stage: CaseContext) -> None:
    """What is published samples with the trained policy's logprobs."""
    await stage.train_step(0)
    await stage.train_step(1, ADAM.model_copy(update={"lr": 0.05}))
    await _sample_and_score(stage, "sampled", version=1)


async def collected(stage: CaseContext) -> None:
    """With nothing held but the backend, it still trains and samples."""
    gc.collect()
    await stage.train_step(0)
    gc.collect()
    await _sample_and_score(stage, "collected", version=2)


async def _sample_and_score(stage: CaseContext, name: str, version: int) -> None:
    artifact = await stage.publish(name)
    engine = await stage.create_engine()
    try:
        await engine.load(Policy("check", version, artifact))
        tokens, logprobs, versions = await _generate(engine)
    finally:
        await engine.close()
    whole = make_sample(name, [*PROMPT, *tokens], len(PROMPT))
    (scored,) = await stage.backend.forward([whole])
    stage.record(f"{name}/logprobs", logprobs)
    stage.record(f"{name}/scored", scored[len(PROMPT) :])
    stage.record(f"{name}/versions", versions)


async def _generate(engine: Engine) -> tuple[list[int], list[float], list[int]]:
    params = SamplingParams(max_tokens=REPLY_TOKENS, seed=5)
    tokens, logprobs, versions = list[int](), list[float](), list[int]()
    async with aclosing(engine.generate(PROMPT, params)) as chunks:
        async for chunk in chunks:
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
            versions += chunk.versions
    return tokens, logprobs, versions


async def refusals(stage: CaseContext) -> None:
    """Missing numbers are refused before anything is sent, and a loss that is not finite is named."""
    backend = stage.backend
    holey = np.array([0, 0, -1, np.nan], np.float32)
    bad = [
        make_sample("no logprob", [4, 5, 6, 7], 2, logprobs=holey),
        make_sample("no advantage", [4, 5, 6, 7], 2, advantages=holey),
        make_sample("first token", [4, 5], 0),
    ]
    for sample in bad:
        stage.record(f"refused/{sample.sample_key}", await _refuses(backend, sample, BackendError))
    far = make_sample("far", [4, 5, 6, 7], 2, logprobs=np.full(4, -1000, np.float32))
    stage.record("refused/not finite", await _refuses(backend, far, NonFiniteError))


async def _refuses(backend: Backend, sample: Sample, error: type[Exception]) -> bool:
    try:
        await backend.forward_backward([sample], LossConfig())
    except error:
        return True
    return False


def select_cases(backend: Backend) -> dict[str, Callable[[CaseContext], Awaitable[None]]]:
    """Those that the backend's capabilities ask for, in order."""
    able = backend.capabilities
    chosen: dict[str, Callable[[CaseContext], Awaitable[None]]] = {"forward": first_forward}
    if able.reference:
        chosen["reference"] = reference
    chosen |= {name: one_loss(name) for name in LOSSES if name in able.losses}
    if "ppo" in able.losses:
        chosen["clipped"] = clipped_loss
    chosen |= {
        "edges": edges,
        "accumulated": accumulation,
        "five": five_steps,
        "pipelined": pipelined,
        "resume": resume,
        "sampled": sampling,
        "collected": collected,
        "refused": refusals,
    }
    return chosen
