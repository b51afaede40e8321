"""Tests that exports are complete and deterministic, and are imported unchanged."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from instar.datasets.columns import TABLES
from instar.datasets.export import read_records
from instar.datasets.importing import import_sessions, verify_content
from instar.errors import ConfigError, ConflictError, DataError
from instar.live.base import is_held_out
from instar.store.base import SessionFilter, Store
from instar.store.sqlite import SqliteStore
from instar.types import Call, Channel, Feedback, Message, Reward, RewardSource, Session, SessionStatus
from tests.unit.data.builders import RUN, insert_session, make_call, make_session
from tests.unit.datasets.harness import add_session, export_all, fill_store

FORMATS = ["jsonl", "parquet", "hf"]


@pytest.fixture
async def store(tmp_path: Path):
    source = SqliteStore(tmp_path / "store.db")
    await fill_store(source)
    yield source
    await source.close()


@pytest.fixture
async def target(tmp_path: Path):
    store = SqliteStore(tmp_path / "other.db")
    yield store
    await store.close()


def assert_same_call(actual: Call, expected: Call) -> None:
    for field in fields(Call):
        left, right = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes(), field.name
        else:
            assert left == right, field.name


async def read_all_but_calls(store: Store) -> list[object]:
    """Return the ended sessions of the run, its groups, and the sessions' annotations."""
    rows = [row for row in await store.sessions(RUN) if row.session.status != "open"]
    session_ids = [row.session.session_id for row in rows]
    return [
        [row.session for row in rows],
        [await store.groups(RUN, channel) for channel in Channel],
        await store.rewards_by_session(session_ids),
        await store.scores(session_ids),
        await store.tags(session_ids),
        [(f.feedback_id, f.correction, f.created_at) for f in await store.feedback(RUN)],
    ]


async def test_sessions_deleted_during_an_export_are_skipped(store: Store) -> None:
    assert await store.forget_sessions(RUN, ["s0-0"]) == ["s0-0"]
    records = [record async for record in read_records(store, RUN, ["s0-0", "s2-1"])]
    assert [record.session.session_id for record in records] == ["s2-1"]


@pytest.mark.parametrize("format", FORMATS)
async def test_import_of_an_export_restores_every_field(
    store: Store, target: Store, tmp_path: Path, format: str
) -> None:
    manifest = await export_all(store, tmp_path / "out", format=format)
    assert verify_content(tmp_path / "out") == manifest
    result = await import_sessions(target, tmp_path / "out", RUN, manifest)
    assert (result.groups, result.sessions) == (3, 8)
    assert await read_all_but_calls(target) == await read_all_but_calls(store)
    for session_id in ("s0-0", "s2-1", "odd"):
        calls = zip(await store.calls(session_id), await target.calls(session_id), strict=True)
        for original, imported in calls:
            assert_same_call(imported, original)
    (feedback,) = await target.feedback(RUN, corrected_only=True)
    assert feedback.correction_ids is not None
    assert feedback.correction_ids.tolist() == [3, 4]


@pytest.mark.parametrize("format", FORMATS)
async def test_repeated_import_changes_nothing(
    store: Store, target: Store, tmp_path: Path, format: str
) -> None:
    manifest = await export_all(store, tmp_path / "out", format=format)
    await import_sessions(target, tmp_path / "out", RUN, manifest)
    before = await read_all_but_calls(target)
    repeated = await import_sessions(target, tmp_path / "out", RUN, manifest)
    assert (repeated.groups, repeated.sessions, repeated.unchanged) == (0, 0, 8)
    assert await read_all_but_calls(target) == before


async def test_content_hash_is_independent_of_the_format(store: Store, target: Store, tmp_path: Path) -> None:
    hashes = {format: (await export_all(store, tmp_path / format, format=format)).hash for format in FORMATS}
    assert len(set(hashes.values())) == 1
    await import_sessions(target, tmp_path / "parquet", RUN, verify_content(tmp_path / "parquet"))
    assert (await export_all(target, tmp_path / "again", format="jsonl")).hash == hashes["jsonl"]
    await store.add_rewards([Reward("odd", 0.0, RewardSource.RULE, "later")])
    assert (await export_all(store, tmp_path / "later")).hash != hashes["jsonl"]


@pytest.mark.parametrize("format", FORMATS)
async def test_export_of_the_same_data_writes_identical_files(
    store: Store, tmp_path: Path, format: str
) -> None:
    for name in ("one", "two"):
        await export_all(store, tmp_path / name, format=format, include_samples=True)
    contents = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "one", tmp_path / "two")
    ]
    assert contents[0]
    assert contents[0] == contents[1]


async def test_import_of_a_changed_session_names_the_differing_column(
    store: Store, target: Store, tmp_path: Path
) -> None:
    manifest = await export_all(store, tmp_path / "out")
    await import_sessions(target, tmp_path / "out", RUN, manifest)
    await target.add_rewards([Reward("s1-0", 0.0, RewardSource.HUMAN)])
    with pytest.raises(ConflictError, match=r"session s1-0 .* columns: rewards\."):
        await import_sessions(target, tmp_path / "out", RUN, manifest)


@pytest.mark.parametrize(
    ("old", "new"), [('"trainable":true', '"trainable":false'), ("answer 1", "answer 2")]
)
async def test_verify_content_rejects_changed_content(
    store: Store, tmp_path: Path, old: str, new: str
) -> None:
    await export_all(store, tmp_path / "out")
    calls = tmp_path / "out" / "calls.jsonl"
    calls.write_text(calls.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match="does not match its manifest"):
        verify_content(tmp_path / "out")


async def test_verify_content_rejects_a_truncated_file(store: Store, tmp_path: Path) -> None:
    await export_all(store, tmp_path / "out")
    calls = tmp_path / "out" / "calls.jsonl"
    calls.write_text(calls.read_text()[:-20])
    with pytest.raises(DataError, match=r"calls.jsonl, line \d+, is not a row"):
        verify_content(tmp_path / "out")


async def test_failed_export_neither_overwrites_nor_leaves_a_folder(store: Store, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        await export_all(store, tmp_path / "out")
    with pytest.raises(DataError, match="no ended session"):
        await export_all(store, tmp_path / "none", where=SessionFilter(task="missing"))
    with pytest.raises(DataError, match="no completed session has a reward of at least 2"):
        await export_all(
            store, tmp_path / "none", format="sft", min_reward=2.0, where=SessionFilter(channel=Channel.TRAIN)
        )
    assert [path.name for path in tmp_path.glob("*") if path.is_dir()] == ["out"]  # noqa: ASYNC240


async def test_sft_and_dpo_exports_ignore_agent_corrections_and_live_sessions_in_training_groups(
    store: Store, tmp_path: Path
) -> None:
    """Corrections by agents are not exported, and a live session does not join a training group, even if it
    sets that group's id."""
    (call,) = await add_session(
        store, "live", ["live reply"], 1000.0, channel=Channel.LIVE, group_id=f"{RUN}/train/000000"
    )
    await store.add_feedback(Feedback("agent:live/1", "live", call.call_id, correction="from agent"))
    await store.add_feedback(Feedback("1", "live", call.call_id, correction="from human"))
    await export_all(store, tmp_path / "sft", format="sft", min_reward=2000.0)
    completions = (tmp_path / "sft" / "prompt_completion.jsonl").read_text()
    assert "from human" in completions
    assert "from agent" not in completions
    await export_all(store, tmp_path / "dpo", format="dpo")
    assert "live reply" not in (tmp_path / "dpo" / "pairs.jsonl").read_text()


async def test_export_size_grows_linearly_with_the_turns(store: Store, tmp_path: Path) -> None:
    """Twice as many turns take about twice as many bytes, even with tools."""
    sizes: list[int] = []
    for turns in (50, 100):
        await add_session(store, f"long-{turns}", ["word " * 20] * turns, 1.0)
        where = SessionFilter(ids=(f"long-{turns}",))
        await export_all(store, tmp_path / str(turns), where=where)
        sizes.append((tmp_path / str(turns) / "calls.jsonl").stat().st_size)
    assert 1.8 < sizes[1] / sizes[0] < 2.2
    calls = (tmp_path / "50" / "calls.jsonl").read_text().splitlines()
    assert [bool(json.loads(line)["tools"]) for line in calls] == [True] + [False] * 49


async def test_manifest_records_filters_counts_and_versions(store: Store, tmp_path: Path) -> None:
    where = SessionFilter(reward_min=0.5, channel=Channel.TRAIN)
    manifest = await export_all(store, tmp_path / "out", where=where)
    assert manifest.filters == {"channel": "train", "reward_min": 0.5}
    assert (manifest.counts["groups"], manifest.counts["sessions"], manifest.versions) == (3, 3, [0, 1, 2])
    assert manifest.policies[0]["name"] == "v000001"
    assert "/somewhere" not in (tmp_path / "out" / "manifest.json").read_text()


async def test_samples_table_has_one_flat_row_per_branch(store: Store, tmp_path: Path) -> None:
    await export_all(store, tmp_path / "out", include_samples=True)
    lines = (tmp_path / "out" / "samples.jsonl").read_text().split("\n")
    rows = [json.loads(line) for line in lines if line]
    (row,) = [row for row in rows if row["session_id"] == "s1-1"]
    assert row["sample_key"] == f"{RUN}/train/000001/1/0"
    assert row["token_ids"] == [1, 2, 8, 9, 11, 1, 3, 8, 9, 12]
    assert row["mask"] == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert row["logprobs"][0] is None
    assert row["versions"] == [-1, -1, 1, 1, 1, -1, -1, 1, 1, 1]
    assert row["reward"] == 1.0
    assert row["rewards"][0]["scorer"] == "math"
    assert [message["role"] for message in row["messages"]] == [
        "system", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


async def test_hf_export_is_loaded_by_the_datasets_package(store: Store, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    await export_all(store, tmp_path / "out", format="hf")
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    assert loaded["samples"][0]["token_ids"] == [1, 2, 7, 9, 11]
    assert loaded["sessions"].num_rows == 8


def test_columns_cover_every_field_of_sessions_and_calls() -> None:
    """A field that is added to a session or a call must also be exported."""
    assert {field.name for field in fields(Session)} <= TABLES["sessions"].keys()
    assert {field.name for field in fields(Call)} == TABLES["calls"].keys()


async def test_export_rejects_a_call_based_on_another_session(store: Store, tmp_path: Path) -> None:
    (base,) = await store.calls("s0-0")
    call = make_call("call", [4], [5], session_id="s0-1", base_id=base.call_id, base_tokens=0)
    await store.add_calls([call])
    with pytest.raises(DataError, match="based on call s0-0#0"):
        await export_all(store, tmp_path / "out")


async def test_exported_folder_has_the_default_mode(store: Store, tmp_path: Path) -> None:
    await export_all(store, tmp_path / "out")
    (tmp_path / "ordinary").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


class RecordingStore:
    """Wraps a store and records the sessions whose feedback is queried."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.queried_session_ids: list[str | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def feedback(self, run_id: str, *, session_id: str | None = None) -> list[Feedback]:
        self.queried_session_ids.append(session_id)
        return await self._store.feedback(run_id, session_id=session_id)


async def test_read_records_queries_feedback_per_session_for_small_exports(store: Store) -> None:
    recording = RecordingStore(store)
    session_ids = ["odd", "s0-0"]
    one_page = [record async for record in read_records(cast(Store, recording), RUN, session_ids)]
    assert recording.queried_session_ids == session_ids
    two_pages = [
        record async for record in read_records(cast(Store, recording), RUN, session_ids, page_size=1)
    ]
    assert recording.queried_session_ids[2:] == [None]
    for records in (one_page, two_pages):
        assert [[f.feedback_id for f in record.feedback] for record in records] == [["f1"], []]


async def test_dpo_export_contains_preferences_of_people(store: Store, tmp_path: Path) -> None:
    (call,) = await add_session(store, "a", ["first"], 0.0, channel=Channel.LIVE)
    (other,) = await add_session(store, "b", ["second"], 0.0, channel=Channel.LIVE)
    await store.add_feedback(Feedback("1", "a", call.call_id, preferred="other", other_call_id=other.call_id))
    await store.add_feedback(Feedback("2", "a", call.call_id, preferred="this", other_text="third"))
    await export_all(store, tmp_path / "dpo", format="dpo", where=SessionFilter(channel=Channel.LIVE))
    rows = [json.loads(line) for line in (tmp_path / "dpo" / "pairs.jsonl").read_text().splitlines()]
    replies = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows]
    assert replies == [("second", "first"), ("first", "third")]


async def test_dpo_export_without_held_out_sessions_has_no_preference_over_their_replies(
    store: Store, tmp_path: Path
) -> None:
    (call,) = await add_session(store, "held", ["first"], 0.0, channel=Channel.LIVE)
    assert is_held_out(call.messages)
    prompts = ((Message(role="user", content=f"question {number}"),) for number in count())
    prompt = next(prompt for prompt in prompts if not is_held_out(prompt))
    await insert_session(store, make_session("a", channel=Channel.LIVE))
    reply = Message(role="assistant", content="second")
    second = replace(call, call_id="a#1", session_id="a", request_id="a#1", reply=reply)
    await store.add_calls([make_call("a#0", [1], [2], session_id="a", messages=prompt), second])
    await store.end_session("a", SessionStatus.COMPLETED)
    await store.add_feedback(Feedback("1", "a", "a#1", preferred="this", other_call_id=call.call_id))
    for exclude in (False, True):
        folder = tmp_path / f"dpo-{exclude}"
        await export_all(store, folder, format="dpo", exclude_held_out=exclude)
        assert ('"first"' in (folder / "pairs.jsonl").read_text()) is not exclude
