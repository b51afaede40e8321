"""Tests for the process, followup and pairwise rubrics."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instar.config import ScoringConfig
from instar.errors import ScoreError
from instar.rewards.base import NO_TASK, GroupScorer
from instar.rewards.judge.judge import Judge
from instar.rewards.judge.pairwise import PairComparison, choose_pairs, compute_expected_win_rates
from instar.rewards.judge.rubric import JudgePromptPart, truncate_parts
from instar.rewards.judge.session_steps import build_steps, render_conversation
from instar.rewards.open_sessions import OpenSessionQueue
from instar.rewards.runner import ScoringRunner
from instar.store.base import Run
from instar.types import CallStatus, Channel, Link, Message, Reward, SessionStatus, ToolCall
from tests.unit.data.builders import RUN, make_call, make_session
from tests.unit.rewards.judge_server import JudgeRequest, serve_judge
from tests.unit.rewards.judges import (
    TASK,
    assistant,
    make_answer_transcript,
    make_transcript,
    start_judge,
    tool,
    user,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def parse_requested_steps(request: JudgeRequest) -> list[int]:
    match = re.search(r"these steps, each of them once: ([\d, ]+)\.", request.system)
    assert match is not None
    return [int(number) for number in match[1].split(", ")]


SESSION = make_transcript(
    (user("Fix the build"), "I look at the log"),
    (tool("error: missing semicolon"), "I add it"),
    (tool("build ok"), "Done"),
    (user("Thanks, now the docs"), "Here they are"),
)

# --- process ------------------------------------------------------------------------------------


def score_by_step_number(request: JudgeRequest) -> Any:
    return {
        "steps": [{"step": n, "reasons": f"r{n}", "score": n / 10} for n in parse_requested_steps(request)]
    }


async def test_process_judge_rewards_every_call(path: Path) -> None:
    async with (
        serve_judge(score_by_step_number) as server,
        start_judge(path, server.url, rubric="process") as judge,
    ):
        rewards = await judge.score(TASK, SESSION)
    assert [(r.call_id, r.value) for r in rewards] == [("s-1", 0.1), ("s-2", 0.2), ("s-3", 0.3), ("s-4", 0.4)]
    assert rewards[1].detail == {"step": 2, "votes": [0.2], "spread": 0.0, "reasons": ["r2"]}
    (request,) = server.requests
    assert request.user.count("missing semicolon") == 1  # each message is shown once


async def test_process_judge_splits_long_sessions_into_windows(path: Path) -> None:
    long_session = make_transcript(*((user(f"turn {i} {'x' * 400}"), "ok") for i in range(10)))
    async with serve_judge(score_by_step_number) as server:
        async with start_judge(path, server.url, rubric="process", max_prompt_chars=2000) as judge:
            rewards = await judge.score(TASK, long_session)
    assert sorted(n for request in server.requests for n in parse_requested_steps(request)) == list(
        range(1, 11)
    )
    assert len(server.requests) == 4
    assert [r.call_id for r in rewards] == [f"s-{i}" for i in range(1, 11)]


async def test_process_judge_rejects_answers_with_missing_steps(path: Path) -> None:
    def answer(request: JudgeRequest) -> Any:
        return {"steps": [{"step": 1, "reasons": "", "score": 0.5}]}

    async with serve_judge(answer) as server, start_judge(path, server.url, rubric="process") as judge:
        with pytest.raises(ScoreError, match="step 2 is missing"):
            await judge.score(TASK, SESSION)


# --- followup -----------------------------------------------------------------------------------


def answer_with_signals(request: JudgeRequest) -> Any:
    marker = request.user.split()[0]
    answers: list[Any] = []
    for number in parse_requested_steps(request):
        followup = request.user.partition(f"{marker} step {number}, what came next: ")[2].split(marker)[0]
        signal = "unclear"
        for word, word_signal in (("Thanks", "accepted"), ("wrong", "corrected"), ("error", "tool_failed")):
            if word in followup:
                signal = word_signal
        answers.append({"step": number, "reasons": "", "signal": signal})
    return {"steps": answers}


async def test_followup_judge_rewards_calls_by_user_reaction(path: Path) -> None:
    async with (
        serve_judge(answer_with_signals) as server,
        start_judge(path, server.url, rubric="followup") as judge,
    ):
        rewards = await judge.score(NO_TASK, SESSION)
        other = make_transcript((user("2+2?"), "5"), (user("That is wrong"), "4"), session_id="z")
        wrong = await judge.score(NO_TASK, other)
    # Nothing follows the last reply of a session, and a plain tool result is unclear.
    assert [(r.call_id, r.value, r.detail["signal"]) for r in rewards] == [
        ("s-1", 0.0, "tool_failed"),
        ("s-3", 1.0, "accepted"),
    ]
    assert [(r.call_id, r.value) for r in wrong] == [("z-1", 0.0)]
    assert parse_requested_steps(server.requests[0]) == [1, 2, 3]


async def test_followup_judge_uses_configured_signal_values(path: Path) -> None:
    signals = {"accepted": 0.5, "tool_failed": None}
    async with serve_judge(answer_with_signals) as server:
        async with start_judge(path, server.url, rubric="followup", signals=signals) as judge:
            rewards = await judge.score(NO_TASK, SESSION)
    assert [(r.call_id, r.value) for r in rewards] == [("s-3", 0.5)]


async def test_followup_judge_takes_majority_and_treats_ties_as_unclear(path: Path) -> None:
    async with serve_judge(answer_with_signals) as server:
        for words, value in ((("accepted", "corrected", "accepted"), [1.0]), (("accepted", "corrected"), [])):
            answers = iter(words)
            server.answer_with = lambda request, answers=answers: {
                "steps": [{"step": 1, "reasons": "", "signal": next(answers)}]
            }
            async with start_judge(
                path, server.url, rubric="followup", votes=len(words), model=str(value)
            ) as judge:
                session = make_transcript((user("a"), "b"), (user("c"), "d"))
                assert [r.value for r in await judge.score(NO_TASK, session)] == value


async def test_followup_judge_skips_sessions_without_followup(path: Path) -> None:
    async with (
        serve_judge(answer_with_signals) as server,
        start_judge(path, server.url, rubric="followup") as judge,
    ):
        assert await judge.score(NO_TASK, make_answer_transcript("42")) == []
    assert server.requests == []


# --- pairwise -----------------------------------------------------------------------------------


def prefer_longer_answer(request: JudgeRequest) -> Any:
    marker = request.user.split()[0]
    a, b = (
        request.user.partition(f"{marker} session {name}, step 1: assistant's reply\n")[2].split("\n")[0]
        for name in "AB"
    )
    winner = "tie" if len(a) == len(b) else "A" if len(a) > len(b) else "B"
    return {"reasons": f"{a} or {b}", "winner": winner}


async def score_group(judge: Judge, *answers: str) -> list[Reward]:
    assert isinstance(judge, GroupScorer)
    return await judge.score_group(
        TASK, [make_answer_transcript(text, f"s{i}") for i, text in enumerate(answers)]
    )


async def test_pairwise_judge_compares_in_both_orders(path: Path) -> None:
    async with (
        serve_judge(prefer_longer_answer) as server,
        start_judge(path, server.url, rubric="pairwise") as judge,
    ):
        assert judge.background
        rewards = await score_group(judge, "xx", "xxxx", "x", "xxx")
    assert len(server.requests) == 12
    values = {r.session_id: r.value for r in rewards}
    assert values["s1"] > values["s3"] > values["s0"] > values["s2"]
    assert sum(values.values()) == pytest.approx(2)
    assert rewards[1].detail["orders"] == rewards[1].detail["orders_agreed"] == 3
    assert all(pair["points"] == 1.0 for pair in rewards[1].detail["pairs"])


async def test_pairwise_judge_ignores_position_bias(path: Path) -> None:
    async with serve_judge(lambda request: {"reasons": "", "winner": "A"}) as server:
        async with start_judge(path, server.url, rubric="pairwise", votes=2) as judge:
            rewards = await score_group(judge, "x", "xx", "xxx")
    assert [r.value for r in rewards] == pytest.approx([0.5] * 3)
    assert [r.detail["orders_agreed"] for r in rewards] == [0, 0, 0]
    assert [r.detail["orders"] for r in rewards] == [4, 4, 4]


async def test_pairwise_judge_limits_pairs_and_skips_equal_answers(path: Path) -> None:
    async with serve_judge(prefer_longer_answer) as server:
        async with start_judge(path, server.url, rubric="pairwise", pairs=8) as judge:
            await score_group(judge, *("x" * n for n in range(1, 9)))
            assert len(server.requests) == 16
            rewards = await score_group(judge, "same", "same")
            assert [r.value for r in rewards] == pytest.approx([0.5, 0.5])
            assert await judge.score(TASK, make_answer_transcript("alone")) == []
    assert len(server.requests) == 16


async def test_pairwise_judge_resumes_an_interrupted_group(path: Path) -> None:
    async with serve_judge(prefer_longer_answer) as server:
        server.faults = ["500", "drop"]
        async with start_judge(path, server.url, rubric="pairwise") as judge:
            with pytest.raises(ScoreError):
                await score_group(judge, "x", "xx", "xxx")
        async with start_judge(path, server.url, rubric="pairwise", input_price=1.0) as judge:
            rewards = await score_group(judge, "x", "xx", "xxx")
    assert len(server.requests) == 8
    assert rewards[2].value > rewards[1].value > rewards[0].value


@pytest.mark.parametrize("size", range(2, 12))
def test_choose_pairs_returns_all_or_connects_all_sessions(size: int) -> None:
    all_pairs = choose_pairs(size, 1000)
    assert len({frozenset(pair) for pair in all_pairs}) == len(all_pairs) == size * (size - 1) // 2
    for max_pairs in (1, size):
        ring = choose_pairs(size, max_pairs)
        assert {index for pair in ring for index in pair} == set(range(size))


def test_expected_win_rates_follow_the_comparisons() -> None:
    comparisons = [PairComparison(0, 1, 1.0, 1, 1), PairComparison(1, 2, 1.0, 1, 1)]
    first, second, third = compute_expected_win_rates(3, comparisons)  # sessions 0 and 2 were not compared
    assert 1 > first > second > third > 0
    assert second == pytest.approx(0.5, abs=1e-6)
    assert compute_expected_win_rates(2, [PairComparison(0, 1, 0.5, 1, 1)]) == pytest.approx([0.5, 0.5])


# --- rendering ----------------------------------------------------------------------------------


def test_session_steps_render_branches_failures_and_tool_calls() -> None:
    call = ToolCall(id="1", name="search", arguments='{"q": 1}')
    first = make_call("a", [1], [5], messages=(user("hi"),), reply=assistant("one"))
    reply = Message(role="assistant", content="", reasoning="hm", tool_calls=[call])
    second = make_call(
        "b", [1], [5], parent=first, messages=(user("hi"), assistant("one"), user("go")), reply=reply
    )
    other = make_call("c", [1], [5], messages=(user("sub-agent"),), reply=assistant("two"))
    branch = replace(
        make_call(
            "d",
            [1],
            [5],
            parent=first,
            messages=(user("hi"), assistant("ONE"), user("no")),
            reply=assistant("x"),
        ),
        link=Link.BRANCH,
        status=CallStatus.ABORTED,
    )
    assert render_conversation([first, second, other, branch]) == [
        JudgePromptPart("step 1: user", "hi"),
        JudgePromptPart("step 1: assistant's reply", "one"),
        JudgePromptPart("step 2: user", "go"),
        JudgePromptPart("step 2: assistant's reply", '(thinks) hm\n(calls the tool) search {"q": 1}'),
        JudgePromptPart("step 3 starts a new conversation"),
        JudgePromptPart("step 3: user", "sub-agent"),
        JudgePromptPart("step 3: assistant's reply", "two"),
        JudgePromptPart("step 4 continues step 1"),
        JudgePromptPart("step 4: assistant", "ONE"),
        JudgePromptPart("step 4: user", "no"),
        JudgePromptPart("step 4: assistant's reply, incomplete", "x"),
    ]
    assert [step.is_complete for step in build_steps([first, second, other, branch])] == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("limit", [10, 11, 25, 99, 100])
def test_truncated_parts_keep_both_ends(limit: int) -> None:
    parts = [JudgePromptPart(str(i), chr(97 + i) * 20) for i in range(5)]
    truncated = truncate_parts(parts, limit)
    assert sum(len(part.text) for part in truncated) == limit
    assert truncated[0].text.startswith("a")
    assert truncated[-1].text.endswith("e")
    assert [p.label for p in truncated if "omitted" in p.label] == (
        [f"omitted here: {100 - limit} characters"] if limit < 100 else []
    )


async def test_followup_judge_rewards_calls_of_open_sessions_once(path: Path) -> None:
    """A call is judged when the next user message arrived, while its session is open, and not again at the
    end of the session."""
    turns = ((user("Fix it"), "Done"), (user("Thanks, the docs?"), "Here"), (user("That is wrong"), "Oh"))
    calls = make_transcript(*turns).calls
    async with (
        serve_judge(answer_with_signals) as server,
        start_judge(path, server.url, rubric="followup") as judge,
    ):
        assert judge._context is not None
        store = judge._context.store
        await store.put_run(Run(RUN, RUN, {}))
        await store.open_session(make_session("s", channel=Channel.LIVE))
        config = ScoringConfig()
        queue = OpenSessionQueue(store, RUN, [judge], config)
        values: list[list[tuple[str | None, float]]] = []
        for call in calls:
            await store.add_calls([call])
            await queue.score_changed()
            await queue.score_changed()
            values.append([(r.call_id, r.value) for r in await store.rewards("s")])
        assert values == [[], [("s-1", 1.0)], [("s-1", 1.0), ("s-2", 0.0)]]
        assert [parse_requested_steps(request) for request in server.requests] == [[1], [2]]
        await store.end_session("s", SessionStatus.COMPLETED)
        runner = ScoringRunner(store, RUN, [], config, agent_id="default", live_scorers=[judge])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(runner.run())
            async with asyncio.timeout(30):
                while not (await store.scores(["s"]))["s"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            runner.drain()
        assert len(await store.rewards("s")) == 2
        assert len(server.requests) == 2
