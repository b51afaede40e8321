"""Converts calls to rows and back. A row contains only the part of a call that follows its base call; reading
the row rebuilds the complete call.

The row has checksums of the complete prompt and sequence. When a row is written, they detect most calls that
do not begin with their base call's tokens (`check_base`). When it is read, they verify the rebuilt call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from instar.errors import StoreCorrupt, StoreError
from instar.store import codec
from instar.store.codec import DatabaseRow, checksum
from instar.store.models import CallDelta
from instar.store.rows import RowMapping
from instar.store.schema import CALLS
from instar.types import Call, Ids, Json, Message, Tool

_VERSION_CONVERTERS = {"versions": (codec.pack_runs, codec.unpack_runs)}
_CALL_ROWS = RowMapping(
    Call,
    text=["reason", "model", "client_key"],
    default_now="ended_at",
    excluded=["tools"],
    converters=_VERSION_CONVERTERS,
)
_REBUILT_CALL_ROWS = RowMapping(
    Call,
    excluded=["prompt_ids", "sampled_ids", "messages", "reply", "tools"],
    converters=_VERSION_CONVERTERS,
)
_DELTA_ROWS = RowMapping(CallDelta, excluded=["prompt_tail", "sampled_ids", "messages", "tools"])


class BaseCallSummary(NamedTuple):
    """The properties of a base call that are needed to check the calls that extend it."""

    prompt_tokens: int
    sampled_tokens: int
    sequence_crc: int
    message_count: int


@dataclass(slots=True)
class EncodedCall:
    call: Call
    prefix_crc: int
    """The checksum of the prompt's first ``base_tokens`` tokens."""
    summary: BaseCallSummary
    """A summary of this call, for calls that extend it."""
    tools: tuple[str, str] | None
    """The hash and body of the tools, if the call has any."""
    values: tuple[object, ...]
    """The values of the row, in the order of `CALLS.insert_columns`."""


def _make_row_encoder(*computed: str) -> Callable[..., tuple[object, ...]]:
    """Return a function that takes a call and the values of the ``computed`` columns, and returns the row.

    The function is generated, because it runs for every call and a loop over the columns would be slower.
    """
    expressions: list[str] = []
    for name in CALLS.insert_columns:
        value = name if name in computed else f"call.{name}"
        expressions.append(f"encode_{name}({value})" if name in _CALL_ROWS.encoders else value)
    encoders = {f"encode_{name}": encode for name, encode in _CALL_ROWS.encoders.items()}
    return eval(f"lambda call, {', '.join(computed)}: ({', '.join(expressions)})", encoders)


_encode_row = _make_row_encoder(
    "prompt_ids",
    "messages",
    "tools_hash",
    "tail_key",
    "response_fields",
    "prompt_crc",
    *BaseCallSummary._fields,
)


def encode_call(
    call: Call, tail_key: bytes | None = None, response_fields: Json | None = None
) -> EncodedCall:
    _check_call(call)
    prompt, sampled, base_tokens = call.prompt_ids, call.sampled_ids, call.base_tokens
    tail = prompt[base_tokens:]
    prefix_crc = checksum(prompt[:base_tokens]) if base_tokens else 0
    prompt_crc = checksum(tail, prefix_crc)
    summary = BaseCallSummary(len(prompt), len(sampled), checksum(sampled, prompt_crc), len(call.messages))
    tools = None
    if call.tools:
        body = codec.dump_message(call.tools)
        tools = hashlib.sha256(body.encode()).hexdigest(), body
    messages = call.messages[call.base_messages :]
    fields = response_fields and codec.dump_json(response_fields)
    values = _encode_row(call, tail, messages, tools and tools[0], tail_key, fields, prompt_crc, *summary)
    return EncodedCall(call, prefix_crc, summary, tools, values)


def _check_call(call: Call) -> None:
    sampled = len(call.sampled_ids)
    for name, values in (
        ("logprobs", call.logprobs),
        ("versions", call.versions),
        ("behavior_logprobs", call.behavior_logprobs),
    ):
        if values is not None and len(values) != sampled:
            raise _call_error(call, f"it has {len(values)} {name} for {sampled} sampled tokens")
    if call.base_id is None and (call.base_tokens or call.base_messages):
        raise _call_error(call, "it has base_tokens or base_messages, but no base_id")
    for name, value, limit in (
        ("base_tokens", call.base_tokens, len(call.prompt_ids)),
        ("base_messages", call.base_messages, len(call.messages)),
    ):
        if not 0 <= value <= limit:
            raise _call_error(call, f"{name} must be between 0 and {limit}, got {value}")


def check_base(encoded: EncodedCall, base: BaseCallSummary | None) -> None:
    """Raise StoreError if the call does not fit its base.

    The base must exist and have at least ``base_tokens`` tokens and ``base_messages`` messages. If the call
    takes all tokens of the base, the checksums must match; a shorter prefix is verified by `decode_calls`.
    """
    call = encoded.call
    if base is None:
        raise _call_error(call, f"its base call {call.base_id} is not stored")
    tokens, messages = base.prompt_tokens + base.sampled_tokens, base.message_count + 1
    if call.base_tokens > tokens:
        raise _call_error(call, f"base_tokens is {call.base_tokens}, but its base has {tokens} tokens")
    if call.base_messages > messages:
        raise _call_error(
            call, f"base_messages is {call.base_messages}, but its base has {messages} messages"
        )
    if call.base_tokens == tokens and encoded.prefix_crc != base.sequence_crc:
        raise _call_error(call, f"its prompt does not begin with the tokens of its base {call.base_id}")


def _call_error(call: Call, reason: str) -> StoreError:
    return StoreError(f"cannot store call {call.call_id}: {reason}")


# --- reading ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _TokenSequence:
    """The tokens of a chain of calls. A call that takes all tokens of its base appends to the base's
    sequence, so the chain is stored in one array and each prompt is a view of it."""

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
    def token_count(self) -> int:
        return self.row["prompt_tokens"] + self.row["sampled_tokens"]


def decode_calls(
    rows: Iterable[DatabaseRow], tools: Mapping[str, tuple[Tool, ...]], call_ids: Iterable[str]
) -> list[Call]:
    """Return the complete calls with ``call_ids``. ``tools`` maps the hashes in the rows to tools.

    ``rows`` contains these calls and all their base calls, each before the calls that extend it. The cost is
    linear in the stored tokens, not in the total length of the prompts.
    """
    rebuilt: dict[str, _RebuiltCall] = {}
    for row in rows:
        rebuilt[row["call_id"]] = _rebuild(row, rebuilt)
    return [_to_call(rebuilt[call_id], tools) for call_id in call_ids]


def _rebuild(row: DatabaseRow, rebuilt: Mapping[str, _RebuiltCall]) -> _RebuiltCall:
    tail, sampled = codec.unpack_ids(row["prompt_ids"]), codec.unpack_ids(row["sampled_ids"])
    messages: list[Message] = codec.load_message(row["messages"])
    sequence, crc = _TokenSequence(), 0
    if row["base_id"] is not None:
        base = rebuilt.get(row["base_id"])
        if base is None:
            raise _row_error(row, f"its base call {row['base_id']} is missing")
        messages = [*base.messages, base.reply][: row["base_messages"]] + messages
        if row["base_tokens"] == base.token_count and base.sequence.length == base.token_count:
            sequence, crc = base.sequence, base.crc
        else:
            sequence.append(base.sequence.array[: row["base_tokens"]])
            crc = checksum(sequence.array)
    sequence.append(tail)
    crc = checksum(tail, crc)
    if sequence.length != row["prompt_tokens"] or crc != row["prompt_crc"]:
        raise _row_error(row, "its prompt does not match the stored length or checksum")
    if len(messages) != row["message_count"]:
        raise _row_error(row, f"it has {len(messages)} messages instead of {row['message_count']}")
    sequence.append(sampled)
    crc = checksum(sampled, crc)
    if crc != row["sequence_crc"]:
        raise _row_error(row, "its sampled tokens do not match the stored checksum")
    return _RebuiltCall(row, sequence, crc, messages, codec.load_message(row["reply"]), sampled)


def _row_error(row: DatabaseRow, detail: str) -> StoreCorrupt:
    return StoreCorrupt(
        f"call {row['call_id']} of session {row['session_id']} is damaged in the store: {detail}. Restore "
        "the store from a backup. To export the other sessions, tag this one and exclude it with --without"
    )


def _to_call(rebuilt: _RebuiltCall, tools: Mapping[str, tuple[Tool, ...]]) -> Call:
    row = rebuilt.row
    prompt = rebuilt.sequence.array[: row["prompt_tokens"]]
    prompt.flags.writeable = False  # shared with the other calls of the chain
    return _REBUILT_CALL_ROWS.decode(
        row,
        prompt_ids=prompt,
        sampled_ids=rebuilt.sampled,
        messages=tuple(rebuilt.messages),
        reply=rebuilt.reply,
        tools=tools[row["tools_hash"]] if row["tools_hash"] is not None else (),
    )


DELTA_COLUMNS = (
    f"{', '.join(_DELTA_ROWS.names)}, prompt_ids, sampled_ids, tools_hash, "
    "CASE WHEN length(digests) = 0 THEN messages END AS messages"
)
"""The columns of the calls table that `decode_delta` reads."""


def decode_delta(row: DatabaseRow, tools: Mapping[str, tuple[Tool, ...]]) -> CallDelta:
    """Decode a row. ``tools`` maps hashes to tools and is used only for rows without digests."""
    has_messages = row["messages"] is not None
    return _DELTA_ROWS.decode(
        row,
        prompt_tail=codec.view_ids(row["prompt_ids"]),
        sampled_ids=codec.view_ids(row["sampled_ids"]),
        messages=tuple(codec.load_message(row["messages"])) if has_messages else (),
        tools=tools[row["tools_hash"]] if has_messages and row["tools_hash"] is not None else (),
    )
