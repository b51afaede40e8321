"""A gate with a real store, the scripted engine, a real renderer and a rule.

The rule wants the word "please" in replies to live prompts. Versions reply as `BEHAVIORS` says.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from instar.cluster.roles.gate import create_gates
from instar.config import RunConfig
from instar.engines.scripted import ScriptedEngine
from instar.live.base import StageCheck, skip_stage
from instar.live.gate import Gate
from instar.record.base import Renderer
from instar.record.render import load_renderer
from instar.rewards.base import Transcript
from instar.rewards.factory import create_background_scorers
from instar.store.sqlite import SqliteStore
from instar.types import (
    Artifact,
    ArtifactKind,
    Channel,
    Claim,
    ClaimOutcome,
    Policy,
    Reward,
    RewardSource,
    SessionStatus,
    StepState,
)
from tests.unit.data.builders import RUN, insert_session, make_call, make_session, put_test_run
from tests.unit.data.test_live import POLICY
from tests.unit.live.prompts import MARKER, list_prompts

BEHAVIORS = {0: "plain", 1: "polite", 2: "plain", 3: "broken", 4: "rude", 5: "polite"}
"""How each version replies: `plain` ignores the rule, `polite` follows it, `broken` follows it but fails the
sanity set, and `rude` follows it never, not even by chance."""


def reply(prompt: str, seed: int | None, version: int) -> str:
    behavior = BEHAVIORS[version]
    if MARKER not in prompt:
        numbers = re.search(r"What is (\d+) \+ (\d+)", prompt)
        answer = str(int(numbers[1]) + int(numbers[2])) if numbers else "you do it like everybody else"
        return "" if behavior == "broken" else answer
    if behavior == "plain":
        return "please" if (seed or 0) % 2 else "ok"
    return "no" if behavior == "rude" else "please"


def score_politeness(task: dict[str, Any], transcript: Transcript) -> float:
    return float("please" in transcript.final_text)


def make_config(model: Path, **gate: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": RUN,
            "dir": model.parent / "run",
            "model": {"name": str(model), "max_context": 512},
            "engine": {"type": "scripted", "function": f"{__name__}:reply"},
            "agents": {"default": {"mode": "learn"}},
            "data": "live",
            "reward": {"type": "rule", "function": f"{__name__}:score_politeness"},
            "live": {"gate": {"concurrency": 16, **gate}},
        }
    )


async def add_sessions(
    store: SqliteStore, renderer: Renderer, start: int, stop: int, *, rewards: tuple[float, ...] = ()
) -> None:
    """Add live sessions with the held-out prompts ``start`` to ``stop``. The ``rewards``, if any, repeat."""
    for number, messages in enumerate(islice(list_prompts(), start, stop), start):
        name = f"s{number:03}"
        session = make_session(
            name, channel=Channel.LIVE, status=SessionStatus.COMPLETED, ended_at=1.0, created_at=1.0
        )
        await insert_session(store, session)
        prompt = renderer.render(messages)
        call = make_call(f"{name}#0", prompt, [7, 9], session_id=name, messages=tuple(messages))
        await store.add_calls([call])
        if rewards:
            value = rewards[number % len(rewards)]
            await store.add_rewards([Reward(name, value, RewardSource.HUMAN, "user")])


@dataclass
class GateHarness:
    config: RunConfig
    store: SqliteStore
    engine: ScriptedEngine
    renderer: Renderer

    def create_gate(self, check_stage: StageCheck = skip_stage) -> Gate:
        scorers = create_background_scorers(self.config).live_scorers
        gates = create_gates(
            self.config, self.store, self.engine, self.renderer, scorers, check_stage=check_stage
        )
        return gates[POLICY]

    async def add_sessions(self, start: int, stop: int, **options: Any) -> None:
        await add_sessions(self.store, self.renderer, start, stop, **options)

    async def add_candidate(
        self,
        version: int,
        *,
        parent: int | None = None,
        is_committed: bool = True,
        artifact: ArtifactKind = "adapter",
    ) -> None:
        parent = version - 1 if parent is None else parent
        await self.store.reserve_version(POLICY, RUN, version, parent=parent, is_candidate=True)
        claim = Claim(RUN, 0, f"t{version}/0", f"t{version}", None, ClaimOutcome.TRAINED)
        await self.store.claim_step(POLICY, version, [claim], run_id=RUN)
        await self.store.publish(Policy(POLICY, version, Artifact(artifact, f"/adapters/{version}")))
        if is_committed:
            await self.store.advance_step(POLICY, version, StepState.COMMITTED, version=version)

    async def run_gate(self, gate: Gate | None = None) -> Gate:
        """Let a gate work until there is nothing to do."""
        gate = gate or self.create_gate()
        while await gate.advance():
            pass
        return gate

    async def list_stages(self) -> dict[int, str]:
        return {row.policy.version: row.stage.value for row in await self.store.policy_versions(POLICY)}

    async def list_decisions(self) -> dict[int, str]:
        return {row.version: row.decision for row in await self.store.evaluations(POLICY)}


@asynccontextmanager
async def open_harness(model: Path, folder: Path, **gate: Any) -> AsyncGenerator[GateHarness]:
    config = make_config(model, **gate)
    store = SqliteStore(folder / "store.db")
    await put_test_run(store)
    engine = ScriptedEngine(config.model, config.engine)  # pyright: ignore[reportArgumentType]
    yield GateHarness(config, store, engine, load_renderer(model, config.model))
    await engine.close()
    await store.close()
