"""Tests that versions from live traffic are served only after their promotion, also after crashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instar.backends.local.state import hash_adapter
from instar.config import RunConfig
from instar.errors import StoreError
from instar.store.sqlite import SqliteStore
from instar.trainer.checkpoint import checkpoint_path, is_pruned
from instar.trainer.live import LiveTrainer
from instar.types import ClaimOutcome, PolicyStage, StepState
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

POLICY = f"{RUN}/default"

CRASH_POINTS = [
    "claimed",
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


def make_live_config(folder: Path, model: Path, **trainer: Any) -> RunConfig:
    settings = make_config(folder, model, **trainer).model_dump(exclude_unset=True)
    return RunConfig.model_validate({**settings, "data": "live", "agents": {"default": {"mode": "learn"}}})


async def add_sessions(config: RunConfig, *names: str, agent_id: str = "default") -> None:
    store = SqliteStore(config.store_path)
    if await store.run(RUN) is None:
        await put_test_run(store)
    for index, name in enumerate(names):
        await add_live(store, name, 1.0, ended=float(index), agent_id=agent_id)
    await store.close()


async def list_stages(harness: TrainerHarness[LiveTrainer]) -> dict[int, str]:
    return {row.policy.version: row.stage.value for row in await harness.store.policy_versions(POLICY)}


async def list_parents(harness: TrainerHarness[LiveTrainer]) -> dict[int, int | None]:
    return {row.policy.version: row.parent for row in await harness.store.policy_versions(POLICY)}


async def list_trained(harness: TrainerHarness[LiveTrainer]) -> list[tuple[int | None, str]]:
    """Return the step and the session of each claim, without replayed sessions."""
    claims = await harness.store.claims(RUN)
    return sorted((claim.step, claim.session_id) for claim in claims if claim.epoch == 0)


async def run_steps(config: RunConfig, steps: int) -> None:
    """Train until ``steps`` steps are done, in a new trainer, as a resumed run does."""
    trainer = config.trainer.model_copy(update={"steps": steps})
    async with open_live_trainer(config.model_copy(update={"trainer": trainer})) as harness:
        await harness.trainer.run()
        assert (await harness.engine.status()).version == 0, "the gateway loads versions, not the trainer"


async def test_versions_from_live_data_are_not_served_before_promotion(model: Path, tmp_path: Path) -> None:
    config = make_live_config(tmp_path, model, steps=2)
    await add_sessions(config, "a", "b")
    await add_sessions(config, "other", agent_id="observed")
    async with open_live_trainer(config) as harness:
        await harness.trainer.run()
        assert await list_stages(harness) == {1: "candidate", 2: "candidate"}
        assert await list_parents(harness) == {1: 0, 2: 1}
        assert (await harness.store.latest_policy(POLICY)).version == 0
        assert (await harness.engine.status()).version == 0
        claims = await harness.store.claims(RUN)
        assert [(claim.session_id, claim.step, claim.outcome) for claim in claims] == [
            ("a", 1, ClaimOutcome.TRAINED),
            ("b", 2, ClaimOutcome.TRAINED),
        ]
        await harness.store.promote_version(POLICY, 2)
        assert (await harness.store.latest_policy(POLICY)).version == 2
        assert await list_stages(harness) == {1: "retired", 2: "serving"}


async def test_training_continues_from_the_candidate_until_it_is_rejected(
    model: Path, tmp_path: Path
) -> None:
    config = make_live_config(tmp_path, model)
    await add_sessions(config, "a", "b", "c")
    await run_steps(config, 1)
    async with open_live_trainer(config) as harness:
        await harness.store.promote_version(POLICY, 1)
    await run_steps(config, 2)
    async with open_live_trainer(config) as harness:
        assert await list_parents(harness) == {1: 0, 2: 1}
        assert await harness.store.reject_version(POLICY, 2, "worse") == [2]
    await run_steps(config, 4)  # one step restores version 1, and one trains on the last session
    async with open_live_trainer(config) as harness:
        assert await list_parents(harness) == {1: 0, 2: 1, 3: 1}
        assert await list_stages(harness) == {1: "serving", 2: "rejected", 3: "candidate"}
        steps = await harness.store.steps(POLICY)
        assert [(step.step, step.version) for step in steps] == [(1, 1), (2, 2), (3, 1), (4, 3)]
        claims = await harness.store.claims(RUN)
        assert [(claim.session_id, claim.step) for claim in claims] == [("a", 1), ("b", 2), ("c", 4)]
    first, restored = (checkpoint_path(config.get_policy_dir(POLICY), step) / "backend" for step in (1, 3))
    assert (first / "state.safetensors").read_bytes() == (restored / "state.safetensors").read_bytes()


async def test_rejection_without_a_promotion_restores_the_initial_weights(
    model: Path, tmp_path: Path
) -> None:
    config = make_live_config(tmp_path, model)
    await add_sessions(config, "a", "b")
    await run_steps(config, 1)
    async with open_live_trainer(config) as harness:
        await harness.store.reject_version(POLICY, 1, "worse")
    await run_steps(config, 3)
    async with open_live_trainer(config) as harness:
        assert await list_parents(harness) == {1: 0, 2: 0}
        assert await list_stages(harness) == {1: "rejected", 2: "candidate"}
    initial = checkpoint_path(tmp_path, 0) / "backend"
    restored = checkpoint_path(config.get_policy_dir(POLICY), 2) / "backend"
    assert (initial / "state.safetensors").read_bytes() == (restored / "state.safetensors").read_bytes()


async def test_rollback_serves_earlier_weights_under_a_new_number(model: Path, tmp_path: Path) -> None:
    config = make_live_config(tmp_path, model)
    await add_sessions(config, "a", "b", "c", "d")
    for step in (1, 2):
        await run_steps(config, step)
        async with open_live_trainer(config) as harness:
            await harness.store.promote_version(POLICY, step)
    await run_steps(config, 3)
    async with open_live_trainer(config) as harness:
        before = {
            row.policy.version: row.policy.artifact for row in await harness.store.policy_versions(POLICY)
        }
        assert await harness.store.roll_back(POLICY, RUN, 1) == 4
        head = await harness.store.latest_policy(POLICY)
        assert (head.version, head.artifact) == (4, before[1])
        assert await list_stages(harness) == {1: "retired", 2: "retired", 3: "rejected", 4: "serving"}
        with pytest.raises(StoreError, match=r"version 3 cannot be rolled back to.*before are 0, 1, 2"):
            await harness.store.roll_back(POLICY, RUN, 3)
    await run_steps(config, 5)
    async with open_live_trainer(config) as harness:
        assert await list_parents(harness) == {1: 0, 2: 1, 3: 2, 4: 1, 5: 4}


async def test_version_is_rejected_if_its_parent_is_while_it_is_trained(model: Path, tmp_path: Path) -> None:
    config = make_live_config(tmp_path, model)
    await add_sessions(config, "a")
    await run_steps(config, 1)
    async with open_live_trainer(config) as harness:
        await harness.store.reject_version(POLICY, 1, "worse")
        version = await harness.store.reserve_version(POLICY, RUN, 2, parent=1, is_candidate=True)
        assert (await list_stages(harness))[version] == PolicyStage.REJECTED


async def test_promotion_of_a_version_without_a_committed_step_is_refused(
    model: Path, tmp_path: Path
) -> None:
    config = make_live_config(tmp_path, model, steps=3, checkpoint_every=2)
    await add_sessions(config, "a", "b")
    faults = FaultInjector("claimed", 2)
    async with open_live_trainer(config, faults) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()
        with pytest.raises(StoreError, match="version 1 cannot be promoted before step 1 is committed"):
            await harness.store.promote_version(POLICY, 1)
        with pytest.raises(StoreError, match=r"version 7 does not exist.*Candidates: 1"):
            await harness.store.promote_version(POLICY, 7)


@pytest.mark.parametrize("point", CRASH_POINTS)
async def test_crash_keeps_the_promoted_version_and_trains_every_session_once(
    model: Path, tmp_path: Path, point: str
) -> None:
    config = make_live_config(tmp_path, model, steps=3)
    await add_sessions(config, "a", "b", "c")
    await run_steps(config, 1)
    async with open_live_trainer(config) as harness:
        await harness.store.promote_version(POLICY, 1)
    faults = FaultInjector(point, 1)
    async with open_live_trainer(config, faults) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()
        head = await harness.store.latest_policy(POLICY)
        assert head.version == 1
        assert not is_pruned(head.artifact)
    await run_steps(config, 3)
    async with open_live_trainer(config) as harness:
        assert (await harness.store.latest_policy(POLICY)).version == 1
        claims = await harness.store.claims(RUN)
        trained = sorted((claim.step or 0, claim.session_id, claim.epoch) for claim in claims)
        assert trained == [(1, "a", 0), (2, "b", 0), (3, "a", 1), (3, "c", 0)], "step 3 replays a"
        assert {step.state for step in await harness.store.steps(POLICY)} == {StepState.COMMITTED}


async def test_files_of_the_serving_version_are_kept_while_candidates_are_pruned(
    model: Path, tmp_path: Path
) -> None:
    config = make_live_config(tmp_path, model, keep_checkpoints=1)
    await add_sessions(config, "a", "b", "c", "d")
    await run_steps(config, 1)
    async with open_live_trainer(config) as harness:
        await harness.store.promote_version(POLICY, 1)
    await run_steps(config, 4)
    assert sorted(path.name for path in (config.get_policy_dir(POLICY) / "policies").iterdir()) == [
        "v000001",
        "v000003",
        "v000004",
    ]
    kept = sorted(path.name for path in (config.get_policy_dir(POLICY) / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000004"]
    assert checkpoint_path(tmp_path, 0).is_dir()


async def test_training_continues_from_a_promoted_version_without_a_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    config = make_live_config(tmp_path, model, checkpoint_every=2)
    await add_sessions(config, "a", "b", "c")
    await run_steps(config, 2)  # only the second step has a checkpoint
    async with open_live_trainer(config) as harness:
        await harness.store.promote_version(POLICY, 1)
        await harness.store.reject_version(POLICY, 2, "worse")
        promoted = await harness.hash_latest_adapter(POLICY)
    await run_steps(config, 4)  # step 3 restores version 1, and step 4 trains on the last session
    async with open_live_trainer(config) as harness:
        assert await list_parents(harness) == {1: 0, 2: 1, 3: 1}
        steps = await harness.store.steps(POLICY)
        assert [(step.step, step.version) for step in steps] == [(1, 1), (2, 2), (3, 1), (4, 3)]
        await harness.backend.load_state(checkpoint_path(config.get_policy_dir(POLICY), 3) / "backend")
        assert hash_adapter(Path((await harness.backend.publish(tmp_path / "copy")).path)) == promoted


async def test_recovery_continues_from_a_promoted_version_if_its_checkpoint_is_damaged(
    model: Path, tmp_path: Path
) -> None:
    config = make_live_config(tmp_path, model)
    await add_sessions(config, "a", "b", "c")
    await run_steps(config, 2)
    async with open_live_trainer(config) as harness:
        await harness.store.promote_version(POLICY, 2)
        promoted = await harness.hash_latest_adapter(POLICY)
    (checkpoint_path(config.get_policy_dir(POLICY), 2) / "backend" / "state.safetensors").write_bytes(
        b"damaged"
    )
    await run_steps(config, 3)
    async with open_live_trainer(config) as harness:
        assert (await harness.store.latest_policy(POLICY)).version == 2
        assert await list_parents(harness) == {1: 0, 2: 1, 3: 2}
        assert await list_trained(harness) == [(1, "a"), (2, "b"), (3, "c")]
        await harness.backend.load_state(checkpoint_path(config.get_policy_dir(POLICY), 2) / "backend")
        assert hash_adapter(Path((await harness.backend.publish(tmp_path / "copy")).path)) == promoted
