"""Conversion between dataclasses and database rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import Enum
from operator import attrgetter
from typing import Any, Generic, TypeVar, get_type_hints

from instar.errors import StoreError
from instar.store.codec import DatabaseRow, dump_json, load_json, pack_ids, sanitize_text, unpack_ids
from instar.store.models import DatasetRow, KeyRow, Run
from instar.types import (
    Artifact,
    Channel,
    Claim,
    Endpoint,
    Feedback,
    Group,
    GroupStatus,
    Ids,
    Json,
    Policy,
    Reward,
    Score,
    Session,
    SessionStatus,
    Step,
    Tag,
    Task,
)

T = TypeVar("T")
Convert = Callable[[Any], Any]


class RowMapping(Generic[T]):
    """Converts a dataclass to a database row and back. The columns have the names of the fields.

    Enums, JSON objects and arrays are converted according to the type of their field. ``text`` lists the
    fields with text that may not be valid UTF-8. ``default_now`` is the timestamp field in which 0 is
    replaced with the current time.
    """

    def __init__(self, cls: type[T], *, text: Sequence[str] = (), default_now: str | None = None) -> None:
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # T is a dataclass
        hints = get_type_hints(cls)
        self._cls = cls
        self._names = names
        self._values: Callable[[T], tuple[Any, ...]] = attrgetter(*names)
        self._encoders: list[tuple[str, Convert]] = [(name, sanitize_text) for name in text]
        self._decoders: list[tuple[str, Convert]] = []
        for name in names:
            encode, decode = _converters(hints[name])
            if encode is not None and decode is not None:
                self._encoders.append((name, encode))
                self._decoders.append((name, decode))
        if default_now is not None:
            self._encoders.append((default_now, lambda value: value or time.time()))

    def encode(self, item: T) -> dict[str, Any]:
        row = dict(zip(self._names, self._values(item), strict=True))
        for name, convert in self._encoders:
            row[name] = convert(row[name])
        return row

    def decode(self, row: DatabaseRow) -> T:
        values = {name: row[name] for name in self._names}
        for name, convert in self._decoders:
            values[name] = convert(values[name])
        return self._cls(**values)


def _converters(hint: Any) -> tuple[Convert | None, Convert | None]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return attrgetter("value"), hint
    if hint == Json:
        return lambda value: dump_json(value) if value else "{}", load_json
    if hint == Ids | None:
        return _or_none(pack_ids), _or_none(unpack_ids)
    return None, None


def _or_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


RUN_ROWS = RowMapping(Run, text=["reason"])
SESSION_ROWS = RowMapping(Session, text=["reason", "external_id"], default_now="created_at")
REWARD_ROWS = RowMapping(Reward, default_now="created_at")
SCORE_ROWS = RowMapping(Score, text=["reason"], default_now="created_at")
TAG_ROWS = RowMapping(Tag, text=["value", "reason", "author"], default_now="created_at")
FEEDBACK_ROWS = RowMapping(Feedback, text=["text", "correction", "author"], default_now="created_at")
STEP_ROWS = RowMapping(Step, default_now="updated_at")
CLAIM_ROWS = RowMapping(Claim, text=["reason"])
ENDPOINT_ROWS = RowMapping(Endpoint, text=["doing"], default_now="heartbeat")
KEY_ROWS = RowMapping(KeyRow, default_now="created_at")
DATASET_ROWS = RowMapping(DatasetRow, default_now="created_at")


def encode_group(group: Group) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "run_id": group.run_id,
        "channel": group.channel.value,
        "idx": group.index,
        "size": group.size,
        "task_id": group.task.task_id,
        "task_data": dump_json(group.task.data),
        "status": group.status.value,
        "reason": sanitize_text(group.reason),
        "created_at": group.created_at or time.time(),
    }


def decode_group(row: DatabaseRow) -> Group:
    return Group(
        group_id=row["group_id"],
        run_id=row["run_id"],
        channel=Channel(row["channel"]),
        index=row["idx"],
        size=row["size"],
        task=Task(row["task_id"], load_json(row["task_data"])),
        status=GroupStatus(row["status"]),
        reason=row["reason"],
        created_at=row["created_at"],
    )


def encode_session(session: Session, key_hash: str | None) -> dict[str, Any]:
    row = SESSION_ROWS.encode(session)
    row["key_hash"] = key_hash
    if session.ended_at is None and session.status is not SessionStatus.OPEN:
        row["ended_at"] = time.time()
    return row


def encode_reward(reward: Reward) -> dict[str, Any]:
    """Return the row of a reward without run, agent and policy, which are taken from its session."""
    if not math.isfinite(reward.value):
        raise StoreError(f"Session {reward.session_id}: the reward is {reward.value}; it must be finite.")
    return REWARD_ROWS.encode(reward) | {"value": float(reward.value), "cost": float(reward.cost)}


def encode_claim(claim: Claim, step: int | None) -> dict[str, Any]:
    row = CLAIM_ROWS.encode(claim)
    row["step"] = step
    # NumPy scalars are accepted, but the database drivers cannot store them.
    for name, number in (("reward", float), ("advantage", float), ("staleness", int)):
        if (value := row[name]) is not None:
            if not math.isfinite(value):
                raise StoreError(f"The claim of {claim.sample_key} has {name} {value}; it must be finite.")
            row[name] = number(value)
    return row


def decode_policy(row: DatabaseRow) -> Policy:
    artifact = Artifact(row["artifact_kind"], row["artifact_path"], row["expires_at"])
    return Policy(row["policy_id"], row["version"], artifact)
