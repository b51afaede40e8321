"""Encodes groups and sessions as export rows, and decodes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from instar.column_types import ColumnType, FieldType, get_field_types, is_enum
from instar.datasets.columns import ExportRow, to_id_array
from instar.errors import DataError
from instar.store.base import SessionRecord
from instar.types import Call, Feedback, Group, Message, Reward, Score, Session, Tag, Task, Tool

T = TypeVar("T", Group, Session, Call, Reward, Score, Tag, Feedback)
ANNOTATION_TYPES: dict[str, Any] = {"rewards": Reward, "scores": Score, "tags": Tag, "feedback": Feedback}
"""The types of the annotations in a session row, by column."""


def _encode_fields(item: Group | Session | Call) -> ExportRow:
    row: ExportRow = {field.name: getattr(item, field.name) for field in fields(item)}
    return {
        name: msgspec.to_builtins(value) if isinstance(value, Enum | msgspec.Struct) else value
        for name, value in row.items()
    }


def _decode_fields(cls: type[T], row: Mapping[str, Any], **decoded: Any) -> T:
    """Create a dataclass from a row. Values in ``decoded`` take precedence over those in the row."""
    values = {
        name: _decode_value(field_type, row[name])
        for name, field_type in _get_cached_field_types(cls).items()
        if name in row and name not in decoded
    }
    return cls(**values, **decoded)


_get_cached_field_types = cache(get_field_types)


def _decode_value(field_type: FieldType, value: Any) -> Any:
    if value is None:
        return None
    if is_enum(field_type.python_type):
        return field_type.python_type(value)
    if field_type.column is ColumnType.IDS and isinstance(value, list):
        return to_id_array(cast(list[int], value))
    if isinstance(field_type.python_type, type) and issubclass(field_type.python_type, msgspec.Struct):
        return msgspec.convert(value, field_type.python_type)
    return value


def encode_group(group: Group) -> ExportRow:
    return _encode_fields(group) | {"task_id": group.task.task_id, "task": group.task.data}


def decode_group(row: ExportRow) -> Group:
    return _decode_fields(Group, row, task=Task(row["task_id"], row["task"]))


def encode_record(record: SessionRecord) -> tuple[ExportRow, list[ExportRow]]:
    """Return the session row and the call rows. Raises DataError if a call's base is not in the session."""
    row = _encode_fields(record.session) | {
        "calls": len(record.calls),
        **{name: list(map(_encode_annotation, getattr(record, name))) for name in ANNOTATION_TYPES},
    }
    calls_by_id = {call.call_id: call for call in record.calls}
    return row, [_encode_call(call, calls_by_id) for call in record.calls]


def _encode_annotation(annotation: Reward | Score | Tag | Feedback) -> ExportRow:
    row: ExportRow = {field.name: getattr(annotation, field.name) for field in fields(annotation)}
    del row["session_id"]
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


def _encode_call(call: Call, calls_by_id: Mapping[str, Call]) -> ExportRow:
    base = None
    if call.base_id is not None and (base := calls_by_id.get(call.base_id)) is None:
        raise DataError(
            f"call {call.call_id} is based on call {call.base_id}, which is not in its session "
            f"{call.session_id}"
        )
    return _encode_fields(call) | {
        "prompt_ids": call.prompt_ids[call.base_tokens :],
        "messages": list(call.messages[call.base_messages :]),
        "tools": None if base is not None and base.tools == call.tools else list(call.tools),
    }


def decode_record(row: ExportRow, call_rows: Sequence[ExportRow]) -> SessionRecord:
    """Decode rows returned by `encode_record`. Raises DataError if the call rows are inconsistent."""
    session_id = row["session_id"]
    calls_by_id: dict[str, Call] = {}
    for call_row in call_rows:
        if call_row["session_id"] != session_id:
            raise DataError(
                f"call {call_row['call_id']} belongs to session {call_row['session_id']}, but it is listed "
                f"with the calls of session {session_id}; export the data again"
            )
        call = _decode_call(call_row, calls_by_id)
        calls_by_id[call.call_id] = call
    annotations: dict[str, Any] = {
        name: tuple(_decode_fields(cls, values, session_id=session_id) for values in row[name])
        for name, cls in ANNOTATION_TYPES.items()
    }
    return SessionRecord(_decode_fields(Session, row), tuple(calls_by_id.values()), **annotations)


def _decode_call(row: ExportRow, calls_by_id: Mapping[str, Call]) -> Call:
    prompt, messages = row["prompt_ids"], tuple[Message, ...](row["messages"])
    tools: tuple[Tool, ...] = tuple(row["tools"] or ())
    if row["base_id"] is not None:
        base = calls_by_id.get(row["base_id"])
        if base is None:
            raise DataError(
                f"call {row['call_id']} is based on call {row['base_id']}, which does not precede it in the "
                "session; export the data again"
            )
        prompt = np.concatenate([base.sequence[: row["base_tokens"]], prompt])
        messages = (*base.messages, base.reply)[: row["base_messages"]] + messages
        tools = base.tools if row["tools"] is None else tools
    return _decode_fields(Call, row, prompt_ids=prompt, messages=messages, tools=tools)
