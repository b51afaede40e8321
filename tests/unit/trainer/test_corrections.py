"""Tests that each corrected reply is trained in exactly one step, even if the trainer crashes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.backends.base import BackendCapabilities
from instar.backends.factory import apply_capabilities
from instar.config import RunConfig
from instar.data.corrections import load_corrections
from instar.errors import ConfigError
from instar.store.base import Store
from instar.store.sqlite import SqliteStore
from instar.trainer.monitor import read_steps
from instar.types import UNTRAINABLE, Channel, Feedback, Message, Sample, Tag
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN, add_group, make_call, make_session, put_test_run
from tests.unit.live.prompts import list_prompts
from tests.unit.trainer.harness import FaultInjector, SimulatedCrash, fill_store, make_config, open_trainer

CORRECTED_IDS = [11, 12, 13, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


async def add_corrected_session(
    store: Store,
    session_id: str,
    corrected_ids: list[int] = CORRECTED_IDS,
    messages: Sequence[Message] = (Message(role="user", content="hi"),),
    **fields: Any,
) -> None:
    """Add a session with one call and a correction of its reply."""
    call_id = f"{session_id}#0"
    await store.open_session(make_session(session_id, **{"channel": Channel.TRAIN, **fields}))
    await store.add_calls(
        [make_call(call_id, [1, 2, 3], [7, 9], session_id=session_id, messages=tuple(messages))]
    )
    ids = np.asarray(corrected_ids, np.int32)
    feedback = Feedback(session_id, session_id, call_id, correction="corrected", correction_ids=ids)
    await store.add_feedback(feedback)


async def add_corrections(config: RunConfig, count: int) -> None:
    store = SqliteStore(config.store_path)
    for number in range(count):
        await add_corrected_session(store, f"c{number}")
    await store.close()


async def load_correction_claims(store: Store) -> list[tuple[int | None, str]]:
    claims = await store.claims(RUN)
    return sorted((c.step, c.sample_key) for c in claims if c.sample_key.startswith("feedback:"))


# --- loading ------------------------------------------------------------------------------------


@pytest.fixture
async def store(tmp_path: Path) -> Any:
    store = SqliteStore(tmp_path / "store.db")
    await put_test_run(store)
    yield store
    await store.close()


async def load_samples(store: Store, config: RunConfig) -> list[Sample]:
    return (await load_corrections(store, config, 1, 0)).corrections


async def test_correction_sample_is_prompt_and_corrected_reply(
    store: SqliteStore, tmp_path: Path, model: Path
) -> None:
    await add_corrected_session(store, "a")
    (sample,) = await load_samples(store, make_config(tmp_path, model, corrections={"weight": 0.5}))
    assert sample.token_ids.tolist() == [1, 2, 3, *CORRECTED_IDS]
    assert sample.mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert sample.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 0.5]
    assert (sample.sample_key, sample.session_id) == ("feedback:a", "a")


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [("batch_sessions", 1 / 2), ("batch_tokens", 1 / 8), ("session_tokens", 1 / 8), ("none", 1.0)],
)
async def test_correction_weights_follow_advantage_normalization(
    store: SqliteStore, tmp_path: Path, model: Path, normalization: str, expected: float
) -> None:
    for session_id in ("a", "b"):
        await add_corrected_session(store, session_id)
    samples = await load_samples(store, make_config(tmp_path, model, advantage={"normalize": normalization}))
    assert [sample.advantages[-1] for sample in samples] == pytest.approx([expected, expected])


async def test_load_corrections_takes_oldest_trainable_up_to_per_step(
    store: SqliteStore, tmp_path: Path, model: Path
) -> None:
    await add_corrected_session(store, "val", channel=Channel.VAL)
    await add_corrected_session(store, "tagged")
    await store.add_tags([Tag("tagged", UNTRAINABLE)])
    for session_id, channel in (("first", Channel.TRAIN), ("second", Channel.DATA), ("third", Channel.TRAIN)):
        await add_corrected_session(store, session_id, channel=channel)
    await store.add_feedback(Feedback("untokenized", "first", "first#0", correction="not tokenized"))
    samples = await load_samples(store, make_config(tmp_path, model, corrections={"per_step": 2}))
    assert [sample.session_id for sample in samples] == ["first", "second"], "the two oldest"
    disabled = make_config(tmp_path, model, corrections={"weight": 0})
    assert await load_samples(store, disabled) == []


@pytest.mark.parametrize(("mode", "expected"), [("observe", []), ("learn", ["live"])])
async def test_live_correction_is_used_only_if_its_agent_is_learned_from(
    store: SqliteStore, tmp_path: Path, model: Path, mode: str, expected: list[str]
) -> None:
    await add_corrected_session(store, "live", channel=Channel.LIVE)
    await add_corrected_session(store, "unlisted", channel=Channel.LIVE, agent_id="unlisted")
    agents = {"default": {"mode": mode}, "unlisted": {"mode": "observe"}}
    agents |= {} if mode == "learn" else {"other": {"mode": "learn"}}
    settings = make_config(tmp_path, model).model_dump(exclude_unset=True)
    config = RunConfig.model_validate({**settings, "agents": agents, "data": "live"})
    assert [sample.session_id for sample in await load_samples(store, config)] == expected
    rollout_config = RunConfig.model_validate({**settings, "agents": agents})
    assert await load_samples(store, rollout_config) == [], "its versions would be served unevaluated"


async def test_correction_of_a_held_out_session_is_dropped(
    store: SqliteStore, tmp_path: Path, model: Path
) -> None:
    await add_corrected_session(store, "held", channel=Channel.LIVE, messages=next(list_prompts()))
    await add_corrected_session(store, "live", channel=Channel.LIVE)
    settings = make_config(tmp_path, model, corrections={"per_step": 2}).model_dump(exclude_unset=True)
    settings |= {"agents": {"default": {"mode": "learn"}}, "data": "live"}
    batch = await load_corrections(store, RunConfig.model_validate(settings), 1, 0)
    assert [sample.session_id for sample in batch.corrections] == ["live"]
    assert [(c.session_id, c.reason) for c in batch.claims] == [("live", None)]
    assert [(c.session_id, c.reason) for c in batch.drops] == [("held", "held_out")]
    config = RunConfig.model_validate({**settings, "live": {"gate": {"mode": "off"}}})
    assert len(await load_samples(store, config)) == 2


# --- training -----------------------------------------------------------------------------------


async def test_training_on_corrections_increases_their_logprob(tmp_path: Path, model: Path) -> None:
    config = make_config(tmp_path / "run", model, corrections={"per_step": 1})
    await fill_store(config)
    await add_corrections(config, 3)
    async with open_trainer(config) as harness:
        (sample, *_) = await load_samples(harness.store, config)

        async def compute_logprob() -> float:
            (logprobs,) = await harness.backend.forward([sample])
            return float(logprobs[sample.mask > 0].sum())

        before = await compute_logprob()
        await harness.trainer.run()
        assert await compute_logprob() > before + 0.1
        assert await load_correction_claims(harness.store) == [
            (1, "feedback:c0"),
            (2, "feedback:c1"),
            (3, "feedback:c2"),
        ]
        assert harness.faults.reached.count("forward_backward") == 6, (
            "each step has one for the samples and one for the corrections"
        )
        assert harness.faults.reached.count("optim_step") == 3
    steps = read_steps(config.run_dir)
    assert [step["corrections"] for step in steps] == [1, 1, 1]
    assert steps[0]["correction_loss"] == pytest.approx(-before / len(CORRECTED_IDS), rel=1e-4)
    assert steps[0]["correction_loss"] > steps[-1]["correction_loss"] > 0


async def test_step_without_advantages_still_trains_corrections(tmp_path: Path, model: Path) -> None:
    config = make_config(tmp_path / "run", model, steps=1)
    store = SqliteStore(config.store_path)
    await put_test_run(store)
    await add_group(store, 0, [1.0, 1.0])
    await store.close()
    await add_corrections(config, 2)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        assert harness.faults.reached.count("forward_backward") == 1
        assert await load_correction_claims(harness.store) == [(1, "feedback:c0"), (1, "feedback:c1")]
    (step,) = read_steps(config.run_dir)
    assert (step["samples"], step["corrections"], "loss" in step) == (0, 2, False)


@pytest.mark.parametrize(
    ("point", "occurrence"),
    [("claimed", 2), ("forward_backward", 4), ("optim_step", 2), ("state written", 2), ("published", 2)],
)
async def test_corrections_are_trained_once_after_crash(
    tmp_path: Path, model: Path, point: str, occurrence: int
) -> None:
    results: list[tuple[Any, str]] = []
    for faults in (FaultInjector(), FaultInjector(point, occurrence)):
        config = make_config(tmp_path / (faults.point or "uninterrupted"), model, corrections={"per_step": 1})
        await fill_store(config)
        await add_corrections(config, 3)
        if faults.point:
            async with open_trainer(config, faults) as harness:
                with pytest.raises(SimulatedCrash):
                    await harness.trainer.run()
        async with open_trainer(config) as harness:
            await harness.trainer.run()
            assert await load_correction_claims(harness.store) == [
                (n + 1, f"feedback:c{n}") for n in range(3)
            ]
            results.append((await harness.list_claims(), await harness.hash_latest_adapter()))
    assert results[0] == results[1], "the weights are the same as without a crash"


def test_backend_without_cross_entropy_rejects_corrections(tmp_path: Path, model: Path) -> None:
    config = make_config(tmp_path, model)
    capabilities = BackendCapabilities(
        losses=frozenset({config.trainer.loss.name}), artifacts=frozenset({"adapter"})
    )
    with pytest.raises(ConfigError, match=r"trainer\.corrections\.weight"):
        apply_capabilities(config, capabilities)
    apply_capabilities(make_config(tmp_path, model, corrections={"weight": 0}), capabilities)
