"""Tests for `sessions tag`, `sessions ls`, `plan`, `curate` and `rescore`."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest

from instar.cli.rescore import SessionRescorer
from instar.cluster.layout import RunFolder
from instar.config import RunConfig, ScoringConfig
from instar.rewards.base import Scorer, Transcript
from instar.store.base import SessionFilter, Store
from instar.store.factory import open_store
from instar.store.sqlite import SqliteStore
from instar.types import GroupStatus, Json, Reward, RewardSource, Score, Task
from tests.unit.data.builders import RUN, add_group, add_session, put_test_run

from .conftest import Instar, SmallRun


@pytest.fixture
def run(small_run: SmallRun, tmp_path: Path) -> SmallRun:
    """A copy of the small run, which the test may change."""
    folder = tmp_path / "copy"
    shutil.copytree(small_run.folder, folder)
    return SmallRun(folder, small_run.sessions)


def score_call_count(task: Json, transcript: Transcript, scale: float = 1.0) -> float:
    return scale * len(transcript.calls)


def raise_error(task: Json, transcript: Transcript) -> float:
    raise ValueError("the rule failed")


def test_sessions_can_be_tagged_listed_by_tag_and_untagged(instar: Instar, run: SmallRun) -> None:
    tagged = instar(
        "sessions", "tag", run.folder, "quality=low", "--status", "failed", "--reason", "test", "--json"
    )
    assert tagged.json == {"tagged": 1}
    assert instar("sessions", "tag", run.folder, "untrainable", run.sessions["waiting"]).code == 0
    (row,) = instar("sessions", "ls", run.folder, "--tag", "quality=low", "--json").json
    assert row["session_id"] == run.sessions["failed"]
    (tag,) = row["tags"]
    assert (tag["name"], tag["value"], tag["reason"]) == ("quality", "low", "test")
    assert tag["author"]
    assert "quality=low" in instar("sessions", "ls", run.folder).out
    assert instar("sessions", "untag", run.folder, "quality", "--json").json == {"untagged": 1}
    assert instar("sessions", "ls", run.folder, "--tag", "quality", "--json").json == []
    rejected = instar("sessions", "tag", run.folder, "quality")
    assert rejected.code == 1
    assert "select them by id" in rejected.err
    assert "no session missing" in instar("sessions", "tag", run.folder, "quality", "missing").err


def test_sessions_ls_pages_are_contiguous(instar: Instar, run: SmallRun) -> None:
    all_rows = instar("sessions", "ls", run.folder, "--json").json
    newest = instar("sessions", "ls", run.folder, "--limit", "5", "--json").json
    older = instar("sessions", "ls", run.folder, "--before", newest[0]["number"], "--json").json
    assert older + newest == all_rows
    assert f"--before {newest[0]['number']}" in instar("sessions", "ls", run.folder, "--limit", "5").err


def test_sessions_can_be_filtered_by_reward_and_time(instar: Instar, run: SmallRun) -> None:
    def count_sessions(*options: str) -> int:
        return len(instar("sessions", "ls", run.folder, "--json", *options).json)

    assert count_sessions("--reward-min", "1", "--channel", "train") == 2
    assert count_sessions("--since", "1h") == 8
    assert count_sessions("--until", "2020-01-01") == 0
    assert count_sessions("--scorer", "rule", "--reward-max", "0", "--channel", "train") == 3
    assert "is not a time" in instar("sessions", "ls", run.folder, "--since", "yesterday").err
    assert "Available: agent, rule, judge" in instar("sessions", "ls", run.folder, "--source", "unknown").err


def test_plan_shows_the_next_batch_with_reasons(instar: Instar, run: SmallRun) -> None:
    plan = instar("plan", run.folder, "--json").json
    assert (plan["step"], plan["version"], plan["ready"]) == (2, 0, False)
    (group,) = plan["groups"]
    assert group["task_id"] == "task-2"
    assert [sample["reason"] for sample in group["samples"]] == ["zero_signal", "failed"]
    out = instar("plan", run.folder).out
    assert "dropped: failed" in out
    assert "1 ready" in out
    instar("sessions", "tag", run.folder, "untrainable", run.sessions["waiting"])
    (group,) = instar("plan", run.folder, "--json").json["groups"]
    assert {sample["reason"] for sample in group["samples"]} == {"untrainable", "failed"}


def test_curate_reports_findings_and_tags_with_apply(instar: Instar, run: SmallRun) -> None:
    report = instar("curate", run.folder, "--json").json
    assert report["sessions"] == 8
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert {"duplicates", "identical", "zero_signal"} <= set(by_check)
    assert run.sessions["equal"] in by_check["zero_signal"]["session_ids"]
    assert instar("sessions", "ls", run.folder, "--tag", "zero_signal", "--json").json == []
    applied = instar("curate", run.folder, "--apply", "--check", "zero_signal")
    assert "tagged" in applied.out
    (tag,) = instar("sessions", "ls", run.folder, "--tag", "zero_signal", "--json").json[0]["tags"]
    assert tag["author"] == "check:zero_signal"
    assert "Unknown check 'unknown'. Available:" in instar("curate", run.folder, "--check", "unknown").err


@pytest.fixture
def grouped_run(tmp_path: Path) -> Path:
    """Create a run with identical replies. Of its complete groups, only the last has equal rewards."""
    config = RunConfig(name=RUN, dir=tmp_path / "grouped_run")
    RunFolder(config.run_dir).create(config)

    async def create_store() -> None:
        store = open_store(config)
        await put_test_run(store)
        for index in range(2):
            await add_group(store, index, [1.0, 1.0, 0.0, 0.0])
        for index, status in ((2, GroupStatus.OPEN), (3, GroupStatus.SCORING)):
            await add_group(store, index, [1.0, 1.0], status=status)
        retried = await add_group(store, 4, [], status=GroupStatus.OPEN)
        await add_session(store, retried, 0, 0.0)
        await add_session(store, retried, 0, 1.0, attempt=1)
        await add_session(store, retried, 1, 1.0)
        await store.close_group(retried, GroupStatus.READY)
        await store.close()

    asyncio.run(create_store())
    return config.run_dir


@pytest.mark.parametrize("options", [(), ("--reward-min", "1"), ("--limit", "9")])
def test_curate_checks_only_complete_groups(
    instar: Instar, grouped_run: Path, options: tuple[str, ...]
) -> None:
    (finding,) = instar("curate", grouped_run, "--check", "zero_signal", *options, "--json").json["findings"]
    retried = f"{RUN}/train/000004"
    assert finding["session_ids"] == [f"{retried}:0.1", f"{retried}:1.0"], "the first attempt is superseded"
    findings = instar("curate", grouped_run, "--check", "identical", *options, "--json").json["findings"]
    assert not {"000002", "000003"} & {finding["value"][-6:] for finding in findings}, (
        "incomplete groups are not checked"
    )
    assert all(finding["numbers"] == {"share": 1.0} for finding in findings)


def test_curate_tags_only_selected_sessions(instar: Instar, grouped_run: Path) -> None:
    instar("curate", grouped_run, "--check", "identical", "--reward-max", "0", "--apply")
    tagged = instar("sessions", "ls", grouped_run, "--tag", "identical", "--json").json
    groups = [f"{RUN}/train/00000{index}" for index in (0, 1)]
    assert [row["session_id"] for row in tagged] == [f"{g}:{slot}.0" for g in groups for slot in (2, 3)]
    assert all(row["tags"][0]["reason"].startswith("4 of 4 outputs ") for row in tagged)


RULE = "{type: rule, function: 'tests.unit.cli.test_curation:score_call_count', args: {scale: 10}}"


def read_rewards_and_scores(run: SmallRun, session_id: str) -> tuple[list[Reward], list[Score]]:
    async def read() -> tuple[list[Reward], list[Score]]:
        store = SqliteStore(run.folder / "store.db", read_only=True)
        try:
            return await store.rewards(session_id), (await store.scores([session_id]))[session_id]
        finally:
            await store.close()

    return asyncio.run(read())


def test_rescore_keeps_earlier_rewards_and_skips_scored_sessions(instar: Instar, run: SmallRun) -> None:
    (counts,) = instar("rescore", run.folder, "--reward", RULE, "--channel", "train", "--json").json.values()
    assert (counts["scored"], counts["fallback"], counts["skipped"]) == (5, 0, 0)
    rewards, (score,) = read_rewards_and_scores(run, run.sessions["trained"])
    assert [reward.value for reward in rewards] == [1.0, 20.0]
    assert rewards[1].scorer.endswith("score_call_count")
    assert score.scorer.startswith(rewards[1].scorer)
    (repeated,) = instar("rescore", run.folder, "--reward", RULE, "--json").json.values()
    assert (repeated["scored"], repeated["skipped"]) == (2, 5), (
        "the sessions in the other channel were not scored yet"
    )


def test_rescore_resumes_after_an_interruption(instar: Instar, run: SmallRun) -> None:
    instar("rescore", run.folder, "--reward", RULE, "--json")
    with sqlite3.connect(run.folder / "store.db") as database:
        database.execute("DELETE FROM scores WHERE session_id = ?", (run.sessions["after"],))
        database.execute("DELETE FROM rewards WHERE reward_id LIKE ?", (run.sessions["after"] + "%",))
    database.close()
    (counts,) = instar("rescore", run.folder, "--reward", RULE, "--json").json.values()
    assert (counts["scored"], counts["skipped"]) == (1, 6)


class DeletingScorer(Scorer):
    """Deletes the session that it scores, as another process may do meanwhile."""

    name = "deleting"

    def __init__(self, store: Store) -> None:
        self._store = store

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        await self._store.forget_sessions(RUN, [transcript.session_id])
        return [Reward(transcript.session_id, 1.0, RewardSource.RULE, self.name)]


async def test_rescore_skips_a_session_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    await put_test_run(store)
    await add_session(store, "g", 0, None)
    rescorer = SessionRescorer(store, RUN, DeletingScorer(store), ScoringConfig())
    counts = await rescorer.run(SessionFilter())
    assert (counts.scored, counts.skipped) == (0, 1)
    await store.close()


def test_rescore_failure_keeps_existing_rewards(instar: Instar, run: SmallRun, tmp_path: Path) -> None:
    config_path = tmp_path / "other.yaml"
    rule = "tests.unit.cli.test_curation:raise_error"
    config_path.write_text(
        f"name: other\nreward: {{type: rule, function: '{rule}'}}\nscoring: {{retries: 0}}\n"
    )
    session = run.sessions["trained"]
    (counts,) = instar("rescore", run.folder, session, "--config", config_path, "--json").json.values()
    assert (counts["scored"], counts["fallback"]) == (0, 1)
    assert "the rule failed" in next(iter(counts["reasons"]))
    rewards, scores = read_rewards_and_scores(run, session)
    assert [reward.value for reward in rewards] == [1.0]
    assert scores == [], "no failed score is stored, so the session can be trained on"
    (repeated,) = instar("rescore", run.folder, session, "--config", config_path, "--json").json.values()
    assert (repeated["fallback"], repeated["skipped"]) == (1, 0)
    config_path.write_text(config_path.read_text().replace("retries: 0", "retries: 0, fallback: 0.25"))
    (with_fallback,) = instar("rescore", run.folder, session, "--config", config_path, "--json").json.values()
    assert with_fallback["fallback"] == 1
    rewards, (score,) = read_rewards_and_scores(run, session)
    assert [reward.value for reward in rewards] == [1.0, 0.25]
    assert score.reason is not None
    assert "the rule failed" in score.reason


def test_rescore_rejects_a_missing_scorer_and_failed_sessions(instar: Instar, run: SmallRun) -> None:
    assert "and --config FILE, got neither" in instar("rescore", run.folder).err
    assert "only completed" in instar("rescore", run.folder, "--status", "failed", "--reward", RULE).err
