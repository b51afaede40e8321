"""Tests that versions whose samplers expire are exported again, with the same weights, also after crashes."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from instar.backends.local.state import hash_adapter
from instar.config import RunConfig
from instar.store.base import PolicyVersion, Store
from instar.store.sqlite import SqliteStore
from instar.trainer.checkpoint import checkpoint_path, policy_path
from instar.trainer.live import LiveTrainer
from instar.trainer.monitor import read_warnings
from instar.types import Policy, PolicyStage
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN
from tests.unit.trainer.harness import FaultInjector, SimulatedCrash, TrainerHarness, open_live_trainer
from tests.unit.trainer.test_lineages import POLICIES, A, B, add_sessions, make_live_config, train

LIFETIME_SECONDS = 1.5
DEADLINE_SECONDS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


@pytest.fixture
async def config(model: Path, tmp_path: Path) -> RunConfig:
    """A run of two policies with two versions each, of which the first one of A is served."""
    config = make_live_config(tmp_path / "run", model, steps=9, keep_checkpoints=5)
    await add_sessions(config, A, "a1", "a2")
    await add_sessions(config, B, "b1", "b2")
    async with open_live_trainer(with_steps(config, 2)) as harness:
        harness.backend.artifact_lifetime_seconds = LIFETIME_SECONDS
        await harness.trainer.run()
        await harness.store.promote_version(POLICIES[A], 1)
    return config


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})


@asynccontextmanager
async def running_trainer(
    config: RunConfig, faults: FaultInjector | None = None
) -> AsyncGenerator[TrainerHarness[LiveTrainer]]:
    """Run the trainer until the block exits."""
    async with open_live_trainer(config, faults) as harness:
        harness.backend.artifact_lifetime_seconds = LIFETIME_SECONDS
        task = asyncio.create_task(harness.trainer.run())
        yield harness
        harness.trainer.stop()
        await task


async def get_version(store: Store, version: int, agent: str = A) -> PolicyVersion:
    return {row.policy.version: row for row in await store.policy_versions(POLICIES[agent])}[version]


def hash_artifact(row: PolicyVersion) -> str:
    return hash_adapter(Path(row.policy.artifact.path))


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await condition():  # noqa: ASYNC110 - the store is asked
            await asyncio.sleep(0.02)


async def wait_for_renewal(store: Store, row: PolicyVersion, agent: str = A) -> PolicyVersion:
    async def is_renewed() -> bool:
        renewed = await get_version(store, row.policy.version, agent)
        assert renewed.policy.artifact.expires_at is not None
        assert row.policy.artifact.expires_at is not None
        return renewed.policy.artifact.expires_at > row.policy.artifact.expires_at

    await wait_until(is_renewed)
    return await get_version(store, row.policy.version, agent)


async def test_serving_version_and_newest_candidates_are_exported_again_with_the_same_weights(
    config: RunConfig,
) -> None:
    store = SqliteStore(config.store_path)
    rows = [(agent, await get_version(store, version, agent)) for agent, version in ((A, 1), (A, 2), (B, 2))]
    hashes = [hash_artifact(row) for _, row in rows]
    ignored = await get_version(store, 1, B)
    async with running_trainer(config):
        renewed = [await wait_for_renewal(store, row, agent) for agent, row in rows]
    assert [hash_artifact(row) for row in renewed] == hashes
    for (_, before), after in zip(rows, renewed, strict=True):
        assert (after.stage, after.updated_at) == (before.stage, before.updated_at)
    assert await get_version(store, 1, B) == ignored, "a candidate that a newer one replaced is not renewed"
    await store.close()


async def test_training_after_a_renewal_continues_from_the_last_checkpoint_of_each_policy(
    config: RunConfig, tmp_path: Path
) -> None:
    shutil.copytree(config.run_dir, tmp_path / "copy")
    undisturbed = config.model_copy(update={"dir": tmp_path / "copy"})
    for run in (config, undisturbed):
        await add_sessions(run, A, "a3")
    store = SqliteStore(config.store_path)
    serving = await get_version(store, 1)
    async with running_trainer(with_steps(config, 4)):
        await wait_for_renewal(store, serving)
        await wait_until(lambda: has_version(store, A, 3))
        await wait_for_renewal(store, await get_version(store, 3))
        await add_sessions(config, B, "b3")
        await wait_until(lambda: has_version(store, B, 3))
    await add_sessions(undisturbed, B, "b3")
    await train(undisturbed, steps=3)
    other = SqliteStore(undisturbed.store_path)
    for agent in (A, B):
        newest, expected = [await get_version(s, 3, agent) for s in (store, other)]
        moved = config.run_dir / Path(newest.policy.artifact.path).relative_to(config.run_dir)
        assert hash_adapter(moved) == hash_artifact(expected)
    await store.close()
    await other.close()


async def has_version(store: Store, agent: str, version: int) -> bool:
    return version in [policy.version for policy, _ in await store.published_policies(POLICIES[agent])]


@pytest.mark.parametrize(
    ("point", "occurrence"), [("artifact written", 1), ("published", 1), ("published", 2)]
)
async def test_crash_during_a_renewal_leaves_every_version_with_its_own_weights(
    config: RunConfig, point: str, occurrence: int
) -> None:
    store = SqliteStore(config.store_path)
    before = {agent: await store.policy_versions(POLICIES[agent]) for agent in (A, B)}
    hashes = {agent: [hash_artifact(row) for row in rows] for agent, rows in before.items()}
    async with open_live_trainer(config, FaultInjector(point, occurrence)) as harness:
        harness.backend.artifact_lifetime_seconds = LIFETIME_SECONDS
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()
    async with running_trainer(config):
        for agent, version in ((A, 1), (A, 2), (B, 2)):
            await wait_for_renewal(store, await get_version(store, version, agent), agent)
    for agent, rows in before.items():
        after = await store.policy_versions(POLICIES[agent])
        assert [hash_artifact(row) for row in after] == hashes[agent]
        assert [(row.policy.version, row.stage) for row in after] == [
            (row.policy.version, row.stage) for row in rows
        ]
        assert [step.step for step in await store.steps(POLICIES[agent])] == [1, 2]
    await store.close()


async def test_version_served_by_a_rollback_is_exported_again_from_the_step_of_its_weights(
    config: RunConfig,
) -> None:
    store = SqliteStore(config.store_path)
    await store.promote_version(POLICIES[A], 2)
    first = hash_artifact(await get_version(store, 1))
    await asyncio.sleep(LIFETIME_SECONDS)  # no trainer runs, so all samplers expire
    number = await store.roll_back(POLICIES[A], RUN, 1)
    expired = await get_version(store, number)
    async with running_trainer(config):
        renewed = await wait_for_renewal(store, expired)
    assert (renewed.stage, renewed.policy.artifact.kind) == (PolicyStage.SERVING, "adapter")
    assert hash_artifact(renewed) == first
    await store.close()


async def test_initial_version_is_exported_again_while_it_serves(config: RunConfig) -> None:
    store = SqliteStore(config.store_path)
    first = await get_version(store, 1, B)
    initial = msgspec.structs.replace(first.policy.artifact, expires_at=time.time())
    await store.put_initial_policy(Policy(POLICIES[B], 0, initial), RUN)
    async with running_trainer(config):
        renewed = await wait_for_renewal(store, await get_version(store, 0, B), B)
    assert renewed.policy.artifact.path == str(policy_path(config.get_policy_dir(POLICIES[B]), 0))
    assert hash_artifact(renewed) != hash_artifact(first)
    await store.close()


async def test_version_whose_checkpoint_has_other_weights_is_not_exported(config: RunConfig) -> None:
    store = SqliteStore(config.store_path)
    await store.promote_version(POLICIES[A], 2)
    number = await store.roll_back(POLICIES[A], RUN, 1)
    retired, serving = [await get_version(store, version) for version in (2, number)]
    damaged = checkpoint_path(config.get_policy_dir(POLICIES[A]), 2) / "backend" / "state.safetensors"
    damaged.write_bytes(b"damaged")
    async with running_trainer(config):  # repeats step 2, which loads the serving version
        await wait_for_renewal(store, serving)
        await wait_for_renewal(store, await get_version(store, 2, B), B)
    assert await get_version(store, 2) == retired
    (warning,) = [text for text in read_warnings(config.run_dir) if "exported" in text]
    assert warning.startswith("a: version 2 cannot be exported again: the checkpoint of step 2 does not have")
    await store.close()
