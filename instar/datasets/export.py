"""Out of a store, into a folder that appears when it is whole."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from instar import __version__
from instar.datasets.columns import CONTENT_TABLES, ExportRow, TableName
from instar.datasets.conversations import ConversationWriter, dpo_rows, sft_rows
from instar.datasets.files import WRITERS
from instar.datasets.manifest import IMPORTABLE_FORMATS, ContentHash, DatasetManifest, Format
from instar.datasets.records import encode_group, encode_record
from instar.errors import ConfigError, DataError
from instar.store.base import SessionFilter, SessionRecord, Store
from instar.types import Call, Channel, Feedback, Group, Json, Sample, Session, SessionStatus

PAGE = 256
EVERYTHING = SessionFilter()

ProgressCallback = Callable[[int, int], object]
"""Told how many sessions are written, and of how many."""


@dataclass(frozen=True, slots=True)
class ExportHooks:
    """How a session is read for training; given by whoever composes the rooms."""

    samples: Callable[[Session, Sequence[Call]], list[Sample]]
    reward: Callable[[SessionRecord], float | None]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export, and how."""

    format: Format = "jsonl"
    where: SessionFilter = EVERYTHING
    samples: bool = False
    """Beside the whole formats, the flat view."""
    min_reward: float | None = None
    """Of `sft`: the least that a session's reward must be."""
    margin: float = 0.0
    """Of `dpo`: how much more than the rejected one's the reward of the chosen one must be."""

    @property
    def tables(self) -> tuple[TableName, ...]:
        return (*CONTENT_TABLES, "samples") if self.samples or self.format == "hf" else CONTENT_TABLES

    def describe(self) -> Json:
        """What was asked for, without what is as by default."""
        usual = asdict(EVERYTHING)
        given = {name: value for name, value in asdict(self.where).items() if value != usual[name]}
        if self.format == "sft" and self.min_reward is not None:
            given["sft_min_reward"] = self.min_reward
        if self.format == "dpo":
            given["dpo_margin"] = self.margin
        return given


@dataclass(slots=True)
class _ExportCounts:
    counts: dict[str, int] = field(default_factory=dict[str, int])
    versions: set[int] = field(default_factory=set[int])

    def add(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    def count_record(self, record: SessionRecord) -> None:
        self.add("sessions")
        self.add("calls", len(record.calls))
        self.add("sampled_tokens", sum(len(call.sampled_ids) for call in record.calls))
        for call in record.calls:
            self.versions.update(np.unique(call.versions).tolist())


def check_target(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists, and nothing is written over: name another folder")


@contextmanager
def _atomic_folder(folder: Path) -> Generator[Path]:
    """A folder to write to, which takes its name when all is well, and is gone otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as held:
        fresh = Path(held) / "data"
        fresh.mkdir()
        yield fresh
        check_target(folder)
        fresh.rename(folder)


async def export_sessions(
    store: Store,
    run_id: str,
    folder: Path,
    options: ExportOptions,
    hooks: ExportHooks,
    *,
    store_kind: str,
    progress: ProgressCallback | None = None,
) -> DatasetManifest:
    """Write the sessions of a run that have ended. The same data gives the same folder."""
    check_target(folder)
    if options.where.channel is Channel.DATA:
        raise ConfigError("channel: sessions of the data channel came from an export; take that one")
    chosen = await _select_sessions(store, run_id, options.where)
    if not chosen:
        raise DataError(f"no session of run {run_id} that has ended is as asked for: nothing to export")
    with _atomic_folder(folder) as fresh:
        if options.format in IMPORTABLE_FORMATS:
            tally, digest = await _write_tables(store, run_id, fresh, chosen, options, hooks, progress)
        else:
            tally, digest = await _write_conversations(store, run_id, fresh, chosen, options, hooks, progress)
        run = await store.run(run_id)
        manifest = DatasetManifest(
            format=options.format,
            run=run_id,
            store=store_kind,
            filters=options.describe(),
            counts=tally.counts,
            hash=digest,
            policies=await _policies(store, run.policy_id if run else run_id),
            versions=sorted(version for version in tally.versions if version >= 0),
            instar=__version__,
        )
        manifest.write(fresh)
    return manifest


@dataclass(frozen=True, slots=True)
class _SelectedSession:
    session_id: str
    group_id: str | None


async def _select_sessions(store: Store, run_id: str, where: SessionFilter) -> list[_SelectedSession]:
    """In the order in which they were opened. What is under way is left out, and what came from an export."""
    chosen: list[_SelectedSession] = []
    last = 0
    while rows := await store.sessions(run_id, where=where, after=last, limit=PAGE):
        last = rows[-1].seq
        for row in rows:
            session = row.session
            if session.status is not SessionStatus.OPEN and session.channel is not Channel.DATA:
                chosen.append(_SelectedSession(session.session_id, session.group_id))
    return chosen


async def read_records(
    store: Store, run_id: str, session_ids: Sequence[str], progress: ProgressCallback | None = None
) -> AsyncIterator[SessionRecord]:
    """In the order given."""
    feedback = await _feedback(store, run_id, session_ids)
    done = 0
    for start in range(0, len(session_ids), PAGE):
        page = session_ids[start : start + PAGE]
        rewards, scores, tags = (
            await store.rewards_by_session(page),
            await store.scores(page),
            await store.tags(page),
        )
        for session_id in page:
            session = await store.session(session_id)
            assert session is not None, "sessions are never removed"
            yield SessionRecord(
                session=session,
                calls=tuple(await store.calls(session_id)),
                rewards=tuple(rewards[session_id]),
                scores=tuple(scores[session_id]),
                tags=tuple(tags[session_id]),
                feedback=tuple(feedback.get(session_id, ())),
            )
            done += 1
            if progress is not None:
                progress(done, len(session_ids))


async def _feedback(store: Store, run_id: str, session_ids: Sequence[str]) -> dict[str, list[Feedback]]:
    """Of few sessions one by one: all of the run's may be much more."""
    if len(session_ids) <= PAGE:
        return {each: await store.feedback(run_id, session_id=each) for each in session_ids}
    feedback: dict[str, list[Feedback]] = {}
    for given in await store.feedback(run_id):
        feedback.setdefault(given.session_id, []).append(given)
    return feedback


async def _groups(
    store: Store, run_id: str, chosen: Iterable[_SelectedSession], where: SessionFilter
) -> list[Group]:
    """Those of the sessions; where all sessions are asked for, also groups without any."""
    named = {each.group_id for each in chosen}
    channels = [where.channel] if where.channel else [c for c in Channel if c is not Channel.DATA]
    found = [group for channel in channels for group in await store.groups(run_id, channel)]
    return [group for group in found if where == EVERYTHING or group.group_id in named]


async def _policies(store: Store, policy_id: str) -> list[Json]:
    return [
        {
            "policy_id": policy.policy_id,
            "version": policy.version,
            "step": step,
            "kind": policy.artifact.kind,
            "name": Path(policy.artifact.path).name,
        }
        for policy, step in await store.published_policies(policy_id)
    ]


async def _write_tables(
    store: Store,
    run_id: str,
    folder: Path,
    chosen: Sequence[_SelectedSession],
    wanted: ExportOptions,
    views: ExportHooks,
    progress: ProgressCallback | None,
) -> tuple[_ExportCounts, str]:
    tally, digest = _ExportCounts(), ContentHash()
    with WRITERS[wanted.format](folder, wanted.tables) as writer:

        def add(table: TableName, row: ExportRow) -> None:
            writer.add(table, row, digest.add(table, row))

        for group in await _groups(store, run_id, chosen, wanted.where):
            add("groups", encode_group(group))
            tally.add("groups")
        async for record in read_records(store, run_id, [each.session_id for each in chosen], progress):
            row, calls = encode_record(record)
            add("sessions", row)
            for call in calls:
                add("calls", call)
            tally.count_record(record)
            if "samples" in wanted.tables:
                for sample in sample_rows(record, views):
                    add("samples", sample)
                    tally.add("samples")
        writer.finish()
    return tally, digest.hexdigest(*CONTENT_TABLES)


def sample_rows(record: SessionRecord, views: ExportHooks) -> Iterator[ExportRow]:
    session = record.session
    by_id = {call.call_id: call for call in record.calls}
    row, _ = encode_record(record)
    for sample in views.samples(session, record.calls):
        leaf = by_id[sample.spans[-1].call_id]
        yield {
            "sample_key": sample.sample_key,
            "session_id": session.session_id,
            "group_id": session.group_id,
            "task_id": session.task_id,
            "policy_id": session.policy_id,
            "messages": [*leaf.messages, leaf.reply],
            "tools": list(leaf.tools),
            "token_ids": sample.token_ids,
            "mask": sample.mask,
            "logprobs": sample.logprobs,
            "behavior_logprobs": sample.behavior_logprobs,
            "versions": sample.versions,
            "reward": views.reward(record),
            "rewards": row["rewards"],
        }


async def _write_conversations(
    store: Store,
    run_id: str,
    folder: Path,
    chosen: Sequence[_SelectedSession],
    wanted: ExportOptions,
    views: ExportHooks,
    progress: ProgressCallback | None,
) -> tuple[_ExportCounts, str]:
    """For dpo, group by group: a pair is of one group."""
    tally, form = _ExportCounts(), ConversationWriter(folder)
    if wanted.format == "sft":
        async for record in read_records(store, run_id, [each.session_id for each in chosen], progress):
            rows = sft_rows(record, views.reward(record), wanted.min_reward)
            form.add(**rows)
            tally.add("sessions", bool(any(rows.values())))
            tally.add("rows", len(rows["completions"]))
    else:
        together: dict[str, list[str]] = {}
        for each in chosen:
            if each.group_id is not None:
                together.setdefault(each.group_id, []).append(each.session_id)
        for number, members in enumerate(together.values(), 1):
            records = [record async for record in read_records(store, run_id, members)]
            pairs = dpo_rows([(record, views.reward(record)) for record in records], wanted.margin)
            form.add(pairs=pairs)
            tally.add("rows", len(pairs))
            if progress is not None:
                progress(number, len(together))
    form.close()
    if not tally.counts.get("rows"):
        raise DataError(_NOTHING[wanted.format])
    return tally, form.digest


_NOTHING: dict[Any, str] = {
    "sft": "no session has a reward that high, so there is nothing to imitate: nothing is written",
    "dpo": "no group has two sessions that begin alike and differ enough in reward: nothing is written",
}
