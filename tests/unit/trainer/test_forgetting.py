"""Tests that a session is not trained on after its data was deleted, at whatever point this happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from instar.types import ClaimOutcome
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN
from tests.unit.trainer.harness import (
    FaultInjector,
    SimulatedCrash,
    TrainerHarness,
    fill_store,
    make_config,
    open_trainer,
)
from tests.unit.trainer.test_corrections import add_corrections


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


async def list_trained_claims(harness: TrainerHarness) -> list[str]:
    claims = await harness.store.claims(RUN)
    return [claim.session_id for claim in claims if claim.outcome is ClaimOutcome.TRAINED]


async def test_session_forgotten_before_the_claim_is_not_trained_on(tmp_path: Path, model: Path) -> None:
    """The samples are already in the trainer's memory when the data of two sessions is deleted."""
    config = make_config(tmp_path / "run", model, steps=1, corrections={"per_step": 2})
    await fill_store(config)
    await add_corrections(config, 2)
    async with open_trainer(config) as harness:
        trainer = harness.trainer
        await trainer.recover()
        batch = await trainer.batcher.next_batch(1, 0, 0)
        assert batch is not None
        first, *others = [sample.session_id for sample in batch.samples]
        await harness.store.forget_sessions(RUN, [first])
        await trainer.train_step(batch)
        expected = sorted([*others, "c0", "c1"])
        assert sorted(harness.backend.trained_sessions) == expected
        assert sorted(await list_trained_claims(harness)) == expected
        (claim,) = await harness.store.claims(RUN, session_id=first)
        assert (claim.outcome, claim.reason, claim.step) == (ClaimOutcome.DROPPED, "forgotten", 1)
        assert await harness.store.trained_sessions([first]) == []


async def test_session_forgotten_after_the_claim_is_trained_on_in_that_step(
    tmp_path: Path, model: Path
) -> None:
    config = make_config(tmp_path / "run", model, steps=2)
    await fill_store(config)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        claimed = await list_trained_claims(harness)
        await harness.store.forget_sessions(RUN, claimed)
        rows = await harness.store.trained_sessions(claimed)
        assert {row.session_id for row in rows} == set(claimed)
        assert [row.version for row in rows] == [row.step for row in rows]


async def test_session_forgotten_after_a_crash_is_not_trained_on_again(tmp_path: Path, model: Path) -> None:
    config = make_config(tmp_path / "run", model, steps=2)
    await fill_store(config)
    with pytest.raises(SimulatedCrash):
        async with open_trainer(config, FaultInjector("optim_step")) as harness:
            await harness.trainer.run()
    async with open_trainer(config) as harness:
        first, *_ = await list_trained_claims(harness)
        assert [row.step for row in await harness.store.trained_sessions([first])] == [1]
        await harness.store.forget_sessions(RUN, [first])
        await harness.trainer.run()
        assert len(harness.backend.trained_sessions) > 0
        assert first not in harness.backend.trained_sessions
        assert first not in await list_trained_claims(harness)
        assert await harness.store.trained_sessions([first]) == []
