"""Groups and sessions ↔ rows."""

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

_SESSION = [field.name for field in fields(Session)]


def encode_record(record: SessionRecord) -> tuple[ExportRow, list[ExportRow]]:
    """The session's row, and those of its calls."""
    session = record.session
    row: ExportRow = {name: getattr(session, name) for name in _SESSION}
    row |= {
        "channel": session.channel.value,
        "status": session.status.value,
        "calls": len(record.calls),
        "rewards": [_said(reward) for reward in record.rewards],
        "scores": [_said(score) for score in record.scores],
        "tags": [_said(tag) for tag in record.tags],
        "feedback": [_feedback_said(feedback) for feedback in record.feedback],
    }
    assert row.keys() == SESSIONS.keys()
    by_id = {call.call_id: call for call in record.calls}
    return row, [_call_row(call, by_id) for call in record.calls]


def _said(opinion: Reward | Score | Tag | Feedback) -> Json:
    return {name: value for name, value in asdict(opinion).items() if name != "session_id"}


def _feedback_said(feedback: Feedback) -> Json:
    given = feedback.correction_ids
    return {**_said(feedback), "correction_ids": None if given is None else given.tolist()}


def _call_row(call: Call, known: Mapping[str, Call]) -> ExportRow:
    base = None
    if call.base_id is not None:
        base = known.get(call.base_id)
        if base is None:
            raise DataError(
                f"call {call.call_id} stands on call {call.base_id}, which its session "
                f"{call.session_id} lacks"
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


def decode_record(row: ExportRow, calls: Sequence[ExportRow]) -> SessionRecord:
    """What `record_rows` was given."""
    session_id = row["session_id"]
    known: dict[str, Call] = {}
    for each in calls:
        if each["session_id"] != session_id:
            raise DataError(f"call {each['call_id']} is among the calls of another session, {session_id}")
        call = _call_of(each, known)
        known[call.call_id] = call
    given: ExportRow = {name: row[name] for name in _SESSION}
    given |= {"channel": Channel(row["channel"]), "status": SessionStatus(row["status"])}
    return SessionRecord(
        session=Session(**given),
        calls=tuple(known.values()),
        rewards=tuple(_opinion(Reward, session_id, each, source=RewardSource) for each in row["rewards"]),
        scores=tuple(_opinion(Score, session_id, each, state=ScoreState) for each in row["scores"]),
        tags=tuple(_opinion(Tag, session_id, each) for each in row["tags"]),
        feedback=tuple(
            _opinion(Feedback, session_id, each, correction_ids=_ids_or_none) for each in row["feedback"]
        ),
    )


def _ids_or_none(value: list[int] | None) -> Any:
    return None if value is None else to_id_array(value)


Opinion = TypeVar("Opinion", Reward, Score, Tag, Feedback)


def _opinion(kind: type[Opinion], session_id: str, given: Json, **read: Any) -> Opinion:
    values = {name: read[name](value) if name in read else value for name, value in given.items()}
    return kind(session_id=session_id, **values)


def _call_of(row: ExportRow, known: Mapping[str, Call]) -> Call:
    base = None
    if row["base_id"] is not None:
        base = known.get(row["base_id"])
        if base is None:
            raise DataError(f"call {row['call_id']} stands on call {row['base_id']}, which is not before it")
    prompt, messages = row["prompt_ids"], tuple[Message, ...](row["messages"])
    tools: tuple[Tool, ...] = tuple(row["tools"] or ())
    if base is not None:
        prompt = np.concatenate([base.sequence[: row["base_tokens"]], prompt])
        messages = (*base.messages, base.reply)[: row["base_messages"]] + messages
        tools = base.tools if row["tools"] is None else tools
    given: ExportRow = {name: row[name] for name in CALLS}
    given |= {
        "link": Link(row["link"]),
        "status": CallStatus(row["status"]),
        "prompt_ids": prompt,
        "messages": messages,
        "tools": tools,
        "params": msgspec.convert(row["params"], SamplingParams),
    }
    return Call(**given)
