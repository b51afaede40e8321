"""Record calls that a program sampled elsewhere: ``POST /sessions/{id}/calls``.

A submission has the exact token ids with their logprobs and policy versions, like the reply of an engine. An
unknown logprob is null; a call with one is recorded but not trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np

from instar.gateway.base import bad_request
from instar.gateway.context import GatewayContext
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.dialects.common import decode_body, parse_stop
from instar.gateway.dialects.tokens import NonNegativeInt, TokenParams, check_token_params
from instar.gateway.pipeline.record import Recorder, RequestMeta, SampledReply
from instar.gateway.session_states import SessionState, SessionStates
from instar.record.base import Renderer
from instar.record.graph import MessageGraph
from instar.types import FinishReason, Ids, Json, Message, SamplingParams, Tool, new_id

MAX_SUBMITTED_CALLS = 256

ShortText = Annotated[str, msgspec.Meta(max_length=512)]
Logprob = Annotated[float, msgspec.Meta(le=0)]


class SubmittedToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    name: str
    arguments: str


class SubmittedMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str | None = None
    tool_calls: list[SubmittedToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class SubmittedTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str = ""
    parameters: Json = {}


class CallBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    prompt_ids: list[NonNegativeInt]
    sampled_ids: list[NonNegativeInt]
    logprobs: list[Logprob | None]
    versions: list[NonNegativeInt]
    finish_reason: FinishReason
    behavior_logprobs: list[Logprob | None] | None = None
    params: TokenParams = msgspec.field(default_factory=TokenParams)
    messages: list[SubmittedMessage] | None = None
    tools: list[SubmittedTool] = []
    reply: SubmittedMessage | None = None
    model: ShortText = ""
    parent_id: ShortText | None = None
    client_key: ShortText | None = None


class SubmissionBody(msgspec.Struct, forbid_unknown_fields=True):
    calls: list[CallBody]


_decoder = msgspec.json.Decoder(SubmissionBody)


@dataclass(frozen=True, slots=True)
class SubmittedCall:
    prompt_ids: Ids
    reply: SampledReply
    has_message: bool
    """False if the reply is known only as token ids; its message is then empty."""
    messages: tuple[Message, ...] | None
    """The messages of the prompt, or None if the prompt is known only as token ids."""
    tools: tuple[Tool, ...]
    model: str
    parent_id: str | None
    """The id of the call that this one continues, as the program claims; such a call may not exist."""
    client_key: str | None
    """An idempotency key: a call with the same key is not recorded again."""


class SubmissionService:
    def __init__(
        self, context: GatewayContext, states: SessionStates, recorder: Recorder, renderer: Renderer
    ) -> None:
        self._hasher = context.hasher
        self._states = states
        self._recorder = recorder
        self._renderer = renderer

    async def submit(self, state: SessionState, calls: Sequence[SubmittedCall]) -> list[str]:
        """Record the calls and return their ids, including the ids of calls that were already recorded."""
        ids: list[str] = []
        with self._states.track_call(state):
            graph = await self._states.load_graph(state)
            for i, call in enumerate(calls):
                if call.parent_id is not None and not graph.has_call(call.parent_id):
                    message = f"This session has no call {call.parent_id!r}."
                    raise bad_request(message, f"calls[{i}].parent_id", "invalid_value")
                ids += await self._submit(graph, state, call)
        return ids

    async def _submit(self, graph: MessageGraph, state: SessionState, call: SubmittedCall) -> list[str]:
        prompt_ids = call.prompt_ids.tolist()
        if call.messages is None:
            chain = None
            placement = graph.place_prompt(prompt_ids, self._renderer)
        else:
            chain = graph.match_replies(self._hasher.hash_messages(call.messages, call.tools), call.messages)
            placement = graph.place(chain, call.messages, call.tools, None)
            placement = graph.attach_prompt(placement, call.prompt_ids)
        try:
            if call.client_key and (ids := graph.find_by_idempotency_key(placement.key, call.client_key)):
                return ids
            reply = call.reply
            if not call.has_message:
                reply.message = self._renderer.parse(reply.ids, call.tools)
            request = ModelRequest(
                model=call.model,
                messages=call.messages or (),
                tools=call.tools,
                prompt=None if chain else tuple(prompt_ids),
            )
            meta = RequestMeta(new_id("sub"), request, chain, "tokens", call.client_key)
            place = replace(placement, parent_id=call.parent_id) if call.parent_id is not None else placement
            return await self._recorder.record(state, graph, meta, place, [reply])
        finally:
            graph.release(placement)


def parse_submission(
    body: bytes, vocab_size: int, latest_version: int, *, max_calls: int = MAX_SUBMITTED_CALLS
) -> list[SubmittedCall]:
    """Return the calls of a submission. Raise ApiError (400) with the path of the first invalid value."""
    calls = decode_body(_decoder, body).calls
    if not calls:
        raise bad_request("'calls' is empty.", "calls", "invalid_value")
    if len(calls) > max_calls:
        message = f"There are {len(calls)} calls; at most {max_calls} may be submitted at once."
        raise bad_request(message, "calls", "invalid_value")
    return [_parse_call(call, f"calls[{i}]", vocab_size, latest_version) for i, call in enumerate(calls)]


def _parse_call(call: CallBody, path: str, vocab_size: int, latest_version: int) -> SubmittedCall:
    for name in ("prompt_ids", "sampled_ids"):
        if not getattr(call, name):
            raise bad_request(f"'{path}.{name}' is empty.", f"{path}.{name}", "invalid_value")
        _check_vocabulary(getattr(call, name), vocab_size, f"{path}.{name}")
    for name in ("logprobs", "versions", "behavior_logprobs"):
        _check_length(getattr(call, name), len(call.sampled_ids), f"{path}.{name}")
    version_message = "Version {0} does not exist; the latest version is {1}."
    _check_maximum(call.versions, latest_version, f"{path}.versions", version_message)
    check_token_params(call.params, f"{path}.params.")
    _check_vocabulary(call.params.stop_token_ids, vocab_size, f"{path}.params.stop_token_ids")
    for i, message in enumerate(call.messages or ()):
        _check_message(message, f"{path}.messages[{i}]")
    if call.messages == []:
        raise bad_request(f"'{path}.messages' is empty.", f"{path}.messages", "invalid_value")
    if call.reply is not None:
        if call.reply.role != "assistant":
            message = f"The role of a reply is {call.reply.role!r}; it must be 'assistant'."
            raise bad_request(message, f"{path}.reply.role", "invalid_value")
        _check_message(call.reply, f"{path}.reply")
    return SubmittedCall(
        prompt_ids=np.asarray(call.prompt_ids, np.int32),
        reply=_build_reply(call, path),
        has_message=call.reply is not None,
        messages=None if call.messages is None else tuple(map(_build_message, call.messages)),
        tools=tuple(cast(Tool, msgspec.to_builtins(tool)) for tool in call.tools),
        model=call.model,
        parent_id=call.parent_id,
        client_key=call.client_key,
    )


def _build_reply(call: CallBody, path: str) -> SampledReply:
    body = call.params
    params = SamplingParams(
        max_tokens=body.max_tokens or len(call.sampled_ids),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=parse_stop(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
    )
    missing: list[float | None] = [None] * len(call.sampled_ids)
    reply = SampledReply(
        params,
        ids=call.sampled_ids,
        logprobs=_to_floats(call.logprobs, f"{path}.logprobs"),
        behavior_logprobs=_to_floats(call.behavior_logprobs or missing, f"{path}.behavior_logprobs"),
        versions=call.versions,
        finish_reason=call.finish_reason,
    )
    if call.reply is not None:
        reply.message = _build_message(call.reply)
    return reply


def _build_message(body: SubmittedMessage) -> Message:
    if not body.tool_calls:
        body.tool_calls = None
    return cast(Message, msgspec.to_builtins(body))


def _check_vocabulary(ids: Sequence[int], vocab_size: int, path: str) -> None:
    message = "Token id {0} is not in the vocabulary, whose last id is {1}."
    _check_maximum(ids, vocab_size - 1, path, message)


def _check_maximum(values: Sequence[int], maximum: int, path: str, message: str) -> None:
    if values and max(values) > maximum:
        position = next(i for i, value in enumerate(values) if value > maximum)
        raise bad_request(message.format(values[position], maximum), f"{path}[{position}]", "invalid_value")


def _check_length(values: Sequence[Any] | None, length: int, path: str) -> None:
    if values is not None and len(values) != length:
        message = f"'{path}' has {len(values)} values for {length} sampled tokens."
        raise bad_request(message, path, "invalid_value")


def _check_message(message: SubmittedMessage, path: str) -> None:
    if message.role != "assistant" and (message.tool_calls or message.reasoning is not None):
        name = "tool_calls" if message.tool_calls else "reasoning"
        raise bad_request(
            f"Only messages of the assistant may have '{name}'.", f"{path}.{name}", "invalid_value"
        )
    if (message.role == "tool") != (message.tool_call_id is not None):
        text = "A message with the role 'tool', and no other, must have a 'tool_call_id'."
        raise bad_request(text, f"{path}.tool_call_id", "invalid_value")


def _to_floats(values: Sequence[float | None], path: str) -> list[float]:
    """Return the values with NaN for missing ones. Raise ApiError if a value does not fit into 32 bits."""
    floats = np.asarray([math.nan if value is None else value for value in values], np.float64)
    too_small = floats < np.finfo(np.float32).min
    if too_small.any():
        raise bad_request(
            "A logprob must be finite.", f"{path}[{int(np.argmax(too_small))}]", "invalid_value"
        )
    return floats.tolist()
