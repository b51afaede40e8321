"""Converts between dataclasses and database rows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from instar import types
from instar.column_types import ColumnType, FieldType, get_field_types, is_enum
from instar.errors import StoreError
from instar.store import codec
from instar.store.codec import DatabaseRow, dump_json, sanitize_text
from instar.store.database import Database, Values
from instar.store.models import (
    DatasetRow,
    Evaluation,
    EvaluationItem,
    ForgottenSession,
    KeyRow,
    Run,
    ShadowReply,
    StoredReply,
    TrainedSession,
)

T = TypeVar("T")
Converter = Callable[[Any], Any]
Converters = tuple[Converter, Converter]
"""The functions that encode and decode the values of a column."""


class RowMapping(Generic[T]):
    """Converts a dataclass to a database row and back. Columns have the same names as fields.

    Enums, JSON objects and arrays are converted according to the type of their field. ``text`` lists the
    fields whose text may need `sanitize_text`. ``default_now`` is a timestamp field in which 0 is replaced
    with the current time. ``excluded`` fields are not converted; the caller passes their values to `decode`.
    ``converters`` overrides the conversion of individual fields.
    """

    def __init__(
        self,
        cls: type[T],
        *,
        text: Sequence[str] = (),
        default_now: str | None = None,
        excluded: Sequence[str] = (),
        converters: Mapping[str, Converters] | None = None,
    ) -> None:
        field_types = {
            name: field_type for name, field_type in get_field_types(cls).items() if name not in excluded
        }
        self.names = list(field_types)
        self.encoders: dict[str, Converter] = dict.fromkeys(text, sanitize_text)
        self._cls = cls
        self._get_values: Callable[[T], tuple[Any, ...]] = attrgetter(*field_types)
        self._decoders: dict[str, Converter] = {}
        defaults = {name: make_converters(field_type) for name, field_type in field_types.items()}
        for name, pair in {**defaults, **(converters or {})}.items():
            if pair is not None:
                self.encoders[name], self._decoders[name] = pair
        if default_now is not None:
            self.encoders[default_now] = lambda timestamp: timestamp or time.time()

    def encode(self, item: T) -> dict[str, Any]:
        row = dict(zip(self.names, self._get_values(item), strict=True))
        for name, convert in self.encoders.items():
            row[name] = convert(row[name])
        return row

    def decode(self, row: DatabaseRow, **excluded: Any) -> T:
        values = {name: row[name] for name in self.names}
        for name, convert in self._decoders.items():
            values[name] = convert(values[name])
        values |= excluded
        return self._cls(**values)

    def select(self, db: Database, sql: str, values: Values = ()) -> list[T]:
        return [self.decode(row) for row in db.execute(sql, values)]

    def select_one(self, db: Database, sql: str, values: Values) -> T | None:
        row = db.execute(sql, values).fetchone()
        return self.decode(row) if row else None


def match_columns(**columns: Any) -> tuple[str, list[Any]]:
    """Return a SQL condition and its values that require the value of every column that is not None."""
    required = {name: value for name, value in columns.items() if value is not None}
    return " AND ".join(f"{name} = ?" for name in required), list(required.values())


def make_converters(field_type: FieldType) -> Converters | None:
    """Return the functions that encode and decode a field's values, or None if they are stored unchanged."""
    converters = _make_non_null_converters(field_type)
    if converters is None or not field_type.is_optional:
        return converters
    encode, decode = converters
    return (
        lambda value: None if value is None else encode(value),
        lambda value: None if value is None else decode(value),
    )


def _make_non_null_converters(field_type: FieldType) -> Converters | None:
    python_type = field_type.python_type
    if is_enum(python_type):
        # Much faster than accessing `value` and calling the enum.
        return attrgetter("_value_"), {member.value: member for member in python_type}.__getitem__
    match field_type.column:
        case ColumnType.BOOL:
            return int, bool
        case ColumnType.IDS:
            return codec.pack_ids, codec.unpack_ids
        case ColumnType.FLOATS:
            return codec.pack_floats, codec.unpack_floats
        case ColumnType.JSON if python_type == types.Json:
            return lambda value: dump_json(value) if value else "{}", json.loads
        case ColumnType.JSON if isinstance(python_type, type) and issubclass(python_type, msgspec.Struct):
            return codec.dump_message, msgspec.json.Decoder(python_type).decode
        case ColumnType.JSON:
            return codec.dump_message, codec.load_message
        case _:
            return None


RUN_ROWS = RowMapping(Run, text=["reason"])
GROUP_ROWS = RowMapping(types.Group, text=["reason"], default_now="created_at", excluded=["index", "task"])
SESSION_ROWS = RowMapping(types.Session, text=["reason", "external_id"], default_now="created_at")
REWARD_ROWS = RowMapping(types.Reward, default_now="created_at")
SCORE_ROWS = RowMapping(types.Score, text=["reason"], default_now="created_at")
TAG_ROWS = RowMapping(types.Tag, text=["value", "reason", "author"], default_now="created_at")
REPLY_ROWS = RowMapping(StoredReply)
SHADOW_ROWS = RowMapping(ShadowReply, default_now="created_at")
FEEDBACK_ROWS = RowMapping(
    types.Feedback, text=["text", "correction", "author", "other_text"], default_now="created_at"
)
FORGOTTEN_ROWS = RowMapping(ForgottenSession)
TRAINED_ROWS = RowMapping(TrainedSession)
STEP_ROWS = RowMapping(types.Step, default_now="updated_at")
CLAIM_ROWS = RowMapping(types.Claim, text=["reason"])
EVALUATION_ROWS = RowMapping(Evaluation, text=["reason"])
EVALUATION_ITEM_ROWS = RowMapping(EvaluationItem, default_now="created_at")
ENDPOINT_ROWS = RowMapping(types.Endpoint, text=["doing"], default_now="heartbeat")
KEY_ROWS = RowMapping(KeyRow, default_now="created_at")
DATASET_ROWS = RowMapping(DatasetRow, default_now="created_at")


def encode_group(group: types.Group) -> dict[str, Any]:
    return {
        **GROUP_ROWS.encode(group),
        "idx": group.index,
        "task_id": group.task.task_id,
        "task_data": dump_json(group.task.data),
    }


def decode_group(row: DatabaseRow) -> types.Group:
    task = types.Task(row["task_id"], json.loads(row["task_data"]))
    return GROUP_ROWS.decode(row, index=row["idx"], task=task)


def encode_session(session: types.Session, key_hash: str | None) -> dict[str, Any]:
    row = SESSION_ROWS.encode(session)
    row["key_hash"] = key_hash
    if session.ended_at is None and session.status is not types.SessionStatus.OPEN:
        row["ended_at"] = time.time()
    return row


def encode_reward(reward: types.Reward) -> dict[str, Any]:
    """Encode a reward without run, agent and policy, which are taken from its session."""
    if not math.isfinite(reward.value):
        raise StoreError(f"session {reward.session_id}: the reward must be finite, got {reward.value}")
    return REWARD_ROWS.encode(reward) | {"value": float(reward.value), "cost": float(reward.cost)}


def encode_claim(claim: types.Claim, step: int | None) -> dict[str, Any]:
    row = CLAIM_ROWS.encode(claim)
    row |= {"step": step, "policy_id": claim.policy_id or claim.run_id}
    # Convert NumPy scalars, which the database drivers cannot store.
    for name, convert in (("reward", float), ("advantage", float), ("staleness", int)):
        if (value := row[name]) is not None:
            if not math.isfinite(value):
                raise StoreError(f"sample {claim.sample_key}: {name} must be finite, got {value}")
            row[name] = convert(value)
    return row
