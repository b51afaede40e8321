"""The backend, engine, agent and scorer of a simulated run. Their results depend only on their input.

The weights are the list of trained samples, and a reply depends on the weights, the session's seed and the
prompt. Two runs therefore end with the same weights only if they trained on the same samples in the same
order.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from instar.backends.base import (
    Backend,
    BackendCapabilities,
    ForwardBackwardResult,
    OptimStepResult,
    make_torch_capabilities,
)
from instar.config import AdamConfig, LossConfig
from instar.engines.base import Engine, EngineStatus, Prompt
from instar.engines.server import LeaseFence
from instar.errors import EngineUnavailable
from instar.rewards.base import Scorer, Transcript
from instar.rollout.base import Agent, AgentResult, AgentSession
from instar.types import (
    Artifact,
    Floats,
    Policy,
    PolicyRef,
    Reward,
    RewardSource,
    Sample,
    SamplingParams,
    Task,
    TokenChunk,
)
from torture_parts.event_loop import current_process
from torture_parts.world import Process, World

Weights = list[list[str]]
"""The samples of each optimizer step, as returned by `describe_sample`."""

REPLY_TOKENS = 2
VOCAB_SIZE = 64
WEIGHTS_FILE = "weights.json"


def read_weights(folder: Path) -> Weights:
    return json.loads((folder / WEIGHTS_FILE).read_text())


def write_weights(folder: Path, weights: Weights) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / WEIGHTS_FILE).write_text(json.dumps(weights))


def describe_sample(sample: Sample) -> str:
    """Return the sample's key and a digest of its tokens and advantages."""
    digest = blake2b(sample.token_ids.tobytes(), digest_size=4)
    digest.update(np.round(sample.advantages, 4).tobytes())
    return f"{sample.sample_key} {digest.hexdigest()}"


class SimulatedBackend(Backend):
    def __init__(self, world: World) -> None:
        self._world = world
        self._gradient: list[str] = []
        self.weights: Weights = []

    @property
    def capabilities(self) -> BackendCapabilities:
        return make_torch_capabilities(None, has_reference=False, can_sync_live=False)

    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        return [sample.logprobs for sample in samples]

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        self._gradient += map(describe_sample, samples)
        await self._world.pass_gate("forward_backward")
        return ForwardBackwardResult(0.0, [sample.logprobs for sample in samples])

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        self.weights.append(self._gradient)
        self._gradient = []
        await self._world.pass_gate("optim_step")
        return OptimStepResult(1.0)

    async def publish(self, path: Path) -> Artifact:
        await self._world.pass_gate("publish files")
        write_weights(path, self.weights)
        await self._world.pass_gate("publish files done")
        return Artifact("weights", str(path))

    async def save_state(self, path: Path) -> None:
        await self._world.pass_gate("save_state")
        write_weights(path, self.weights)
        await self._world.pass_gate("save_state done")

    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        await self._world.pass_gate("load_state")
        self.weights = read_weights(path)
        self._gradient = []

    async def close(self) -> None:
        return


class SimulatedEngine:
    """The state of the engine's process."""

    def __init__(self) -> None:
        self.fence = LeaseFence()
        self.version = 0
        self._digest = ""

    def load(self, policy: Policy) -> None:
        if policy.artifact.kind == "base":
            self.version, self._digest = policy.version, ""
            return
        weights = read_weights(Path(policy.artifact.path))
        digest = blake2b(json.dumps(weights).encode(), digest_size=8).hexdigest()
        self.version, self._digest = policy.version, digest

    def sample(self, seed: int | None, prompt: Sequence[int]) -> tuple[list[int], int]:
        digest = blake2b(f"{self._digest}/{seed}/{prompt}".encode(), digest_size=REPLY_TOKENS).digest()
        return [byte % VOCAB_SIZE for byte in digest], self.version


class EngineClient(Engine):
    """Sends requests to the engine's process. Raises EngineUnavailable if it does not respond."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def load(self, policy: Policy) -> None:
        process = current_process.get()
        assert isinstance(process, Process), "only a process may load weights"

        async def handle(role: Any) -> None:
            role.engine.fence.check(process.lease)
            role.engine.load(policy)

        await self._request("load", handle)

    async def status(self) -> EngineStatus:
        async def handle(role: Any) -> EngineStatus:
            return EngineStatus(role.engine.version)

        return await self._request("status", handle)

    async def sample(self, seed: int | None, prompt: Sequence[int]) -> tuple[list[int], int]:
        async def handle(role: Any) -> tuple[list[int], int]:
            return role.engine.sample(seed, prompt)

        return await self._request("sample", handle)

    async def _request(self, label: str, handle: Any) -> Any:
        try:
            return await self._world.request("engine", label, handle)
        except ConnectionError as error:
            raise EngineUnavailable(str(error)) from error

    def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        raise NotImplementedError("the simulated engine only samples complete replies")

    async def close(self) -> None:
        return


class SimulatedScorer(Scorer):
    name = "rule"

    def __init__(self, background: bool) -> None:
        self.background = background

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        # The value depends on the reply, so that rewards differ within most groups.
        value = sum(map(int, transcript.final_text.split())) % 5 / 4
        return [Reward(transcript.session_id, value, RewardSource.RULE)]


class SimulatedAgent(Agent):
    """Takes a few turns, each with its own idempotency key. With ``can_fail``, some replies make it fail."""

    def __init__(self, gateway: Any, turns: int, *, can_fail: bool) -> None:
        self._gateway = gateway
        self._turns = turns
        self._can_fail = can_fail

    async def run(self, task: Task, session: AgentSession) -> AgentResult:
        messages: list[dict[str, str]] = [{"role": "user", "content": f"task {task.task_id}"}]
        for turn in range(self._turns):
            reply: str = await self._gateway.chat(session.session_id, messages, f"turn-{turn}")
            if self._can_fail and int(reply.split()[0]) % 4 == 0:
                raise ValueError("the agent gave up")
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "continue"}]
        return AgentResult(turns=self._turns)
