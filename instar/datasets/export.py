"""Exports sessions from a store to a folder that is created atomically."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from instar import __version__
from instar.datasets.columns import CONTENT_TABLES, ExportRow, TableName
from instar.datasets.conversations import (
    ConversationWriter,
    build_dpo_rows,
    build_preference_rows,
    build_sft_rows,
)
from instar.datasets.files import WRITERS
from instar.datasets.manifest import IMPORTABLE_FORMATS, ContentHash, DatasetManifest, Format
from instar.datasets.records import encode_group, encode_record
from instar.errors import ConfigError, DataError
from instar.live.base import find_held_out
from instar.store.base import SessionFilter, SessionRecord, Store
from instar.types import Call, Channel, Feedback, Group, Json, Sample, Session, SessionStatus

SESSIONS_PER_PAGE = 256
EVERYTHING = SessionFilter()
SESSION_FIELDS = ("session_id", "group_id", "task_id", "policy_id")
SAMPLE_FIELDS = ("sample_key", "token_ids", "mask", "logprobs", "behavior_logprobs", "versions")
"""The columns of the table `samples` that are fields of the session and of the sample."""

ProgressCallback = Callable[[int, int], object]
"""Called with the number of processed sessions (in a `dpo` export: groups) and their total number."""


@dataclass(frozen=True, slots=True)
class ExportHooks:
    """Functions from `instar.data`, passed in because packages import each other only through `base`."""

    build_samples: Callable[[Session, Sequence[Call]], list[Sample]]
    combine_rewards: Callable[[SessionRecord], float | None]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    format: Format = "jsonl"
    where: SessionFilter = EVERYTHING
    include_samples: bool = False
    """Also write the flat `samples` table. `hf` exports always have it; `sft` and `dpo` exports never do."""
    min_reward: float | None = None
    """The minimum reward of a session in an `sft` export. None means any reward above 0."""
    include_open: bool = False
    """Also export open sessions, as they are now. They are exported too if `where.status` is open."""
    exclude_held_out: bool = False
    """Leave out the live sessions that evaluate candidates, so that nobody trains on them."""
    margin: float = 0.0
    """The rewards of the chosen and the rejected session of a `dpo` pair must differ by more than this."""

    @property
    def tables(self) -> tuple[TableName, ...]:
        return (*CONTENT_TABLES, "samples") if self.include_samples or self.format == "hf" else CONTENT_TABLES

    @property
    def exports_open(self) -> bool:
        return self.include_open or self.where.status is SessionStatus.OPEN

    def describe(self) -> Json:
        """Return the filters and format options that are set, for the manifest."""
        defaults = asdict(EVERYTHING)
        options = {name: value for name, value in asdict(self.where).items() if value != defaults[name]}
        if self.include_open:
            options["open"] = True
        if self.exclude_held_out:
            options["held_out"] = False
        if self.format == "sft" and self.min_reward is not None:
            options["sft_min_reward"] = self.min_reward
        if self.format == "dpo":
            options["dpo_margin"] = self.margin
        return options


def check_target(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} already exists; choose a different folder")


@contextmanager
def _create_folder_atomically(folder: Path) -> Generator[Path]:
    """Yield a temporary folder. Rename it to ``folder`` if the ``with`` block succeeds, or else delete it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as parent:
        new_folder = Path(parent) / "data"
        new_folder.mkdir()
        yield new_folder
        check_target(folder)
        new_folder.rename(folder)


async def export_sessions(
    store: Store,
    run_id: str,
    folder: Path,
    options: ExportOptions,
    hooks: ExportHooks,
    *,
    store_type: str,
    progress: ProgressCallback | None = None,
) -> DatasetManifest:
    """Write a run's sessions that match the filters to a new folder, and return its manifest. Two
    exports of the same data by the same version of Instar are identical. Raises ConfigError if the folder
    exists, and DataError if there is nothing to export."""
    check_target(folder)
    if options.where.channel is Channel.DATA:
        raise ConfigError("channel: imported training data cannot be exported; use its original dataset")
    group_by_session = await _select_sessions(store, run_id, options)
    if not group_by_session:
        problem = f"nothing to export: no ended session of run {run_id} matches the filters"
        raise DataError(problem + ("" if options.exports_open else "; --open also exports open sessions"))
    export = _Export(store, run_id, group_by_session, options, hooks, progress)
    with _create_folder_atomically(folder) as new_folder:
        is_importable = options.format in IMPORTABLE_FORMATS
        digest = await (export.write_tables if is_importable else export.write_conversations)(new_folder)
        manifest = DatasetManifest(
            format=options.format,
            run=run_id,
            store=store_type,
            filters=options.describe(),
            counts=dict(export.counts),
            hash=digest,
            policies=await _read_policies(store, run_id),
            versions=sorted(version for version in export.versions if version >= 0),
            instar=__version__,
        )
        manifest.write(new_folder)
    return manifest


async def _select_sessions(store: Store, run_id: str, options: ExportOptions) -> dict[str, str | None]:
    """Return the group id of each matching session by session id, oldest session first. Imported training
    data, by default open sessions, and with ``exclude_held_out`` held-out sessions are excluded. A live
    session gets None, even if it has a group id."""
    group_by_session: dict[str, str | None] = {}
    last_seq = 0
    while rows := await store.sessions(run_id, where=options.where, after=last_seq, limit=SESSIONS_PER_PAGE):
        last_seq = rows[-1].seq
        if options.exclude_held_out:
            held_out = await find_held_out(store, [row.session for row in rows])
            rows = [row for row in rows if row.session.session_id not in held_out]
        for row in rows:
            session = row.session
            is_status_exported = options.exports_open or session.status is not SessionStatus.OPEN
            if is_status_exported and session.channel is not Channel.DATA:
                is_live = session.channel is Channel.LIVE
                group_by_session[session.session_id] = None if is_live else session.group_id
    return group_by_session


@dataclass(slots=True)
class _Export:
    store: Store
    run_id: str
    group_by_session: dict[str, str | None]
    """The group id of each exported session, or None for a session without a group, by session id."""
    options: ExportOptions
    hooks: ExportHooks
    progress: ProgressCallback | None
    counts: Counter[str] = field(default_factory=Counter[str])
    versions: set[int] = field(default_factory=set[int])

    async def write_tables(self, folder: Path) -> str:
        """Write the tables and return the hash of the content tables."""
        digest = ContentHash()
        with closing(WRITERS[self.options.format](folder, self.options.tables)) as writer:

            def add(table: TableName, row: ExportRow) -> None:
                writer.add(table, row, digest.add(table, row))

            for group in await self._read_groups():
                add("groups", encode_group(group))
                self.counts["groups"] += 1
            async for record in self._read_records():
                row, calls = encode_record(record)
                add("sessions", row)
                for call in calls:
                    add("calls", call)
                self.counts["sessions"] += 1
                self.counts["calls"] += len(calls)
                self.counts["sampled_tokens"] += sum(len(call.sampled_ids) for call in record.calls)
                for call in record.calls:
                    self.versions.update(np.unique(call.versions).tolist())
                if "samples" in self.options.tables:
                    for sample in build_sample_rows(record, self.hooks):
                        add("samples", sample)
                        self.counts["samples"] += 1
            writer.finish()
        return digest.hexdigest(*CONTENT_TABLES)

    def _read_records(self) -> AsyncIterator[SessionRecord]:
        return read_records(self.store, self.run_id, list(self.group_by_session), self.progress)

    async def _read_groups(self) -> list[Group]:
        """Return the groups of the sessions or, if there is no filter, all groups, even without sessions."""
        where = self.options.where
        group_ids = set(self.group_by_session.values())
        channels = [where.channel] if where.channel else [c for c in Channel if c is not Channel.DATA]
        groups = [group for channel in channels for group in await self.store.groups(self.run_id, channel)]
        return [group for group in groups if where == EVERYTHING or group.group_id in group_ids]

    async def write_conversations(self, folder: Path) -> str:
        """Write the rows for SFT or DPO and return their hash. Raises DataError if there are none."""
        writer = ConversationWriter(folder)
        if self.options.format == "sft":
            async for record in self._read_records():
                rows = build_sft_rows(record, self.hooks.combine_rewards(record), self.options.min_reward)
                writer.add(**rows)
                self.counts["sessions"] += any(rows.values())
                self.counts["rows"] += len(rows["completions"])
        else:
            await self._write_pairs(writer)
        writer.close()
        if self.counts["rows"]:
            return writer.digest
        if self.options.format == "sft":
            minimum = self.options.min_reward
            required = "above 0" if minimum is None else f"of at least {minimum:g}"
            problem = f"no completed session has a reward {required}; lower the minimum"
        else:
            problem = "there is no preference, and no group has two completed sessions with the same prompt "
            problem += f"whose rewards differ by more than {self.options.margin:g}"
        raise DataError(f"nothing to export: {problem}")

    async def _write_pairs(self, writer: ConversationWriter) -> None:
        sessions_by_group: dict[str, list[str]] = {}
        for session_id, group_id in self.group_by_session.items():
            if group_id is not None:
                sessions_by_group.setdefault(group_id, []).append(session_id)
        for number, session_ids in enumerate(sessions_by_group.values(), 1):
            records = [record async for record in read_records(self.store, self.run_id, session_ids)]
            rewarded = [(record, self.hooks.combine_rewards(record)) for record in records]
            pairs = build_dpo_rows(rewarded, self.options.margin)
            writer.add(pairs=pairs)
            self.counts["rows"] += len(pairs)
            if self.progress is not None:
                self.progress(number, len(sessions_by_group))
        await self._write_preferences(writer)

    async def _write_preferences(self, writer: ConversationWriter) -> None:
        """Write the pairs of which people preferred one reply."""
        compared = [item for item in await self.store.feedback(self.run_id) if item.preferred is not None]
        for session_id in sorted({item.session_id for item in compared} & set(self.group_by_session)):
            others: dict[str, Call] = {}
            for item in compared:
                if item.session_id == session_id and item.other_call_id is not None:
                    other = await self.store.call(item.other_call_id)
                    session = None if other is None else await self.store.session(other.session_id)
                    if other is None or session is None:
                        continue
                    if not self.options.exclude_held_out or not await find_held_out(self.store, [session]):
                        others[other.call_id] = other
            async for record in read_records(self.store, self.run_id, [session_id]):
                pairs = build_preference_rows(record, others)
                writer.add(pairs=pairs)
                self.counts["rows"] += len(pairs)


async def read_records(
    store: Store,
    run_id: str,
    session_ids: Sequence[str],
    progress: ProgressCallback | None = None,
    *,
    page_size: int = SESSIONS_PER_PAGE,
) -> AsyncIterator[SessionRecord]:
    """Yield the records in the order of ``session_ids``. Sessions that were deleted meanwhile are skipped."""
    feedback = await _read_feedback(store, run_id, session_ids, page_size)
    done = 0
    for start in range(0, len(session_ids), page_size):
        page = session_ids[start : start + page_size]
        rewards = await store.rewards_by_session(page)
        scores = await store.scores(page)
        tags = await store.tags(page)
        for session_id in page:
            calls = await store.calls(session_id)
            # Read last: if the session still exists, all its data was read before it could be deleted.
            if (session := await store.session(session_id)) is None:
                continue
            yield SessionRecord(
                session=session,
                calls=tuple(calls),
                rewards=tuple(rewards[session_id]),
                scores=tuple(scores[session_id]),
                tags=tuple(tags[session_id]),
                feedback=tuple(feedback.get(session_id, ())),
            )
            done += 1
            if progress is not None:
                progress(done, len(session_ids))


async def _read_feedback(
    store: Store, run_id: str, session_ids: Sequence[str], page_size: int
) -> dict[str, list[Feedback]]:
    # For a few sessions, one query each is cheaper than reading the feedback of the entire run.
    if len(session_ids) <= page_size:
        return {session_id: await store.feedback(run_id, session_id=session_id) for session_id in session_ids}
    feedback: dict[str, list[Feedback]] = {}
    for item in await store.feedback(run_id):
        feedback.setdefault(item.session_id, []).append(item)
    return feedback


async def _read_policies(store: Store, run_id: str) -> list[Json]:
    return [
        {
            "policy_id": policy.policy_id,
            "version": policy.version,
            "step": step,
            "kind": policy.artifact.kind,
            "name": Path(policy.artifact.path).name,
        }
        for policy_id in await store.policy_ids(run_id)
        for policy, step in await store.published_policies(policy_id)
    ]


def build_sample_rows(record: SessionRecord, hooks: ExportHooks) -> Iterator[ExportRow]:
    session = record.session
    by_id = {call.call_id: call for call in record.calls}
    row, _ = encode_record(record)
    for sample in hooks.build_samples(session, record.calls):
        leaf = by_id[sample.spans[-1].call_id]
        yield {
            **{name: getattr(session, name) for name in SESSION_FIELDS},
            **{name: getattr(sample, name) for name in SAMPLE_FIELDS},
            "messages": [*leaf.messages, leaf.reply],
            "tools": list(leaf.tools),
            "reward": hooks.combine_rewards(record),
            "rewards": row["rewards"],
        }
