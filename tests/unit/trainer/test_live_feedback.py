"""Tests that corrections and preferences of live replies are trained on, alone and exactly once."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.backends.base import BackendCapabilities
from instar.backends.factory import apply_capabilities
from instar.config import RunConfig
from instar.data.batcher import Batcher
from instar.data.corrections import load_preferences
from instar.errors import ConfigError
from instar.live.base import is_held_out
from instar.store.base import Store
from instar.store.sqlite import SqliteStore
from instar.trainer.monitor import read_steps
from instar.types import UNTRAINABLE, Channel, Feedback, Message, Sample, SessionStatus, Tag
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN, insert_session, make_call, make_session, put_test_run
from tests.unit.data.test_live import POLICY
from tests.unit.trainer.harness import FaultInjector, SimulatedCrash, open_live_trainer
from tests.unit.trainer.test_candidates import make_live_config

OTHER_IDS = [11, 12, 13, 9]
HELD_OUT = next(
    (message,)
    for message in (Message(role="user", content=f"question {number}") for number in count())
    if is_held_out([message])
)
"""The messages of a session that is held out."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


async def open_store(config: RunConfig) -> SqliteStore:
    store = SqliteStore(config.store_path)
    if await store.run(RUN) is None:
        await put_test_run(store)
    return store


async def add_reply(store: Store, session_id: str, *, agent_id: str = "default", **call: Any) -> str:
    """Add a completed live session with one call, and return the call's id."""
    session = make_session(
        session_id, channel=Channel.LIVE, agent_id=agent_id, status=SessionStatus.COMPLETED, ended_at=1.0
    )
    await insert_session(store, session)
    await store.add_calls([make_call(f"{session_id}#0", [1, 2, 3], [7, 9], session_id=session_id, **call)])
    return f"{session_id}#0"


async def add_feedback(store: Store, session_id: str, **fields: Any) -> None:
    arrays = {
        name: np.asarray(value, np.int32) if name.endswith("_ids") else value
        for name, value in fields.items()
    }
    await store.add_feedback(Feedback(session_id, session_id, f"{session_id}#0", **arrays))


async def list_claims(store: Store) -> list[tuple[int | None, str, str, str | None]]:
    return sorted((c.step or 0, c.sample_key, c.session_id, c.reason) for c in await store.claims(RUN))


# --- corrections --------------------------------------------------------------------------------


async def test_live_run_with_only_corrections_makes_a_candidate(tmp_path: Path, model: Path) -> None:
    config = make_live_config(tmp_path, model, steps=1, groups_per_step=2)
    store = await open_store(config)
    for name, agent in (("a", "default"), ("b", "default"), ("c", "other")):
        await add_reply(store, name, agent_id=agent)
        await add_feedback(store, name, correction="better", correction_ids=OTHER_IDS)
    await store.close()
    async with open_live_trainer(config) as harness:
        await harness.trainer.run()
        assert await list_claims(harness.store) == [
            (1, "feedback:a", "a", None),
            (1, "feedback:b", "b", None),
        ], "the other agent is not learned from"
        stages = [row.stage.value for row in await harness.store.policy_versions(POLICY)]
        assert stages == ["candidate"]
    (step,) = read_steps(config.run_dir)
    assert (step["samples"], step["corrections"]) == (0, 2)
    assert step["step_kl"] > 0, "it is measured on the replies that were corrected"
    assert step["kl_lr_scale"] < 1.0


async def test_step_is_full_with_the_maximum_of_corrections(tmp_path: Path, model: Path) -> None:
    config = make_live_config(tmp_path, model, groups_per_step=6, corrections={"per_step": 1})
    store = await open_store(config)
    assert await Batcher(store, RUN, config).next_batch(1, 0, 0, timeout=0.0) is None
    await add_reply(store, "a")
    await add_feedback(store, "a", correction="better", correction_ids=OTHER_IDS)
    batch = await Batcher(store, RUN, config).next_batch(1, 0, 0, timeout=0.0)
    assert batch is not None
    assert [sample.session_id for sample in batch.supervised.corrections] == ["a"]
    await store.close()


async def test_held_out_corrections_are_dropped_and_do_not_delay_others(tmp_path: Path, model: Path) -> None:
    config = make_live_config(tmp_path, model, corrections={"per_step": 1})
    store = await open_store(config)
    await add_reply(store, "held", messages=HELD_OUT)
    await add_reply(store, "other")
    for name in ("held", "other"):
        await add_feedback(store, name, correction="better", correction_ids=OTHER_IDS)
    batcher = Batcher(store, RUN, config)
    assert await batcher.next_batch(1, 0, 0, timeout=0.0) is None
    assert await list_claims(store) == [(0, "feedback:held", "held", "held_out")]
    batch = await batcher.next_batch(1, 0, 0, timeout=0.0)
    assert batch is not None
    assert [sample.session_id for sample in batch.supervised.corrections] == ["other"]
    await store.close()


# --- preferences --------------------------------------------------------------------------------


async def measure_margin(harness: Any, pairs: list[tuple[Sample, Sample]]) -> float:
    margins: list[float] = []
    for pair in pairs:
        chosen, rejected = (
            float(values[sample.mask > 0].sum())
            for sample, values in zip(pair, await harness.backend.forward(list(pair)), strict=True)
        )
        margins.append(chosen - rejected)
    return sum(margins) / len(margins)


@pytest.mark.parametrize("preferred", ["this", "other"])
async def test_preference_raises_the_margin_of_the_preferred_reply(
    tmp_path: Path, model: Path, preferred: str
) -> None:
    config = make_live_config(tmp_path, model, steps=3, preferences={"per_step": 1}, max_kl=None)
    store = await open_store(config)
    for name in ("a", "b", "c"):
        await add_reply(store, name)
        await add_feedback(store, name, preferred=preferred, other_text="x", other_ids=OTHER_IDS)
    loaded = (await load_preferences(store, config, 1, 0)).pairs
    await store.close()
    pairs = [pair.samples for pair in loaded]
    assert len(pairs) == 1
    expected = [1, 2, 3, 7, 9] if preferred == "this" else [1, 2, 3, *OTHER_IDS]
    assert pairs[0][0].token_ids.tolist() == expected
    async with open_live_trainer(config) as harness:
        before = await measure_margin(harness, pairs)
        await harness.trainer.run()
        assert await measure_margin(harness, pairs) > before + 0.5
        assert await list_claims(harness.store) == [
            (step, f"feedback:{name}", name, None) for step, name in enumerate("abc", 1)
        ]
    steps = read_steps(config.run_dir)
    assert steps[0]["preference_margin"] == 0.0, "the policy is the base model"
    assert steps[0]["preference_loss"] == pytest.approx(np.log(2))
    assert steps[-1]["preference_margin"] > 0
    assert steps[-1]["preference_accuracy"] == 1.0


async def test_preference_between_two_sessions_claims_a_sample_of_each(tmp_path: Path, model: Path) -> None:
    config = make_live_config(tmp_path, model, steps=1)
    store = await open_store(config)
    await add_reply(store, "a")
    other_call = await add_reply(store, "b")
    await add_feedback(store, "a", preferred="this", other_call_id=other_call, other_ids=OTHER_IDS)
    batch = await Batcher(store, RUN, config).next_batch(1, 0, 0, timeout=0.0)
    assert batch is not None
    assert [claim.session_id for claim in batch.supervised.claims] == ["a", "b"]
    assert batch.without({"b"}).supervised.pairs == []
    await store.add_tags([Tag("b", UNTRAINABLE)])
    assert (await load_preferences(store, config, 1, 0)).pairs == []
    await store.remove_tags(["b"], UNTRAINABLE)
    await store.forget_sessions(RUN, ["b"])
    assert await store.feedback(RUN) == [], "the feedback contained the tokens of both replies"
    await store.close()


async def test_held_out_preference_is_dropped(tmp_path: Path, model: Path) -> None:
    config = make_live_config(tmp_path, model)
    store = await open_store(config)
    await add_reply(store, "held", messages=HELD_OUT)
    await add_feedback(store, "held", preferred="this", other_text="x", other_ids=OTHER_IDS)
    batch = await load_preferences(store, config, 1, 0)
    assert (batch.pairs, [claim.reason for claim in batch.drops]) == ([], ["held_out"])
    await store.close()


async def test_preference_over_the_reply_of_a_held_out_session_is_dropped(
    tmp_path: Path, model: Path
) -> None:
    config = make_live_config(tmp_path, model)
    store = await open_store(config)
    await add_reply(store, "a")
    other_call = await add_reply(store, "held", messages=HELD_OUT)
    await add_feedback(store, "a", preferred="this", other_call_id=other_call, other_ids=OTHER_IDS)
    batch = await load_preferences(store, config, 1, 0)
    assert (batch.pairs, [claim.reason for claim in batch.drops]) == ([], ["held_out"])
    await store.close()


@pytest.mark.parametrize("point", ["claimed", "forward_backward", "published"])
async def test_preferences_are_trained_once_after_crash(tmp_path: Path, model: Path, point: str) -> None:
    config = make_live_config(tmp_path, model, steps=1)
    store = await open_store(config)
    await add_reply(store, "a")
    await add_feedback(store, "a", preferred="other", other_text="x", other_ids=OTHER_IDS)
    await store.close()
    async with open_live_trainer(config, FaultInjector(point)) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()
    async with open_live_trainer(config) as harness:
        await harness.trainer.run()
        assert await list_claims(harness.store) == [(1, "feedback:a", "a", None)]


def test_backend_without_reference_disables_preferences_or_rejects_their_weight(
    tmp_path: Path, model: Path
) -> None:
    capabilities = BackendCapabilities(
        losses=frozenset({"importance_sampling", "cross_entropy"}), artifacts=frozenset({"adapter"})
    )
    config, warnings = apply_capabilities(make_live_config(tmp_path, model), capabilities)
    assert config.trainer.preferences.weight == 0
    assert any("trainer.preferences.weight" in warning for warning in warnings)
    with pytest.raises(ConfigError, match=r"trainer\.preferences\.weight: must be 0, got 1"):
        apply_capabilities(make_live_config(tmp_path, model, preferences={"weight": 1}), capabilities)
