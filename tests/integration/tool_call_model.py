"""Tiny models for the exactness tests: one that samples tool calls, and adapters that change it.

A model with random weights never writes a valid tool call. After a few seconds of supervised training it
often does, and otherwise writes many kinds of malformed calls.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from instar.backends.local.backend import LocalBackend
from instar.config import AdamConfig, LocalBackendConfig, LoraConfig, LossConfig, ModelConfig
from instar.record.base import Renderer
from instar.record.render import load_renderer
from instar.types import NOT_SAMPLED, Artifact, Message, Policy, Sample, Tool
from tests.tiny import make_tiny_model, make_tiny_tokenizer

CONTEXT = 2048
TOOLS: list[Tool] = [
    Tool(
        name=name,
        description=description,
        parameters={"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
    )
    for name, description, argument in (
        ("calc", "Evaluate arithmetic.", "expression"),
        ("find", "Look a word up — even «naïve» ones.", "word"),
        ("noop", "", "x"),
    )
]
WORDS = ("plus", "the answer", "tool", "naïve", "日本", "🦋", "12 * 34", "<|im_end|>", "\n\n", "{}", " ", "é")


def make_model_config(folder: Path) -> ModelConfig:
    return ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=CONTEXT)


def make_random_text(rng: random.Random, max_words: int = 6) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(0, max_words)))


def make_random_messages(rng: random.Random) -> list[Message]:
    system = Message(role="system", content=make_random_text(rng))
    user = Message(role="user", content=make_random_text(rng))
    return [system, user] if rng.random() < 0.5 else [user]


def choose_random_tools(rng: random.Random) -> list[Tool]:
    return rng.sample(TOOLS, rng.choice([0, 1, 1, 2, 3]))


async def train_tool_call_model(folder: Path, *, steps: int = 60, batch_size: int = 12) -> Path:
    """Train a randomly initialized fp32 model to call its tools, and return its folder."""
    make_tiny_model(folder / "random", std=0.1, context=CONTEXT)
    model = make_model_config(folder / "random")
    renderer, rng = load_renderer(folder / "random", model), random.Random(0)
    backend = LocalBackend(model, LocalBackendConfig(lora=None, threads=1))
    for step in range(steps):
        samples = [_make_training_sample(renderer, rng, f"{step}/{number}") for number in range(batch_size)]
        await backend.forward_backward(samples, LossConfig(name="cross_entropy"))
        await backend.optim_step(AdamConfig(lr=4e-3))
    await backend.publish(folder / "trained")
    await backend.close()
    return folder / "trained"


def _make_training_sample(renderer: Renderer, rng: random.Random, key: str) -> Sample:
    """Return a random prompt with the reply to learn: a tool call if there are tools, else text."""
    tools = choose_random_tools(rng)
    prompt = renderer.render(make_random_messages(rng), tools)
    text = "The answer is 893."
    if tools:
        tool = rng.choice(tools)
        (argument,) = tool["parameters"]["properties"]
        call = {"name": tool["name"], "arguments": {argument: "12 * 34"}}
        text = f"<tool_call>{json.dumps(call)}</tool_call>"
    tokenizer: Any = make_tiny_tokenizer()
    reply: list[int] = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return make_sample(key, prompt, reply)


def make_sample(key: str, prompt: list[int], reply: list[int]) -> Sample:
    tokens = np.asarray([*prompt, *reply], np.int32)
    mask = np.zeros(len(tokens), np.float32)
    mask[len(prompt) :] = 1.0
    return Sample(
        sample_key=key,
        session_id=key,
        token_ids=tokens,
        mask=mask,
        logprobs=np.full(len(tokens), np.nan, np.float32),
        advantages=(mask / len(reply)).astype(np.float32),
        versions=np.full(len(tokens), NOT_SAMPLED, np.int32),
    )


@dataclass(frozen=True)
class PolicyLineage:
    """Policy versions 0 (the model itself) to n, with the path of each version's training state."""

    policies: list[Policy]
    state_paths: list[Path]
    backend: LocalBackend

    async def load_version(self, version: int) -> LocalBackend:
        """Load a version's weights into the backend, and return the backend."""
        await self.backend.load_state(self.state_paths[version], optimizer=False)
        return self.backend


async def train_lineage(model: Path, folder: Path, version_count: int) -> PolicyLineage:
    """Train a series of adapters, each of which starts from the previous one and differs strongly from it."""
    config = make_model_config(model)
    backend = LocalBackend(config, LocalBackendConfig(lora=LoraConfig(rank=4, alpha=16), threads=1))
    renderer, rng = load_renderer(model, config), random.Random(1)
    policies, state_paths = [Policy("exact", 0, Artifact("base"))], [folder / "state-0"]
    await backend.save_state(state_paths[0])
    for version in range(1, version_count + 1):
        for number in range(3):
            samples = [_make_training_sample(renderer, rng, f"{version}/{number}/{i}") for i in range(4)]
            await backend.forward_backward(samples, LossConfig(name="cross_entropy"))
            await backend.optim_step(AdamConfig(lr=5e-3))
        state_paths.append(folder / f"state-{version}")
        await backend.save_state(state_paths[-1])
        policies.append(Policy("exact", version, await backend.publish(folder / f"policy-{version}")))
    return PolicyLineage(policies, state_paths, backend)
