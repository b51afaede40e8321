"""Tests that every learning agent has a policy of its own, also if the trainer crashes at any point."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from instar.backends.local.state import hash_adapter
from instar.config import RunConfig
from instar.config.run import make_folder_name
from instar.errors import InstarError, NonFiniteError
from instar.store.sqlite import SqliteStore
from instar.trainer.checkpoint import checkpoint_path, policy_path
from instar.trainer.live import LiveTrainer
from instar.trainer.monitor import read_steps, read_warnings
from instar.types import ClaimOutcome, StepState
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN, put_test_run
from tests.unit.data.test_live import add_live
from tests.unit.trainer.harness import (
    FaultInjector,
    SimulatedCrash,
    TrainerHarness,
    make_config,
    open_live_trainer,
)

A, B = "a", "Team B/1"
POLICIES = {A: f"{RUN}/{A}", B: f"{RUN}/{B}"}
CRASH_POINTS = [
    "claimed",
    "submitted",
    "forward_backward",
    "optim_step",
    "state written",
    "saved",
    "reserved",
    "artifact written",
    "published",
    "committed",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


def make_live_config(folder: Path, model: Path, agents: Sequence[str] = (A, B), **trainer: Any) -> RunConfig:
    settings = make_config(folder, model, **trainer).model_dump(exclude_unset=True)
    modes = {agent: {"mode": "learn"} for agent in agents}
    return RunConfig.model_validate({**settings, "data": "live", "agents": {**modes, "watched": {}}})


async def add_sessions(config: RunConfig, agent: str, *names: str) -> None:
    store = SqliteStore(config.store_path)
    if await store.run(RUN) is None:
        await put_test_run(store)
    for index, name in enumerate(names):
        # With rewards of opposite signs, training on the session of the other agent would be seen.
        reward = 1.0 if agent == A else -1.0
        await add_live(store, name, reward, ended=float(index), agent_id=agent)
    await store.close()


async def train(config: RunConfig, *, steps: int) -> None:
    """Train until every policy has ``steps`` steps, in a new trainer, as a resumed run does."""
    trainer = config.trainer.model_copy(update={"steps": steps})
    async with open_live_trainer(config.model_copy(update={"trainer": trainer})) as harness:
        await harness.trainer.run()


async def list_steps(harness: TrainerHarness[LiveTrainer]) -> dict[str, list[tuple[str | None, int | None]]]:
    """Return for each agent the session and the version of every step."""
    steps: dict[str, list[tuple[str | None, int | None]]] = {}
    for agent, policy in POLICIES.items():
        claims = await harness.store.claims(RUN, policy_id=policy)
        sessions = {claim.step: claim.session_id for claim in claims}
        assert len(sessions) == len(claims), "every step trains on one session"
        rows = await harness.store.steps(policy)
        assert {row.state for row in rows} <= {StepState.COMMITTED}
        steps[agent] = [(sessions.get(row.step), row.version) for row in rows]
    return steps


def hash_version(config: RunConfig, agent: str, version: int) -> str:
    return hash_adapter(policy_path(config.get_policy_dir(POLICIES[agent]), version))


async def train_alone(config: RunConfig, folder: Path, agent: str, *sessions: str) -> list[str]:
    """Return the hashes of the versions of a run in which only this agent learns."""
    alone = config.select_agent(agent).model_copy(update={"dir": folder})
    await add_sessions(alone, agent, *sessions)
    await train(alone, steps=len(sessions))
    return [hash_version(alone, agent, version) for version in range(1, len(sessions) + 1)]


async def test_sessions_of_an_agent_are_trained_only_into_its_own_policy(model: Path, tmp_path: Path) -> None:
    config = make_live_config(tmp_path / "run", model, steps=2, keep_checkpoints=5)
    await add_sessions(config, A, "a1", "a2")
    await add_sessions(config, B, "b1", "b2")
    await add_sessions(config, "watched", "w1")
    async with open_live_trainer(config) as harness:
        await harness.trainer.run()
        assert await list_steps(harness) == {A: [("a1", 1), ("a2", 2)], B: [("b1", 1), ("b2", 2)]}
        claims = await harness.store.claims(RUN)
        assert {claim.outcome for claim in claims} == {ClaimOutcome.TRAINED}
        assert len(claims) == 4
        assert (await harness.engine.status()).version == 0
        assert await harness.store.policy_versions(RUN) == []
    together = {agent: [hash_version(config, agent, v) for v in (1, 2)] for agent in POLICIES}
    assert together[A] == await train_alone(config, tmp_path / "a", A, "a1", "a2")
    assert together[B] == await train_alone(config, tmp_path / "b", B, "b1", "b2")
    assert len({*together[A], *together[B]}) == 4


async def test_agent_without_data_does_not_hold_up_the_others(model: Path, tmp_path: Path) -> None:
    config = make_live_config(tmp_path, model, steps=2)
    await add_sessions(config, A, "a1")
    await add_sessions(config, B, "b1", "b2")
    async with open_live_trainer(config) as harness:
        async with asyncio.TaskGroup() as group:
            group.create_task(harness.trainer.run())
            while "finished" not in harness.trainer.activity:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert harness.trainer.activity == f"{A}: waiting for data for step 2; {B}: finished"
            harness.trainer.stop()
        assert await list_steps(harness) == {A: [("a1", 1)], B: [("b1", 1), ("b2", 2)]}


async def test_unsaved_steps_are_saved_before_another_policy_is_loaded(model: Path, tmp_path: Path) -> None:
    config = make_live_config(tmp_path / "run", model, checkpoint_every=10, keep_checkpoints=5)
    await add_sessions(config, A, "a1", "a2")
    await add_sessions(config, B, "b1", "b2")
    await train(config, steps=2)
    for agent, sessions in ((A, ("a1", "a2")), (B, ("b1", "b2"))):
        alone = await train_alone(config, tmp_path / sessions[0], agent, *sessions)
        assert [hash_version(config, agent, version) for version in (1, 2)] == alone
        saved = sorted(
            path.name for path in (config.get_policy_dir(POLICIES[agent]) / "checkpoints").iterdir()
        )
        assert saved == ["step-000001", "step-000002"]


async def test_consecutive_steps_of_one_policy_are_saved_only_at_the_interval(
    model: Path, tmp_path: Path
) -> None:
    config = make_live_config(tmp_path, model, steps=3, checkpoint_every=3)
    await add_sessions(config, A, "a1", "a2", "a3")
    async with open_live_trainer(config.select_agent(A)) as harness:
        await harness.trainer.run()
        assert harness.faults.reached.count("state written") == 2, "the initial and the last state"


@pytest.mark.parametrize(
    ("point", "occurrence"),
    [
        *((point, occurrence) for point in CRASH_POINTS for occurrence in (1, 2, 3)),
        ("tombstoned", 1),
        ("released", 1),
    ],
)
async def test_crash_trains_every_session_once_into_its_own_policy(
    model: Path, tmp_path: Path, point: str, occurrence: int
) -> None:
    """The third occurrence is in the second step of the first policy, after the other one was trained."""
    config = make_live_config(tmp_path, model, steps=2, keep_checkpoints=5)
    await add_sessions(config, A, "a1", "a2")
    await add_sessions(config, B, "b1", "b2")
    if point in ("tombstoned", "released"):  # crashes while recovering from a crash
        async with open_live_trainer(config, FaultInjector("reserved", 2)) as harness:
            with pytest.raises(SimulatedCrash):
                await harness.trainer.run()
    async with open_live_trainer(config, FaultInjector(point, occurrence)) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()
    async with open_live_trainer(config) as harness:
        await harness.trainer.run()
        steps = await list_steps(harness)
        assert [session for session, _ in steps[A]] == ["a1", "a2"]
        assert [session for session, _ in steps[B]] == ["b1", "b2"]
        newest = {agent: versions[-1][1] for agent, versions in steps.items()}
    assert (hash_version(config, A, newest[A] or 0), hash_version(config, B, newest[B] or 0)) == (
        UNINTERRUPTED[A],
        UNINTERRUPTED[B],
    )
    records = [(record["agent"], record["step"]) for record in read_steps(config.run_dir)]
    assert sorted(records) == [(B, 1), (B, 2), (A, 1), (A, 2)]


@pytest.fixture(scope="module", autouse=True)
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fill UNINTERRUPTED with the hashes of the second versions of a run without a crash."""
    config = make_live_config(tmp_path_factory.mktemp("uninterrupted"), model)

    async def run() -> None:
        await add_sessions(config, A, "a1", "a2")
        await add_sessions(config, B, "b1", "b2")
        await train(config, steps=2)

    asyncio.run(run())
    UNINTERRUPTED.update({agent: hash_version(config, agent, 2) for agent in POLICIES})


UNINTERRUPTED: dict[str, str] = {}


async def test_failure_of_one_policy_names_its_agent_and_the_others_continue(
    model: Path, tmp_path: Path
) -> None:
    config = make_live_config(tmp_path, model, steps=2)
    await add_sessions(config, A, "a1", "a2")
    await add_sessions(config, B, "b1", "b2")
    faults = FaultInjector("forward_backward", 2, error=NonFiniteError)
    async with open_live_trainer(config, faults) as harness:
        with pytest.raises(InstarError, match="training the policy of the agent 'Team B/1' failed"):
            await harness.trainer.run()
        assert [row.state for row in await harness.store.steps(POLICIES[A])] == [StepState.COMMITTED] * 2
        assert read_warnings(tmp_path) == ["Team B/1: forward_backward"]
        assert harness.trainer.activity == "a: finished; Team B/1: failed: forward_backward"
    async with open_live_trainer(config) as harness:
        await harness.trainer.run()
        steps = await list_steps(harness)
        assert [session for session, _ in steps[B]] == ["b1", "b2"]


async def test_policy_whose_checkpoint_is_damaged_while_another_is_trained_repeats_its_step(
    model: Path, tmp_path: Path
) -> None:
    config = make_live_config(tmp_path, model, steps=3)
    await add_sessions(config, A, "a1", "a2")
    await add_sessions(config, B, "b1", "b2")
    await train(config, steps=2)
    async with open_live_trainer(config) as harness, asyncio.TaskGroup() as group:
        group.create_task(harness.trainer.run())
        while harness.trainer.activity.count("waiting for data") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        damaged = checkpoint_path(config.get_policy_dir(POLICIES[A]), 2) / "backend" / "state.safetensors"
        damaged.write_bytes(b"damaged")
        await add_sessions(config, A, "a3")
        while f"{A}: finished" not in harness.trainer.activity:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        harness.trainer.stop()
    async with open_live_trainer(config) as harness:
        steps = await list_steps(harness)
        assert sorted(str(session) for session, _ in steps[A]) == ["a1", "a2", "a3"]
        assert [version for _, version in steps[A]] == [1, 3, 4], "version 2 contains the lost weights"
        assert steps[B] == [("b1", 1), ("b2", 2)]


async def test_rejection_of_a_version_changes_only_the_policy_of_its_agent(
    model: Path, tmp_path: Path
) -> None:
    config = make_live_config(tmp_path, model)
    await add_sessions(config, A, "a1", "a2")
    await add_sessions(config, B, "b1", "b2", "b3")
    await train(config, steps=1)
    async with open_live_trainer(config) as harness:
        assert await harness.store.reject_version(POLICIES[A], 1, "worse") == [1]
        await harness.store.promote_version(POLICIES[B], 1)
    await train(config, steps=3)  # one step of the first policy restores the initial weights
    async with open_live_trainer(config) as harness:
        parents = {
            agent: {r.policy.version: r.parent for r in await harness.store.policy_versions(policy)}
            for agent, policy in POLICIES.items()
        }
        assert parents == {A: {1: 0, 2: 0}, B: {1: 0, 2: 1, 3: 2}}
        assert (await harness.store.latest_policy(POLICIES[A])).version == 0
        assert (await harness.store.latest_policy(POLICIES[B])).version == 1


def test_folder_names_of_agents_are_safe_and_unique() -> None:
    names = ["a", "A", "a/b", "a-b", "..", ".", "", "x" * 300, "ä", "a b", "a\\b", "con"]
    folders = [make_folder_name(name) for name in names]
    assert len({folder.lower() for folder in folders}) == len(names)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]*", folder) for folder in folders)
    assert all(len(folder) <= 64 for folder in folders)
    assert make_folder_name("support-2") == "support-2"
