"""Encode groups and sessions as rows of an export, and decode them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

import msgspec
import numpy as np

from instar.datasets.columns import CALLS, SESSIONS, ExportRow, to_id_array
from instar.errors import DataError
from instar.store.base import SessionRecord
from instar.types import (
    Call,
    CallStatus,
    Channel,
    Feedback,
    Group,
    GroupStatus,
    Json,
    Link,
    Message,
    Reward,
    RewardSource,
    SamplingParams,
    Score,
    ScoreState,
    Session,
    SessionStatus,
    Tag,
    Task,
    Tool,
)


def encode_group(group: Group) -> ExportRow:
    return {
        "group_id": group.group_id,
        "run_id": group.run_id,
        "channel": group.channel.value,
        "index": group.index,
        "size": group.size,
        "task_id": group.task.task_id,
        "task": group.task.data,
        "status": group.status.value,
        "reason": group.reason,
        "created_at": group.created_at,
    }


def decode_group(row: ExportRow) -> Group:
    return Group(
        group_id=row["group_id"],
        run_id=row["run_id"],
        channel=Channel(row["channel"]),
        index=row["index"],
        size=row["size"],
        task=Task(row["task_id"], row["task"]),
        status=GroupStatus(row["status"]),
        reason=row["reason"],
        created_at=row["created_at"],
    )


# --- sessions -----------------------------------------------------------------------------------

_SESSION_FIELDS = [field.name for field in fields(Session)]


def encode_record(record: SessionRecord) -> tuple[ExportRow, list[ExportRow]]:
    """Return the row of the session and the rows of its calls."""
    session = record.session
    row: ExportRow = {name: getattr(session, name) for name in _SESSION_FIELDS}
    row |= {
        "channel": session.channel.value,
        "status": session.status.value,
        "calls": len(record.calls),
        "rewards": [_encode_annotation(reward) for reward in record.rewards],
        "scores": [_encode_annotation(score) for score in record.scores],
        "tags": [_encode_annotation(tag) for tag in record.tags],
        "feedback": [_encode_feedback(feedback) for feedback in record.feedback],
    }
    assert row.keys() == SESSIONS.keys()
    by_id = {call.call_id: call for call in record.calls}
    return row, [_encode_call(call, by_id) for call in record.calls]


def _encode_annotation(annotation: Reward | Score | Tag | Feedback) -> Json:
    return {name: value for name, value in asdict(annotation).items() if name != "session_id"}


def _encode_feedback(feedback: Feedback) -> Json:
    ids = feedback.correction_ids
    return {**_encode_annotation(feedback), "correction_ids": None if ids is None else ids.tolist()}


def _encode_call(call: Call, calls_by_id: Mapping[str, Call]) -> ExportRow:
    base = None
    if call.base_id is not None:
        base = calls_by_id.get(call.base_id)
        if base is None:
            raise DataError(
                f"call {call.call_id} is based on call {call.base_id}, which is not in its session "
                f"{call.session_id}"
            )
    row: ExportRow = {name: getattr(call, name) for name in CALLS}
    return row | {
        "link": call.link.value,
        "status": call.status.value,
        "prompt_ids": call.prompt_ids[call.base_tokens :],
        "messages": list(call.messages[call.base_messages :]),
        "tools": None if base is not None and base.tools == call.tools else list(call.tools),
        "params": msgspec.to_builtins(call.params),
    }


def decode_record(row: ExportRow, call_rows: Sequence[ExportRow]) -> SessionRecord:
    """Return the record that `encode_record` encoded as these rows."""
    session_id = row["session_id"]
    calls_by_id: dict[str, Call] = {}
    for call_row in call_rows:
        if call_row["session_id"] != session_id:
            raise DataError(
                f"call {call_row['call_id']} of session {call_row['session_id']} is among the calls of "
                f"session {session_id}"
            )
        call = _decode_call(call_row, calls_by_id)
        calls_by_id[call.call_id] = call
    values: ExportRow = {name: row[name] for name in _SESSION_FIELDS}
    values |= {"channel": Channel(row["channel"]), "status": SessionStatus(row["status"])}
    return SessionRecord(
        session=Session(**values),
        calls=tuple(calls_by_id.values()),
        rewards=tuple(
            _decode_annotation(Reward, session_id, reward, source=RewardSource) for reward in row["rewards"]
        ),
        scores=tuple(
            _decode_annotation(Score, session_id, score, state=ScoreState) for score in row["scores"]
        ),
        tags=tuple(_decode_annotation(Tag, session_id, tag) for tag in row["tags"]),
        feedback=tuple(
            _decode_annotation(Feedback, session_id, feedback, correction_ids=_decode_ids)
            for feedback in row["feedback"]
        ),
    )


def _decode_ids(value: list[int] | None) -> Any:
    return None if value is None else to_id_array(value)


Annotation = TypeVar("Annotation", Reward, Score, Tag, Feedback)


def _decode_annotation(kind: type[Annotation], session_id: str, encoded: Json, **decoders: Any) -> Annotation:
    values = {name: decoders[name](value) if name in decoders else value for name, value in encoded.items()}
    return kind(session_id=session_id, **values)


def _decode_call(row: ExportRow, calls_by_id: Mapping[str, Call]) -> Call:
    base = None
    if row["base_id"] is not None:
        base = calls_by_id.get(row["base_id"])
        if base is None:
            raise DataError(
                f"call {row['call_id']} is based on call {row['base_id']}, which does not precede it"
            )
    prompt, messages = row["prompt_ids"], tuple[Message, ...](row["messages"])
    tools: tuple[Tool, ...] = tuple(row["tools"] or ())
    if base is not None:
        prompt = np.concatenate([base.sequence[: row["base_tokens"]], prompt])
        messages = (*base.messages, base.reply)[: row["base_messages"]] + messages
        tools = base.tools if row["tools"] is None else tools
    values: ExportRow = {name: row[name] for name in CALLS}
    values |= {
        "link": Link(row["link"]),
        "status": CallStatus(row["status"]),
        "prompt_ids": prompt,
        "messages": messages,
        "tools": tools,
        "params": msgspec.convert(row["params"], SamplingParams),
    }
    return Call(**values)
