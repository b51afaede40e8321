from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from instar.config import ScoringConfig
from instar.data.batcher import Batcher
from instar.errors import AgentError
from instar.gateway.base import OpenSession
from instar.rollout.gateway_client import GatewayClient
from instar.rollout.runner import RolloutRunner
from instar.rollout.slots import derive_seed
from instar.types import Channel, Group, GroupStatus, RewardSource, ScoreState, Session, SessionStatus, Task
from tests.unit.rollout import harness as harness_module
from tests.unit.rollout.harness import RUN, RolloutHarness, attempts, make_config, questions, wait_until


async def run_once(harness: RolloutHarness, runner: RolloutRunner, groups: int = 2) -> list[Group]:
    """Run until ``groups`` groups are closed, then stop."""
    running = asyncio.create_task(runner.run())
    await wait_until(lambda: runner.groups_done >= groups or running.done())
    runner.drain()
    await running
    return await harness.store.groups(RUN, Channel.TRAIN)


async def load_sessions(harness: RolloutHarness, group: Group) -> list[Session]:
    return [row.session for row in await harness.store.sessions(group_id=group.group_id)]


async def test_sync_training_alternates_rollout_and_steps(harness: RolloutHarness) -> None:
    """Every group in a step is sampled by the previous version."""
    config = make_config(harness.folder)
    runner = harness.create_runner(config)
    running = asyncio.create_task(runner.run())
    batcher = Batcher(harness.store, RUN, config)
    for step in (1, 2):
        batch = await harness.train_step(config, batcher, step, step - 1)
        assert batch.report["groups"] == 2
        assert batch.report["sessions"] == 4
        assert batch.report["staleness_max"] == 0
        for sample in batch.samples:
            assert sample.versions[sample.mask > 0].min() == step - 1
    await asyncio.wait_for(running, 10)
    groups = await harness.store.groups(RUN, Channel.TRAIN)
    assert [group.group_id for group in groups] == [f"{RUN}/train/00000{index}" for index in range(4)]
    assert all(group.status is GroupStatus.READY for group in groups)
    for group in groups:
        for row in await harness.store.sessions(group_id=group.group_id):
            session = row.session
            assert session.status is SessionStatus.COMPLETED
            assert session.seed == derive_seed(0, "train", group.index, session.slot)
            (call,) = await harness.store.calls(session.session_id)
            assert row.reward == float(call.reply["content"] == "right")
            assert call.messages[-1]["content"] == group.task.data["question"]
            (reward,) = await harness.store.rewards(session.session_id)
            assert reward.source is RewardSource.RULE
    assert runner.counters.completed == 8
    assert runner.activity == "drained"


async def test_tasks_are_shuffled_by_seed_in_every_epoch(harness: RolloutHarness) -> None:
    runner = harness.create_runner(make_config(harness.folder))
    first, second = ([runner.task_for(5 * epoch + i).task_id for i in range(5)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == ["0", "1", "2", "3", "4"]
    assert first != second
    repeated = harness.create_runner(make_config(harness.folder))
    assert [repeated.task_for(i).task_id for i in range(5)] == first
    unshuffled = harness.create_runner(make_config(harness.folder, shuffle=False))
    assert [unshuffled.task_for(i).task_id for i in range(6)] == ["0", "1", "2", "3", "4", "0"]


async def test_transient_error_retries_the_slot(harness: RolloutHarness) -> None:
    config = make_config(harness.folder, agent="lose_connection_once", group_size=1)
    for group in await run_once(harness, harness.create_runner(config)):
        first, second = await load_sessions(harness, group)
        assert (first.status, first.attempt) == (SessionStatus.ABANDONED, 0)
        assert first.reason == "transient: RuntimeError: sdk error"
        assert (second.status, second.attempt, second.slot) == (SessionStatus.COMPLETED, 1, 0)
        assert first.seed == second.seed, "the retry has the same seed"


async def test_transient_errors_fail_after_configured_retries(harness: RolloutHarness) -> None:
    config = make_config(
        harness.folder, agent="refuse_connection", group_size=1, retries=1, trainer={"groups_per_step": 1}
    )
    (group,) = await run_once(harness, harness.create_runner(config), groups=1)
    statuses = [(session.status, session.reason) for session in await load_sessions(harness, group)]
    assert statuses == [
        (SessionStatus.ABANDONED, "transient: ConnectionRefusedError: connection refused"),
        (SessionStatus.FAILED, "ConnectionRefusedError: connection refused"),
    ]
    assert group.status is GroupStatus.READY


async def test_keep_policy_records_reason_and_failed_reward(harness: RolloutHarness) -> None:
    config = make_config(harness.folder, agent="fail_on_task", shuffle=False, failed_reward=-0.5)
    failed, succeeded = await run_once(harness, harness.create_runner(config))
    assert failed.status is succeeded.status is GroupStatus.READY
    for session in await load_sessions(harness, failed):
        assert (session.status, session.reason) == (SessionStatus.FAILED, "ValueError: agent failed")
        (reward,) = await harness.store.rewards(session.session_id)
        assert (reward.value, reward.source) == (-0.5, RewardSource.FALLBACK)
    assert {session.status for session in await load_sessions(harness, succeeded)} == {
        SessionStatus.COMPLETED
    }


async def test_drop_policy_drops_and_replaces_the_group(harness: RolloutHarness) -> None:
    config = make_config(harness.folder, agent="fail_on_task", shuffle=False, group_policy="drop")
    groups = await run_once(harness, harness.create_runner(config), groups=3)
    assert [(group.status, group.reason) for group in groups] == [
        (GroupStatus.DROPPED, "session_failed"),
        (GroupStatus.READY, None),
        (GroupStatus.READY, None),
    ], "a third group replaces the dropped one, and no fourth starts"


async def test_refill_policy_reruns_with_a_different_seed(harness: RolloutHarness) -> None:
    config = make_config(
        harness.folder,
        agent="fail_on_task",
        args={"times": 1},
        shuffle=False,
        group_policy="refill",
        group_size=1,
        trainer={"groups_per_step": 1},
    )
    (group,) = await run_once(harness, harness.create_runner(config), groups=1)
    first, second = await load_sessions(harness, group)
    assert (first.status, second.status) == (SessionStatus.FAILED, SessionStatus.COMPLETED)
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.seed != second.seed


async def test_refill_policy_limits_refills(harness: RolloutHarness) -> None:
    config = make_config(
        harness.folder,
        agent="fail_on_task",
        shuffle=False,
        group_policy="refill",
        refills=1,
        group_size=1,
        trainer={"groups_per_step": 1},
    )
    (group,) = await run_once(harness, harness.create_runner(config), groups=1)
    assert [session.status for session in await load_sessions(harness, group)] == [SessionStatus.FAILED] * 2


async def test_session_fails_after_timeout(harness: RolloutHarness) -> None:
    config = make_config(
        harness.folder, agent="hang", timeout=0.3, group_size=1, trainer={"groups_per_step": 1}
    )
    (group,) = await run_once(harness, harness.create_runner(config), groups=1)
    (session,) = await load_sessions(harness, group)
    assert session.status is SessionStatus.FAILED
    assert session.reason == "the agent did not finish within 0.3 s"


@pytest.mark.parametrize("agent", ["complete_own_session", "complete_own_session_and_fail"])
async def test_agent_may_complete_its_own_session(harness: RolloutHarness, agent: str) -> None:
    config = make_config(harness.folder, agent=agent, group_size=1, trainer={"groups_per_step": 1})
    (group,) = await run_once(harness, harness.create_runner(config), groups=1)
    (session,) = await load_sessions(harness, group)
    rewards = {reward.source: reward.value for reward in await harness.store.rewards(session.session_id)}
    assert session.status is SessionStatus.COMPLETED
    assert rewards[RewardSource.AGENT] == 0.75
    assert RewardSource.RULE in rewards, "the rule also scores the session"


async def test_failed_rule_records_reason_without_reward(harness: RolloutHarness) -> None:
    reward = {"type": "rule", "function": "tests.unit.rewards.test_rewards:return_nan"}
    config = make_config(harness.folder, reward=reward, group_size=1, trainer={"groups_per_step": 1})
    runner = harness.create_runner(config)
    (group,) = await run_once(harness, runner, groups=1)
    (session,) = await load_sessions(harness, group)
    assert session.status is SessionStatus.COMPLETED
    assert await harness.store.rewards(session.session_id) == []
    (score,) = (await harness.store.scores([session.session_id]))[session.session_id]
    assert (score.state, score.attempts) == (ScoreState.FALLBACK, 1)
    assert score.reason is not None
    assert "got nan" in score.reason
    assert "1 without a reward (reward: reward rule" in runner.activity


async def test_failed_rule_may_have_a_fallback_reward(harness: RolloutHarness) -> None:
    reward = {"type": "rule", "function": "tests.unit.rewards.test_rewards:return_nan"}
    config = make_config(harness.folder, reward=reward, group_size=1, trainer={"groups_per_step": 1})
    config = config.model_copy(update={"scoring": ScoringConfig(fallback=-2.0)})
    (group,) = await run_once(harness, harness.create_runner(config), groups=1)
    (session,) = await load_sessions(harness, group)
    (reward,) = await harness.store.rewards(session.session_id)
    assert (reward.value, reward.source) == (-2.0, RewardSource.FALLBACK)
    assert "got nan" in reward.detail["reason"]


async def test_rule_that_always_fails_stops_the_run(harness: RolloutHarness) -> None:
    reward = {"type": "rule", "function": "tests.unit.rewards.test_rewards:return_nan"}
    config = make_config(
        harness.folder, reward=reward, trainer={"steps": 9, "max_staleness": 9, "mode": "async"}
    )
    with pytest.raises(AgentError, match=r"got no reward; the last failure was: reward: reward rule .* nan"):
        await harness.create_runner(config).run()


async def test_rollout_concurrency_is_limited(harness: RolloutHarness) -> None:
    harness_module.gate = asyncio.Event()
    config = make_config(
        harness.folder,
        agent="wait_for_gate",
        concurrency=3,
        group_size=4,
        trainer={"groups_per_step": 4, "steps": 1},
    )
    runner = harness.create_runner(config)
    running = asyncio.create_task(runner.run())
    await wait_until(lambda: len(questions) >= 3)
    await asyncio.sleep(0.2)
    assert len(questions) == runner.counters.running == 3
    assert (await harness.store.progress(RUN)).groups_open == 1, "no group starts without free slots"
    harness_module.gate.set()
    await wait_until(lambda: runner.groups_done >= 4)
    runner.drain()
    await running
    assert runner.counters.completed == 16


@pytest.mark.parametrize("graceful", [True, False])
async def test_open_groups_of_a_stopped_run_are_resumed(harness: RolloutHarness, graceful: bool) -> None:
    """After a stop or a kill, completed sessions are kept and the others are run again."""
    harness_module.gate = asyncio.Event()
    config = make_config(harness.folder, agent="wait_for_gate", trainer={"groups_per_step": 1})
    running = asyncio.create_task(harness.create_runner(config).run())
    await wait_until(lambda: len(questions) >= 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (group,) = await harness.store.groups(RUN, Channel.TRAIN)
    assert group.status is GroupStatus.OPEN
    assert {s.status for s in await load_sessions(harness, group)} == {SessionStatus.ABANDONED}
    if not graceful:
        # The state after the process was killed: slot 0 completed at its second attempt, slot 1 is running.
        completed = await harness.gateway.open_session(
            OpenSession(channel=Channel.TRAIN, group_id=group.group_id, slot=0, attempt=1)
        )
        await harness.gateway.complete_session(completed.session_id)
        await harness.gateway.open_session(
            OpenSession(channel=Channel.TRAIN, group_id=group.group_id, slot=1, attempt=1)
        )
    harness_module.gate.set()
    (group,) = await run_once(harness, harness.create_runner(config), groups=1)
    assert group.status is GroupStatus.READY
    outcomes = Counter((s.slot, s.attempt, s.status, s.reason) for s in await load_sessions(harness, group))
    last_attempt = 1 if graceful else 2
    assert outcomes[(1, last_attempt, SessionStatus.COMPLETED, None)] == 1
    assert outcomes[(0, 1, SessionStatus.COMPLETED, None)] == 1
    interrupted = [key for key in outcomes if key[2] is SessionStatus.ABANDONED]
    assert {key[3] for key in interrupted} == {"interrupted"}
    assert len(interrupted) == (2 if graceful else 3)


async def test_cancelled_run_waits_until_every_session_is_abandoned(
    harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second session is abandoned long after the first one, when its slot is cancelled again."""
    harness_module.gate = asyncio.Event()
    end_session = harness.store.end_session
    is_first_ended = asyncio.Event()

    async def end_one_after_the_other(session_id: str, *arguments: Any) -> Any:
        if is_first_ended.is_set():
            await asyncio.sleep(0.2)
        is_first_ended.set()
        return await end_session(session_id, *arguments)

    monkeypatch.setattr(harness.store, "end_session", end_one_after_the_other)
    config = make_config(harness.folder, agent="wait_for_gate", trainer={"groups_per_step": 1})
    running = asyncio.create_task(harness.create_runner(config).run())
    await wait_until(lambda: len(questions) >= 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (group,) = await harness.store.groups(RUN, Channel.TRAIN)
    statuses = [session.status for session in await load_sessions(harness, group)]
    assert statuses == [SessionStatus.ABANDONED, SessionStatus.ABANDONED]


async def test_resumed_group_with_failed_session_is_dropped(harness: RolloutHarness) -> None:
    group = Group(f"{RUN}/train/000000", RUN, Channel.TRAIN, 0, 2, Task("0", {"question": "number 9"}))
    await harness.store.open_group(group)
    failed = await harness.gateway.open_session(
        OpenSession(channel=Channel.TRAIN, group_id=group.group_id, slot=0)
    )
    await harness.gateway.fail_session(failed.session_id, "earlier")
    config = make_config(harness.folder, group_policy="drop", trainer={"groups_per_step": 1})
    groups = await run_once(harness, harness.create_runner(config), groups=2)
    assert [g.status for g in groups] == [GroupStatus.DROPPED, GroupStatus.READY]
    assert attempts["number 9"] == 1, "only the missing slot was run"


@pytest.mark.parametrize("policy", ["keep", "drop"])
async def test_agent_that_always_fails_stops_the_run(harness: RolloutHarness, policy: str) -> None:
    trainer = {"groups_per_step": 20}
    config = make_config(
        harness.folder,
        agent="refuse_connection",
        retries=0,
        group_size=1,
        group_policy=policy,
        trainer=trainer,
    )
    with pytest.raises(AgentError, match=r"rollout\.agent: every session .* connection refused"):
        await asyncio.wait_for(harness.create_runner(config).run(), 30)


async def test_evaluation_runs_every_configured_number_of_versions(harness: RolloutHarness) -> None:
    config = make_config(harness.folder, trainer={"steps": 3})
    assert config.eval is not None
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 2})})
    labels: list[str] = []
    runner = harness.create_runner(config)
    runner.evaluator = harness.create_evaluator(
        config, lambda kind, step, metrics: labels.append(metrics["label"])
    )
    running = asyncio.create_task(runner.run())
    batcher = Batcher(harness.store, RUN, config)
    for step in (1, 2, 3):
        await harness.train_step(config, batcher, step, step - 1)
    await asyncio.wait_for(running, 20)
    assert labels == ["v2", "v2"], "once in each mode"


async def test_interrupted_evaluation_is_repeated_by_next_rollout(harness: RolloutHarness) -> None:
    config = make_config(harness.folder, trainer={"steps": 3})
    assert config.eval is not None
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 2})})
    runner = harness.create_runner(config)
    running = asyncio.create_task(runner.run())
    batcher = Batcher(harness.store, RUN, config)
    for step in (1, 2):
        await harness.train_step(config, batcher, step, step - 1)
    runner.drain()
    await running
    await harness.create_evaluator(config).evaluate("greedy", "v2")  # the other mode was not evaluated
    labels: list[str] = []

    def make_runner() -> RolloutRunner:
        runner = harness.create_runner(config)
        runner.evaluator = harness.create_evaluator(
            config, lambda kind, step, metrics: labels.append(metrics["label"])
        )
        return runner

    runner = make_runner()
    running = asyncio.create_task(runner.run())
    await wait_until(lambda: len(labels) == 2)
    runner.drain()
    await running
    running = asyncio.create_task(make_runner().run())
    await harness.train_step(config, batcher, 3, 2)
    await asyncio.wait_for(running, 20)
    assert labels == ["v2", "v2"], "once in each mode, and not again"


async def test_training_continues_after_failed_evaluation(harness: RolloutHarness) -> None:
    config = make_config(harness.folder, trainer={"steps": 3})
    assert config.eval is not None
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 1})})
    warnings: list[str] = []
    runner = harness.create_runner(config)
    gateway = GatewayClient("http://127.0.0.1:9", harness_module.KEY, max_wait=0.1)
    runner.evaluator = harness.create_evaluator(
        config, lambda kind, step, metrics: warnings.append(metrics["text"]), gateway
    )
    running = asyncio.create_task(runner.run())
    batcher = Batcher(harness.store, RUN, config)
    for step in (1, 2, 3):
        await harness.train_step(config, batcher, step, step - 1)
    await asyncio.wait_for(running, 20)
    await gateway.close()
    assert len(warnings) >= 2
    assert "the evaluation 'v1' failed" in warnings[0]


async def test_gateway_restart_loses_no_session(harness: RolloutHarness) -> None:
    """Sessions on a killed gateway are retried with the same seeds after its restart."""
    harness_module.gate = asyncio.Event()
    config = make_config(harness.folder, agent="ask_twice", trainer={"groups_per_step": 1})
    runner = harness.create_runner(config)
    running = asyncio.create_task(runner.run())
    await wait_until(lambda: len(questions) >= 2)
    await harness.stop_gateway()
    harness_module.gate.set()
    await wait_until(lambda: runner.counters.abandoned == 2)
    await asyncio.sleep(0.3)
    await harness.start_gateway()
    await wait_until(lambda: runner.groups_done == 1 or running.done())
    runner.drain()
    await running
    (group,) = await harness.store.groups(RUN, Channel.TRAIN)
    sessions = await load_sessions(harness, group)
    assert Counter(session.status for session in sessions) == {
        SessionStatus.ABANDONED: 2,
        SessionStatus.COMPLETED: 2,
    }
    assert len({(session.slot, session.seed) for session in sessions}) == 2
