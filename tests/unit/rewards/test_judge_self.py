"""Tests for a judge that uses the run's own model, with a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from instar.config import GatewayConfig, ModelConfig, RunConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.errors import ScoreError
from instar.gateway.auth import create_key
from instar.record.render import load_renderer
from instar.rewards.base import JUDGE_AGENT, ScoringContext, Transcript
from instar.rewards.judge.judge import Judge
from instar.rewards.judge.judges import create_judge
from instar.store.base import JUDGED_TAG
from instar.types import UNTRAINABLE, Channel, Session, SessionStatus
from tests.tiny import make_tiny_tokenizer
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, run_gateway
from tests.unit.rewards.judges import TASK, make_answer_transcript

ANSWER = 'Well, {"reasons": "fine", "score": 0.5}'


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncGenerator[RunningGateway]:
    make_tiny_tokenizer().save_pretrained(tmp_path / "model")
    LlamaConfig().save_pretrained(tmp_path / "model")
    model = ModelConfig(name=str(tmp_path / "model"), max_context=8192)
    engine = ScriptedEngine(model, ScriptedEngineConfig(replies=[ANSWER]))
    renderer = load_renderer(tmp_path / "model", model)
    async with run_gateway(tmp_path / "store.db", engine, renderer, GatewayConfig()) as gateway:
        yield gateway


def create_run_model_judge() -> Judge:
    section = {"type": "judge", "endpoint": "self", "votes": 2, "max_prompt_chars": 2000}
    return create_judge(RunConfig.model_validate({"reward": section}).reward[0])  # pyright: ignore[reportArgumentType]


async def assert_judge_scores_with_key(gateway: RunningGateway, key: str) -> None:
    judge = create_run_model_judge()
    await judge.start(ScoringContext("run", gateway.store, gateway.url, key))
    try:
        (reward,) = await judge.score(TASK, make_answer_transcript("42"))
    finally:
        await judge.close()
    assert reward.value == 0.5
    assert reward.detail["votes"] == [0.5, 0.5]


async def test_run_model_questions_are_recorded_but_not_scored_or_trained(gateway: RunningGateway) -> None:
    await assert_judge_scores_with_key(gateway, ADMIN_KEY)
    rows = await gateway.store.sessions("run")
    assert len(rows) == 2
    for row in rows:
        session = row.session
        assert (session.channel, session.status) == (Channel.LIVE, SessionStatus.ABANDONED)
        assert session.reason == "a judge's question"
        tags = (await gateway.store.tags([session.session_id]))[session.session_id]
        assert [(tag.name, tag.value) for tag in tags] == [(JUDGED_TAG, "s"), (UNTRAINABLE, "")]
        calls = await gateway.store.calls(session.session_id)
        assert "6 times 7" in calls[0].messages[-1]["content"]
        judge = create_run_model_judge()
        await judge.start(ScoringContext("run", gateway.store, gateway.url, ADMIN_KEY))
        assert await judge.score(TASK, Transcript(session.session_id, calls, None)) == []
        await judge.close()
    assert await gateway.store.unscored_sessions("run", "judge:outcome@x", list(Channel)) == []


async def open_judged_session(gateway: RunningGateway) -> None:
    session = Session("s", "run", "main", "policy", Channel.LIVE, created_at=1.0)
    await gateway.store.open_session(session)


def is_stored(gateway: RunningGateway, text: str) -> bool:
    files = gateway.store_path.parent.glob(f"{gateway.store_path.name}*")
    return any(text.encode() in file.read_bytes() for file in files)


async def test_questions_about_a_forgotten_session_are_deleted(gateway: RunningGateway) -> None:
    await open_judged_session(gateway)
    await assert_judge_scores_with_key(gateway, ADMIN_KEY)
    assert len(await gateway.store.sessions("run")) == 3
    assert is_stored(gateway, "6 times 7")
    assert await gateway.store.forget_sessions("run", ["s"]) == ["s"]
    await gateway.store.erase_deleted(rewrite=True)
    assert await gateway.store.sessions("run") == []
    assert not is_stored(gateway, "6 times 7")


async def test_forgotten_session_is_not_judged(gateway: RunningGateway) -> None:
    """The judge may have read the session before its data was deleted."""
    await open_judged_session(gateway)
    await gateway.store.forget_sessions("run", ["s"])
    with pytest.raises(ScoreError, match="was deleted") as error:
        await assert_judge_scores_with_key(gateway, ADMIN_KEY)
    assert not error.value.retryable
    assert not is_stored(gateway, "6 times 7")


async def test_session_forgotten_during_a_question_fails_only_its_score(gateway: RunningGateway) -> None:
    """A StoreError would end the process that scores all sessions."""
    await open_judged_session(gateway)
    judge = create_run_model_judge()
    await judge.start(ScoringContext("run", gateway.store, gateway.url, ADMIN_KEY))
    scoring = asyncio.create_task(judge.score(TASK, make_answer_transcript("42")))
    async with asyncio.timeout(10):
        while len(await gateway.store.sessions("run")) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await gateway.store.forget_sessions("run", await gateway.store.session_ids("run"))
    with pytest.raises(ScoreError):
        await scoring
    await judge.close()
    assert await gateway.store.sessions("run") == []


async def test_agent_cannot_avoid_scoring_by_using_the_judge_model_name(gateway: RunningGateway) -> None:
    transcript = make_answer_transcript("42")
    calls = [replace(call, model=JUDGE_AGENT) for call in transcript.calls]
    transcript = replace(transcript, calls=calls)
    judge = create_run_model_judge()
    await judge.start(ScoringContext("run", gateway.store, gateway.url, ADMIN_KEY))
    (reward,) = await judge.score(TASK, transcript)
    assert reward.value == 0.5
    await judge.close()


async def test_run_model_is_queried_without_proxy(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy would receive the run's key.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    await assert_judge_scores_with_key(gateway, ADMIN_KEY)


async def test_run_model_accepts_an_agent_key(gateway: RunningGateway) -> None:
    await assert_judge_scores_with_key(gateway, await create_key(gateway.store, "agent", JUDGE_AGENT))
    assert {row.session.agent_id for row in await gateway.store.sessions("run")} == {JUDGE_AGENT}


async def test_run_model_with_wrong_key_fails_without_retry_or_leak(gateway: RunningGateway) -> None:
    with pytest.raises(ScoreError, match="401") as error:
        await assert_judge_scores_with_key(gateway, "sk-instar-unknown")
    assert not error.value.retryable
    assert "sk-instar-unknown" not in str(error.value)


async def test_run_model_judge_uses_the_new_address_of_a_moved_gateway(gateway: RunningGateway) -> None:
    judge = create_run_model_judge()
    context = ScoringContext("run", gateway.store, "http://127.0.0.1:9", ADMIN_KEY)
    await judge.start(context)
    async with asyncio.timeout(10):
        with pytest.raises(ScoreError, match="no usable response") as error:
            await judge.score(TASK, make_answer_transcript("42"))
    assert error.value.retryable
    context.base_url = gateway.url
    (reward,) = await judge.score(TASK, make_answer_transcript("42"))
    assert reward.value == 0.5
    await judge.close()
