"""What an exported row holds, each column declared once, and the row as a canonical line of JSON.

There are three tables. A session's row counts its calls, whose rows follow each other in the order of their
sessions. A call's row holds what lies beyond its base, as in a store, so that a session of many turns costs
what was said in it, and not the sum of its prompts.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from enum import Enum
from typing import Any, Literal

import numpy as np

from instar.errors import DataError
from instar.types import Floats, Ids, Json

Row = dict[str, Any]
"""By column: text, numbers, arrays, bytes, and for JSON whatever JSON can say."""
Table = Literal["groups", "sessions", "calls", "samples"]


class Kind(Enum):
    TEXT = "text"
    INT = "int"
    REAL = "real"
    BOOL = "bool"
    IDS = "ids"
    """int32"""
    FLOATS = "floats"
    """float32, NaN where one is missing"""
    JSON = "json"
    BYTES = "bytes"


Columns = dict[str, Kind]

GROUPS: Columns = {
    "group_id": Kind.TEXT,
    "run_id": Kind.TEXT,
    "channel": Kind.TEXT,
    "index": Kind.INT,
    "size": Kind.INT,
    "task_id": Kind.TEXT,
    "task": Kind.JSON,
    "status": Kind.TEXT,
    "reason": Kind.TEXT,
    "created_at": Kind.REAL,
}

SESSIONS: Columns = {
    "session_id": Kind.TEXT,
    "run_id": Kind.TEXT,
    "agent_id": Kind.TEXT,
    "policy_id": Kind.TEXT,
    "channel": Kind.TEXT,
    "status": Kind.TEXT,
    "group_id": Kind.TEXT,
    "slot": Kind.INT,
    "attempt": Kind.INT,
    "task_id": Kind.TEXT,
    "reason": Kind.TEXT,
    "seed": Kind.INT,
    "sampling": Kind.JSON,
    "metadata": Kind.JSON,
    "external_id": Kind.TEXT,
    "created_at": Kind.REAL,
    "ended_at": Kind.REAL,
    "calls": Kind.INT,
    "rewards": Kind.JSON,
    "scores": Kind.JSON,
    "tags": Kind.JSON,
    "feedback": Kind.JSON,
}

CALLS: Columns = {
    "call_id": Kind.TEXT,
    "session_id": Kind.TEXT,
    "run_id": Kind.TEXT,
    "agent_id": Kind.TEXT,
    "policy_id": Kind.TEXT,
    "request_id": Kind.TEXT,
    "parent_id": Kind.TEXT,
    "link": Kind.TEXT,
    "base_id": Kind.TEXT,
    "base_tokens": Kind.INT,
    "base_messages": Kind.INT,
    "prompt_ids": Kind.IDS,
    "sampled_ids": Kind.IDS,
    "logprobs": Kind.FLOATS,
    "behavior_logprobs": Kind.FLOATS,
    "versions": Kind.IDS,
    "messages": Kind.JSON,
    "reply": Kind.JSON,
    "tools": Kind.JSON,
    "finish_reason": Kind.TEXT,
    "status": Kind.TEXT,
    "trainable": Kind.BOOL,
    "reason": Kind.TEXT,
    "dialect": Kind.TEXT,
    "model": Kind.TEXT,
    "client_key": Kind.TEXT,
    "digests": Kind.BYTES,
    "params": Kind.JSON,
    "started_at": Kind.REAL,
    "first_token_at": Kind.REAL,
    "ended_at": Kind.REAL,
}
"""``prompt_ids`` and ``messages`` from the base on; ``tools`` are null where they are the base's."""

SAMPLES: Columns = {
    "sample_key": Kind.TEXT,
    "session_id": Kind.TEXT,
    "group_id": Kind.TEXT,
    "task_id": Kind.TEXT,
    "policy_id": Kind.TEXT,
    "messages": Kind.JSON,
    "tools": Kind.JSON,
    "token_ids": Kind.IDS,
    "mask": Kind.FLOATS,
    "logprobs": Kind.FLOATS,
    "behavior_logprobs": Kind.FLOATS,
    "versions": Kind.IDS,
    "reward": Kind.REAL,
    "rewards": Kind.JSON,
}
"""A flat view, for other programs: one root-to-leaf walk through a session. It is not imported."""

TABLES: dict[Table, Columns] = {"groups": GROUPS, "sessions": SESSIONS, "calls": CALLS, "samples": SAMPLES}
CONTENT: tuple[Table, ...] = ("groups", "sessions", "calls")
"""The tables that hold everything: what is imported, and what the content hash is of."""


# --- canonical lines ----------------------------------------------------------------------------


_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode
_escaped = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


def dump(value: Any) -> str:
    """Compact JSON with sorted keys: equal values, equal text. Lone surrogates, which UTF-8 cannot hold,
    stay escaped."""
    text = _compact(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return _escaped(value)
    return text


def to_line(columns: Columns, row: Row) -> str:
    return dump({name: _to_json(kind, row[name]) for name, kind in columns.items()})


def from_line(columns: Columns, line: str, where: str) -> Row:
    try:
        given: Json = json.loads(line)
        return {name: _from_json(kind, given[name]) for name, kind in columns.items()}
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{where} is not a row that Instar has written: {error!r}") from error


def _to_json(kind: Kind, value: Any) -> Any:
    if value is None:
        return None
    match kind:
        case Kind.IDS:
            return value.tolist()
        case Kind.FLOATS:
            return _floats_to_json(value)
        case Kind.BYTES:
            return base64.b64encode(value).decode()
        case _:
            return value


def _from_json(kind: Kind, value: Any) -> Any:
    if value is None:
        return None
    match kind:
        case Kind.IDS:
            return ids(value)
        case Kind.FLOATS:
            return np.array([np.nan if each is None else float(each) for each in value], np.float32)
        case Kind.BYTES:
            return base64.b64decode(value, validate=True)
        case _:
            return value


def ids(values: Iterable[int]) -> Ids:
    return np.array(list(values), np.int32)


def _floats_to_json(values: Floats) -> list[float | str | None]:
    """As float64, which holds every float32 exactly. JSON has neither NaN nor infinity."""
    if np.isfinite(values).all():
        return values.tolist()
    return [None if v != v else (v if math.isfinite(v) else str(v)) for v in values.tolist()]
