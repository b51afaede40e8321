"""The columns of the exported tables, and rows as lines of canonical JSON. An export has three content
tables: groups, sessions and calls. A session row contains the number of the session's calls; call rows are in
the same order as their sessions. As in a store, a call row contains only the part after its base call, so the
size of a session does not depend on the total length of its prompts."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from instar.column_types import ColumnType, get_columns
from instar.errors import DataError
from instar.types import Call, Floats, Group, Ids, Json, Session

ExportRow = dict[str, Any]
"""Values by column name: text, numbers, arrays, bytes, or any JSON value."""
TableName = Literal["groups", "sessions", "calls", "samples"]
Columns = dict[str, ColumnType]

SAMPLES: Columns = {
    "sample_key": ColumnType.TEXT,
    "session_id": ColumnType.TEXT,
    "group_id": ColumnType.TEXT,
    "task_id": ColumnType.TEXT,
    "policy_id": ColumnType.TEXT,
    "messages": ColumnType.JSON,
    "tools": ColumnType.JSON,
    "token_ids": ColumnType.IDS,
    "mask": ColumnType.FLOATS,
    "logprobs": ColumnType.FLOATS,
    "behavior_logprobs": ColumnType.FLOATS,
    "versions": ColumnType.IDS,
    "reward": ColumnType.REAL,
    "rewards": ColumnType.JSON,
}
"""One root-to-leaf path of a session per row, for other programs. This table is never imported."""

TABLES: dict[TableName, Columns] = {
    "groups": get_columns(Group) | {"task_id": ColumnType.TEXT},
    "sessions": get_columns(Session)
    | {"calls": ColumnType.INT}
    | dict.fromkeys(("rewards", "scores", "tags", "feedback"), ColumnType.JSON),
    "calls": get_columns(Call),
    "samples": SAMPLES,
}
CONTENT_TABLES: tuple[TableName, ...] = ("groups", "sessions", "calls")
"""The tables that are imported. The content hash covers these tables."""


_encode_unicode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode
_encode_ascii = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


def dump_canonical_json(value: Any) -> str:
    """Return compact JSON with sorted keys, so that equal values give equal text. If the value contains lone
    surrogates, which UTF-8 cannot encode, all non-ASCII characters are escaped."""
    text = _encode_unicode(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return _encode_ascii(value)
    return text


def encode_line(columns: Columns, row: ExportRow) -> str:
    return dump_canonical_json(
        {name: _to_json(column_type, row[name]) for name, column_type in columns.items()}
    )


def decode_line(columns: Columns, line: str, location: str) -> ExportRow:
    try:
        values: Json = json.loads(line)
        return {name: _from_json(column_type, values[name]) for name, column_type in columns.items()}
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{location} is not a row of an Instar export: {error!r}") from error


def _to_json(column_type: ColumnType, value: Any) -> Any:
    if value is None:
        return None
    match column_type:
        case ColumnType.IDS:
            return value.tolist()
        case ColumnType.FLOATS:
            return _floats_to_json(value)
        case ColumnType.BYTES:
            return base64.b64encode(value).decode()
        case _:
            return value


def _from_json(column_type: ColumnType, value: Any) -> Any:
    if value is None:
        return None
    match column_type:
        case ColumnType.IDS:
            return to_id_array(value)
        case ColumnType.FLOATS:
            return np.array([np.nan if number is None else float(number) for number in value], np.float32)
        case ColumnType.BYTES:
            return base64.b64decode(value, validate=True)
        case _:
            return value


def to_id_array(values: Iterable[int]) -> Ids:
    return np.array(list(values), np.int32)


def _floats_to_json(values: Floats) -> list[float | str | None]:
    # JSON has neither NaN nor infinity, so NaN is written as null and infinity as text. Python floats
    # represent float32 exactly.
    if np.isfinite(values).all():
        return values.tolist()
    return [None if v != v else (v if math.isfinite(v) else str(v)) for v in values.tolist()]
