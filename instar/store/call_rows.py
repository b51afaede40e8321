"""Conversion of calls to rows and back. A row holds only the part of a call that follows its base call;
reading the row rebuilds the complete call.

The row has checksums of the complete prompt and sequence. When the row is written, the checksums reject a
call that does not continue its base; when it is read, they prove that the call was rebuilt exactly.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from instar.errors import StoreCorrupt, StoreError
from instar.store.codec import (
    DatabaseRow,
    checksum,
    dump_message,
    load_message,
    pack_floats,
    pack_ids,
    pack_runs,
    sanitize_text,
    unpack_floats,
    unpack_ids,
    unpack_runs,
    view_ids,
)
from instar.store.models import CallDelta
from instar.types import Call, CallStatus, Ids, Link, Message, SamplingParams, Tool


class BaseCallSummary(NamedTuple):
    """The facts about a base call that a call built on it is checked against."""

    prompt_tokens: int
    sampled_tokens: int
    sequence_crc: int
    message_count: int


@dataclass(slots=True)
class EncodedCall:
    call_id: str
    session_id: str
    base_id: str | None
    base_tokens: int
    base_messages: int
    prefix_crc: int
    """The checksum of the prompt's first ``base_tokens`` tokens."""
    base_summary: BaseCallSummary
    tools: tuple[str, str] | None
    """(hash, body) of the tools, if the call had any."""
    values: tuple[object, ...]
    """The values of the row, in the order of the table's columns."""


def encode_call(call: Call, tail_key: bytes | None = None) -> EncodedCall:
    _check_lengths(call)
    prompt, sampled, base_tokens = call.prompt_ids, call.sampled_ids, call.base_tokens
    tail = prompt[base_tokens:]
    prefix_crc = checksum(prompt[:base_tokens]) if base_tokens else 0
    prompt_crc = checksum(tail, prefix_crc)
    summary = BaseCallSummary(len(prompt), len(sampled), checksum(sampled, prompt_crc), len(call.messages))
    tools = _encode_tools(call.tools)
    # Building a mapping would double the time, and this runs for every call.
    values = (
        call.call_id,
        call.session_id,
        call.run_id,
        call.agent_id,
        call.policy_id,
        call.request_id,
        call.parent_id,
        call.link.value,
        call.base_id,
        base_tokens,
        call.base_messages,
        summary.prompt_tokens,
        prompt_crc,
        summary.sampled_tokens,
        summary.sequence_crc,
        summary.message_count,
        call.status.value,
        int(call.trainable),
        sanitize_text(call.reason),
        call.finish_reason,
        call.dialect,
        msgspec.json.encode(call.params).decode(),
        call.started_at,
        call.first_token_at,
        call.ended_at or time.time(),
        tools[0] if tools else None,
        pack_runs(call.versions),
        pack_ids(tail),
        pack_ids(sampled),
        pack_floats(call.logprobs),
        None if call.behavior_logprobs is None else pack_floats(call.behavior_logprobs),
        dump_message(call.messages[call.base_messages :]),
        dump_message(call.reply),
        sanitize_text(call.model),
        sanitize_text(call.client_key),
        call.digests,
        tail_key,
    )
    return EncodedCall(
        call.call_id,
        call.session_id,
        call.base_id,
        base_tokens,
        call.base_messages,
        prefix_crc,
        summary,
        tools,
        values,
    )


def _check_lengths(call: Call) -> None:
    sampled = len(call.sampled_ids)
    for name in ("logprobs", "versions", "behavior_logprobs"):
        values = getattr(call, name)
        if values is not None and len(values) != sampled:
            raise StoreError(f"call {call.call_id}: {len(values)} {name} for {sampled} sampled tokens")
    if call.base_id is None and (call.base_tokens or call.base_messages):
        raise StoreError(f"call {call.call_id}: base_tokens or base_messages without a base_id")
    if not 0 <= call.base_tokens <= len(call.prompt_ids):
        raise StoreError(f"call {call.call_id}: base_tokens {call.base_tokens} is beyond its prompt")
    if not 0 <= call.base_messages <= len(call.messages):
        raise StoreError(f"call {call.call_id}: base_messages {call.base_messages} is beyond its messages")


def check_base(call: EncodedCall, base: BaseCallSummary | None) -> None:
    """Raise StoreError if the call's prompt is not its base's tokens followed by its own tokens.

    A call that branches off inside the base's sequence can only be verified when it is read.
    """
    if base is None:
        raise _invalid_call(call, f"its base call {call.base_id} is not stored")
    tokens = base.prompt_tokens + base.sampled_tokens
    if call.base_tokens > tokens:
        raise _invalid_call(call, f"base_tokens {call.base_tokens} of a base of {tokens} tokens")
    if call.base_messages > base.message_count + 1:
        raise _invalid_call(
            call, f"base_messages {call.base_messages} of a base of {base.message_count + 1} messages"
        )
    if call.base_tokens == tokens and call.prefix_crc != base.sequence_crc:
        raise _invalid_call(call, f"its prompt does not begin with the tokens of its base {call.base_id}")


def _invalid_call(call: EncodedCall, reason: str) -> StoreError:
    return StoreError(f"call {call.call_id}: {reason}")


def _encode_tools(tools: tuple[Tool, ...]) -> tuple[str, str] | None:
    if not tools:
        return None
    body = dump_message(tools)
    return hashlib.sha256(body.encode()).hexdigest(), body


# --- reading ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _TokenSequence:
    """The tokens shared by a chain of calls. A call that continues at the end of its base appends to the
    sequence, so that the whole chain is one array and each prompt is a view of it."""

    pieces: list[Ids] = field(default_factory=list[Ids])
    length: int = 0

    def append(self, ids: Ids) -> None:
        self.pieces.append(ids)
        self.length += len(ids)

    @property
    def array(self) -> Ids:
        if len(self.pieces) != 1:
            self.pieces = [np.concatenate([np.empty(0, np.int32), *self.pieces])]
        return self.pieces[0]


@dataclass(slots=True)
class _RebuiltCall:
    row: DatabaseRow
    sequence: _TokenSequence
    crc: int
    messages: list[Message]
    reply: Message
    sampled: Ids

    @property
    def tokens(self) -> int:
        return self.row["prompt_tokens"] + self.row["sampled_tokens"]


def decode_calls(
    rows: Iterable[DatabaseRow], tools: Mapping[str, str], call_ids: Iterable[str]
) -> list[Call]:
    """Return the complete calls with ``call_ids``, given their rows and the rows of all their base calls.

    A base must come before the calls built on it. The cost grows with the stored tokens, not with the sum of
    the prompts.
    """
    rebuilt: dict[str, _RebuiltCall] = {}
    for row in rows:
        rebuilt[row["call_id"]] = _rebuild(row, rebuilt)
    decoded_tools: dict[str, tuple[Tool, ...]] = {
        key: tuple(load_message(body)) for key, body in tools.items()
    }
    return [_to_call(rebuilt[call_id], decoded_tools) for call_id in call_ids]


def _rebuild(row: DatabaseRow, rebuilt: Mapping[str, _RebuiltCall]) -> _RebuiltCall:
    tail, sampled = unpack_ids(row["prompt_ids"]), unpack_ids(row["sampled_ids"])
    messages: list[Message] = load_message(row["messages"])
    sequence, crc = _TokenSequence(), 0
    if row["base_id"] is not None:
        base = rebuilt.get(row["base_id"])
        if base is None:
            raise _corrupt_call(row, f"its base {row['base_id']} is missing")
        messages = [*base.messages, base.reply][: row["base_messages"]] + messages
        if row["base_tokens"] == base.tokens and base.sequence.length == base.tokens:
            sequence, crc = base.sequence, base.crc
        else:
            sequence.append(base.sequence.array[: row["base_tokens"]])
            crc = checksum(sequence.array)
    sequence.append(tail)
    crc = checksum(tail, crc)
    if sequence.length != row["prompt_tokens"] or crc != row["prompt_crc"]:
        raise _corrupt_call(row, "its prompt cannot be rebuilt as it was")
    if len(messages) != row["message_count"]:
        raise _corrupt_call(row, f"{len(messages)} of its {row['message_count']} messages are stored")
    sequence.append(sampled)
    crc = checksum(sampled, crc)
    if crc != row["sequence_crc"]:
        raise _corrupt_call(row, "its sampled tokens are not those that were written")
    return _RebuiltCall(row, sequence, crc, messages, load_message(row["reply"]), sampled)


def _corrupt_call(row: DatabaseRow, detail: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"call {row['call_id']} of session {row['session_id']} is damaged in the store ({detail}): "
        "leave the session out, or restore the store from a backup"
    )


def _to_call(rebuilt: _RebuiltCall, tools: Mapping[str, tuple[Tool, ...]]) -> Call:
    row = rebuilt.row
    prompt = rebuilt.sequence.array[: row["prompt_tokens"]]
    prompt.flags.writeable = False  # shared with the other calls of the chain
    behavior = row["behavior_logprobs"]
    return Call(
        call_id=row["call_id"],
        session_id=row["session_id"],
        run_id=row["run_id"],
        agent_id=row["agent_id"],
        policy_id=row["policy_id"],
        request_id=row["request_id"],
        prompt_ids=prompt,
        sampled_ids=rebuilt.sampled,
        logprobs=unpack_floats(row["logprobs"]),
        versions=unpack_runs(row["versions"]),
        messages=tuple(rebuilt.messages),
        reply=rebuilt.reply,
        finish_reason=row["finish_reason"],
        tools=tools[row["tools_hash"]] if row["tools_hash"] is not None else (),
        behavior_logprobs=None if behavior is None else unpack_floats(behavior),
        parent_id=row["parent_id"],
        link=Link(row["link"]),
        base_id=row["base_id"],
        base_tokens=row["base_tokens"],
        base_messages=row["base_messages"],
        status=CallStatus(row["status"]),
        trainable=bool(row["trainable"]),
        reason=row["reason"],
        dialect=row["dialect"],
        model=row["model"],
        client_key=row["client_key"],
        digests=row["digests"],
        params=msgspec.json.decode(row["params"], type=SamplingParams),
        started_at=row["started_at"],
        first_token_at=row["first_token_at"],
        ended_at=row["ended_at"],
    )


DELTA_COLUMNS = (
    "call_id, request_id, parent_id, link, base_id, base_tokens, base_messages, message_count, status, "
    "trainable, reason, tools_hash, prompt_ids, sampled_ids, reply, client_key, digests, "
    "CASE WHEN length(digests) = 0 THEN messages END AS messages"
)
"""The columns of the calls table that `decode_delta` reads."""


def decode_delta(row: DatabaseRow, tools: Mapping[str, tuple[Tool, ...]]) -> CallDelta:
    """Return the delta in a row. ``tools`` maps hashes to tools, for rows without digests."""
    has_messages = row["messages"] is not None
    return CallDelta(
        call_id=row["call_id"],
        request_id=row["request_id"],
        parent_id=row["parent_id"],
        link=Link(row["link"]),
        base_id=row["base_id"],
        base_tokens=row["base_tokens"],
        base_messages=row["base_messages"],
        prompt_tail=view_ids(row["prompt_ids"]),
        sampled_ids=view_ids(row["sampled_ids"]),
        message_count=row["message_count"],
        status=CallStatus(row["status"]),
        trainable=bool(row["trainable"]),
        reason=row["reason"],
        client_key=row["client_key"],
        digests=row["digests"],
        reply=load_message(row["reply"]),
        messages=tuple(load_message(row["messages"])) if has_messages else (),
        tools=tools[row["tools_hash"]] if has_messages and row["tools_hash"] is not None else (),
    )
