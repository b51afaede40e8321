"""For programs that hold the tokens themselves.

    POST /v1/generate           GenerateBody    → {"id", "choices": [GeneratedChoice]}; or, streamed, a
                                                  GeneratedPiece per line
    POST /sessions/{id}/calls   SubmissionBody  → {"call_ids": [...]}

Generate continues a prompt of token ids. A submission adds calls that were sampled elsewhere to a session:
the exact ids with their logprobs and versions, as an engine of ours would have told them. A logprob that is
not known is null: such a call is recorded and not trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from instar.gateway.base import ApiError, bad_request
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.dialects.common import RANGES, check_ranges, decode_body, parse_stop
from instar.gateway.recording import SampledReply
from instar.types import FinishReason, Ids, Json, Message, SamplingParams, TokenChunk, Tool, ToolCall

LINES = "application/x-ndjson"
MOST_CALLS = 256
"""Of one submission."""
MOST_STOP_TOKENS = 256

Whole = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Logprob = Annotated[float, msgspec.Meta(le=0)]


# --- the wire -------------------------------------------------------------------------------------


class ParamsBody(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] = []


class GenerateBody(ParamsBody, forbid_unknown_fields=True, kw_only=True):
    prompt_ids: list[Whole]
    n: int = 1
    stream: bool = False
    model: str = ""


class GeneratedChoice(msgspec.Struct, omit_defaults=True):
    index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason | None
    text: str
    behavior_logprobs: list[float] | None = None
    stop: str | None = None


class GeneratedPiece(msgspec.Struct, omit_defaults=True):
    index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    behavior_logprobs: list[float] | None = None
    finish_reason: FinishReason | None = None
    stop: str | None = None


class ToolCallBody(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    name: str
    arguments: str


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ToolBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str = ""
    parameters: Json = {}


class CallBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    prompt_ids: list[Whole]
    sampled_ids: list[Whole]
    logprobs: list[Logprob | None]
    versions: list[Whole]
    finish_reason: FinishReason
    behavior_logprobs: list[Logprob | None] | None = None
    params: ParamsBody = msgspec.field(default_factory=ParamsBody)
    messages: list[MessageBody] | None = None
    tools: list[ToolBody] = []
    reply: MessageBody | None = None
    model: Text = ""
    parent_id: Text | None = None
    client_key: Text | None = None


class SubmissionBody(msgspec.Struct, forbid_unknown_fields=True):
    calls: list[CallBody]


_generate_decoder = msgspec.json.Decoder(GenerateBody)
_submission_decoder = msgspec.json.Decoder(SubmissionBody)


# --- generate -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    request: ModelRequest
    """Its ``prompt`` is the ids."""
    stop_token_ids: tuple[int, ...]
    """End a reply beside the model's own."""


def read_generate(body: bytes, vocab_size: int) -> GenerateRequest:
    """Raises ApiError (400) naming the fault's path."""
    given = decode_body(_generate_decoder, body)
    _check_ids(given.prompt_ids, vocab_size, "prompt_ids")
    _check_params(given, vocab_size, "")
    check_ranges(given, {"n": RANGES["n"]})
    request = ModelRequest(
        model=given.model,
        messages=(),
        prompt=tuple(given.prompt_ids),
        n=given.n,
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        seed=given.seed,
        stop=parse_stop(given.stop),
        stream=given.stream,
    )
    return GenerateRequest(request, tuple(given.stop_token_ids))


def write_generated(request_id: str, replies: Sequence[SampledReply]) -> bytes:
    choices = [
        GeneratedChoice(
            index=index,
            token_ids=reply.ids,
            logprobs=reply.logprobs,
            versions=reply.versions,
            finish_reason=reply.finish_reason,
            text=reply.message["content"],
            behavior_logprobs=reply.behavior if reply.params.modifies_distribution else None,
            stop=reply.stop,
        )
        for index, reply in enumerate(replies)
    ]
    return msgspec.json.encode({"id": request_id, "choices": choices})


def write_piece(index: int, chunk: TokenChunk) -> bytes:
    """A line of a streamed answer. The one with the ``finish_reason`` is for after the call was recorded."""
    piece = GeneratedPiece(
        index=index,
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        versions=chunk.versions,
        behavior_logprobs=chunk.behavior_logprobs,
        finish_reason=chunk.finish_reason,
        stop=chunk.stop,
    )
    return msgspec.json.encode(piece) + b"\n"


def write_submitted(call_ids: Sequence[str]) -> bytes:
    return msgspec.json.encode({"call_ids": call_ids})


def write_failure(error: ApiError) -> bytes:
    """The answer to a request that is refused, and the last line of a stream that cannot go on."""
    told = {"message": error.message, "code": error.code, "param": error.param}
    return msgspec.json.encode({"error": told}) + b"\n"


# --- calls that were sampled elsewhere ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmittedCall:
    prompt_ids: Ids
    reply: SampledReply
    """Its ``message`` is the submitted one; an empty one where none was."""
    messages: tuple[Message, ...] | None
    """None: the prompt is only known as ids."""
    tools: tuple[Tool, ...]
    has_message: bool
    """False: the reply is only known as ids."""
    model: str
    parent_id: str | None
    """The call that it continues, where the program says so. Whether there is such a call is to be seen."""
    client_key: str | None
    """The same key again is the same call again."""


def read_submission(
    body: bytes, vocab_size: int, head_version: int, *, max_calls: int = MOST_CALLS
) -> list[SubmittedCall]:
    """Raises ApiError (400) naming the fault's path."""
    given = decode_body(_submission_decoder, body).calls
    if not given:
        raise bad_request("'calls' is empty.", "calls", "invalid_value")
    if len(given) > max_calls:
        message = f"{len(given)} calls are more than the {max_calls} that are taken at once."
        raise bad_request(message, "calls", "invalid_value")
    return [_submitted(call, f"calls[{i}]", vocab_size, head_version) for i, call in enumerate(given)]


def _submitted(call: CallBody, path: str, vocab_size: int, head_version: int) -> SubmittedCall:
    _check_ids(call.prompt_ids, vocab_size, f"{path}.prompt_ids")
    _check_ids(call.sampled_ids, vocab_size, f"{path}.sampled_ids")
    for name in ("logprobs", "versions", "behavior_logprobs"):
        _check_length(getattr(call, name), len(call.sampled_ids), f"{path}.{name}")
    _check_below(
        call.versions, head_version, f"{path}.versions", "Version {0} is newer than {1}, the newest."
    )
    _check_params(call.params, vocab_size, f"{path}.params.")
    for i, message in enumerate(call.messages or ()):
        _check_message(message, f"{path}.messages[{i}]")
    if call.messages == []:
        raise bad_request(f"'{path}.messages' is empty.", f"{path}.messages", "invalid_value")
    if call.reply is not None:
        if call.reply.role != "assistant":
            raise bad_request("A reply is the assistant's.", f"{path}.reply.role", "invalid_value")
        _check_message(call.reply, f"{path}.reply")
    return SubmittedCall(
        prompt_ids=np.asarray(call.prompt_ids, np.int32),
        reply=_reply(call, path),
        messages=None if call.messages is None else tuple(map(_message, call.messages)),
        tools=tuple(
            Tool(name=t.name, description=t.description, parameters=t.parameters) for t in call.tools
        ),
        has_message=call.reply is not None,
        model=call.model,
        parent_id=call.parent_id,
        client_key=call.client_key,
    )


def _reply(call: CallBody, path: str) -> SampledReply:
    given = call.params
    params = SamplingParams(
        max_tokens=given.max_tokens or len(call.sampled_ids),
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        seed=given.seed,
        stop=parse_stop(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
    )
    reply = SampledReply(params)
    reply.ids = call.sampled_ids
    reply.versions = call.versions
    reply.finish_reason = call.finish_reason
    reply.logprobs = _floats(call.logprobs, f"{path}.logprobs")
    missing: list[float | None] = [None] * len(call.sampled_ids)
    reply.behavior = _floats(call.behavior_logprobs or missing, f"{path}.behavior_logprobs")
    if call.reply is not None:
        reply.message = _message(call.reply)
    return reply


def _message(body: MessageBody) -> Message:
    message = Message(role=body.role, content=body.content)
    if body.reasoning is not None:
        message["reasoning"] = body.reasoning
    if body.tool_calls:
        message["tool_calls"] = [
            ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in body.tool_calls
        ]
    if body.tool_call_id is not None:
        message["tool_call_id"] = body.tool_call_id
    if body.name is not None:
        message["name"] = body.name
    return message


# --- what is refused ------------------------------------------------------------------------------


def _check_ids(ids: Sequence[int], vocab_size: int, path: str) -> None:
    if not ids:
        raise bad_request(f"'{path}' is empty.", path, "invalid_value")
    _check_below(ids, vocab_size - 1, path, "Token id {0} is not in the vocabulary, which ends at {1}.")


def _check_below(values: Sequence[int], highest: int, path: str, told: str) -> None:
    if values and max(values) > highest:
        place = next(i for i, value in enumerate(values) if value > highest)
        raise bad_request(told.format(values[place], highest), f"{path}[{place}]", "invalid_value")


def _check_length(values: Sequence[Any] | None, length: int, path: str) -> None:
    if values is not None and len(values) != length:
        message = f"'{path}' has {len(values)} values for {length} sampled tokens."
        raise bad_request(message, path, "invalid_value")


def _check_params(params: ParamsBody, vocab_size: int, prefix: str) -> None:
    try:
        check_ranges(params, {name: span for name, span in RANGES.items() if name != "n"})
        parse_stop(params.stop)
    except ApiError as error:
        raise bad_request(error.message, f"{prefix}{error.param}", error.code) from error
    path = f"{prefix}stop_token_ids"
    if len(params.stop_token_ids) > MOST_STOP_TOKENS:
        message = f"{len(params.stop_token_ids)} stop tokens are more than {MOST_STOP_TOKENS}."
        raise bad_request(message, path, "invalid_value")
    if params.stop_token_ids:
        _check_ids(params.stop_token_ids, vocab_size, path)


def _check_message(message: MessageBody, path: str) -> None:
    if message.role != "assistant" and (message.tool_calls or message.reasoning is not None):
        name = "tool_calls" if message.tool_calls else "reasoning"
        raise bad_request(f"Only the assistant has '{name}'.", f"{path}.{name}", "invalid_value")
    if (message.role == "tool") != (message.tool_call_id is not None):
        told = "A tool's message, and no other, has a 'tool_call_id'."
        raise bad_request(told, f"{path}.tool_call_id", "invalid_value")


def _floats(values: Sequence[float | None], path: str) -> list[float]:
    """As they are kept: missing is NaN, and what does not fit into 32 bits is refused."""
    kept = np.asarray([math.nan if value is None else value for value in values], np.float64)
    if (kept < np.finfo(np.float32).min).any():
        place = int(np.argmax(kept < np.finfo(np.float32).min))
        raise bad_request("A logprob must be finite.", f"{path}[{place}]", "invalid_value")
    return kept.tolist()
