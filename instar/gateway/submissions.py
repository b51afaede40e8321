"""``POST /sessions/{id}/calls``: record calls that were sampled outside the gateway.

A submitted call has the sampled token ids, their policy versions, and their ``logprobs`` under the full
softmax at temperature 1. If the tokens were sampled from a different distribution, ``behavior_logprobs`` are
their logprobs under it. Calls with unknown logprobs (null) are recorded but not trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

import msgspec
import msgspec.structs
import numpy as np

from instar.engines.base import EngineInfo
from instar.gateway.base import MAX_SUBMITTED_CALLS, invalid_value
from instar.gateway.context import GatewayContext
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.dialects.common import check_token_ids, parse_stop
from instar.gateway.dialects.tokens import NonNegativeInt, TokenParams, check_token_params
from instar.gateway.pipeline.record import Recorder, RequestMeta, SampledReply
from instar.gateway.session_states import SessionState, SessionStates
from instar.record.base import Renderer
from instar.record.graph import MessageGraph
from instar.types import FinishReason, Json, Message, SamplingParams, Tool, new_id

MIN_TRAINED_LOGPROB = -30.0  # a model does not sample such a token; its importance ratio could overflow

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


class RecordedCalls(msgspec.Struct):
    call_ids: list[str]


@dataclass(frozen=True, slots=True)
class SubmittedCall:
    body: CallBody
    reply: SampledReply
    """The reply. Its message is empty if the body has only the reply's token ids."""
    messages: tuple[Message, ...] | None
    """The prompt's messages, or None if the body has only the prompt's token ids."""
    tools: tuple[Tool, ...]


@dataclass(slots=True, eq=False)
class SubmissionService:
    _context: GatewayContext
    _states: SessionStates
    _recorder: Recorder
    _renderer: Renderer

    async def submit(self, state: SessionState, calls: Sequence[SubmittedCall]) -> list[str]:
        """Record the calls and return their ids. A call with the prompt and ``client_key`` of a recorded call
        is not recorded again. If a ``parent_id`` is unknown, raise ApiError (400) but keep earlier calls."""
        ids: list[str] = []
        with self._states.track_call(state):
            graph = await self._states.load_graph(state)
            for i, call in enumerate(calls):
                parent_id = call.body.parent_id
                if parent_id is not None and not graph.has_call(parent_id):
                    message = f"This session has no call {parent_id!r}; send the id of one of its calls."
                    raise invalid_value(message, f"calls[{i}].parent_id")
                ids += await self._record_call(graph, state, call)
        return ids

    async def _record_call(self, graph: MessageGraph, state: SessionState, call: SubmittedCall) -> list[str]:
        body, reply, chain = call.body, call.reply, None
        if call.messages is None:
            placement = graph.place_prompt(body.prompt_ids, self._renderer)
        else:
            chain = self._context.hasher.hash_messages(call.messages, call.tools)
            chain = graph.match_replies(chain, call.messages)
            placement = graph.place(chain, call.messages, call.tools, None)
            placement = graph.attach_prompt(placement, np.asarray(body.prompt_ids, np.int32))
        placement = graph.register(placement)
        try:
            if body.client_key and (ids := graph.find_recorded(placement.key, body.client_key)):
                return ids
            if body.reply is None:
                reply.message = self._renderer.parse(reply.ids, call.tools)
            prompt = None if chain else tuple(body.prompt_ids)
            request = ModelRequest(body.model, call.messages or (), call.tools, prompt)
            meta = RequestMeta(new_id("sub"), request, chain, "tokens", body.client_key)
            recorded = replace(placement, parent_id=body.parent_id or placement.parent_id)
            calls = await self._recorder.record(state, graph, meta, recorded, [reply])
            return [recorded_call.call_id for recorded_call in calls]
        finally:
            graph.release(placement)


def parse_submission(
    calls: Sequence[CallBody], info: EngineInfo, latest_version: int, *, max_calls: int = MAX_SUBMITTED_CALLS
) -> list[SubmittedCall]:
    """Return the submitted calls. Raise ApiError (400) with the path of the first invalid value."""
    if not calls:
        raise invalid_value("'calls' is empty; send at least one call.", "calls")
    if len(calls) > max_calls:
        message = f"The submission has {len(calls)} calls; at most {max_calls} are allowed per request."
        raise invalid_value(message, "calls")
    return [_parse_call(call, f"calls[{i}]", info, latest_version) for i, call in enumerate(calls)]


def _parse_call(call: CallBody, path: str, info: EngineInfo, latest_version: int) -> SubmittedCall:
    vocab_size, count = info.vocab_size, len(call.prompt_ids) + len(call.sampled_ids)
    if count > info.max_context:
        message = f"The call has {count} tokens; at most {info.max_context} fit into the model's context."
        raise invalid_value(message, path)
    for name in ("prompt_ids", "sampled_ids"):
        if not getattr(call, name):
            raise invalid_value(f"'{path}.{name}' is empty; send at least one token id.", f"{path}.{name}")
        check_token_ids(getattr(call, name), vocab_size, f"{path}.{name}")
    for name in ("logprobs", "versions", "behavior_logprobs"):
        values = getattr(call, name)
        if values is not None and len(values) != len(call.sampled_ids):
            message = f"'{path}.{name}' has {len(values)} values; send {len(call.sampled_ids)}, one per id."
            raise invalid_value(message, f"{path}.{name}")
    if max(call.versions) > latest_version:
        position = next(i for i, version in enumerate(call.versions) if version > latest_version)
        message = f"Version {call.versions[position]} does not exist; the latest version is {latest_version}."
        raise invalid_value(message, f"{path}.versions[{position}]")
    check_token_params(call.params, f"{path}.params.")
    check_token_ids(call.params.stop_token_ids, vocab_size, f"{path}.params.stop_token_ids")
    for i, message in enumerate(call.messages or ()):
        _check_message(message, f"{path}.messages[{i}]")
    if call.messages == []:
        raise invalid_value(f"'{path}.messages' is empty; add a message or leave it out.", f"{path}.messages")
    if call.reply is not None:
        if call.reply.role != "assistant":
            message = f"The role of the reply is {call.reply.role!r}; it must be 'assistant'."
            raise invalid_value(message, f"{path}.reply.role")
        _check_message(call.reply, f"{path}.reply")
    return SubmittedCall(
        call,
        _build_reply(call, path),
        None if call.messages is None else tuple(map(_build_message, call.messages)),
        tuple(cast(Tool, msgspec.to_builtins(tool)) for tool in call.tools),
    )


def _build_reply(call: CallBody, path: str) -> SampledReply:
    settings: dict[str, Any] = msgspec.structs.asdict(call.params) | {
        "max_tokens": call.params.max_tokens or len(call.sampled_ids),
        "stop": parse_stop(call.params.stop),
        "stop_token_ids": tuple(call.params.stop_token_ids),
    }
    behavior_logprobs = call.behavior_logprobs or [None] * len(call.sampled_ids)
    reply = SampledReply(
        SamplingParams(**settings),
        ids=call.sampled_ids,
        logprobs=_to_floats(call.logprobs, f"{path}.logprobs"),
        behavior_logprobs=_to_floats(behavior_logprobs, f"{path}.behavior_logprobs"),
        versions=call.versions,
        finish_reason=call.finish_reason,
    )
    if min(reply.logprobs) < MIN_TRAINED_LOGPROB:
        reply.source_untrainable_reason = f"a logprob is below {MIN_TRAINED_LOGPROB:g}"
    if call.reply is not None:
        reply.message = _build_message(call.reply)
    return reply


def _build_message(body: SubmittedMessage) -> Message:
    if not body.tool_calls:
        body.tool_calls = None
    return cast(Message, msgspec.to_builtins(body))


def _check_message(message: SubmittedMessage, path: str) -> None:
    if message.role != "assistant" and (message.tool_calls or message.reasoning is not None):
        name = "tool_calls" if message.tool_calls else "reasoning"
        text = f"Only assistant messages may have '{name}'; this message has the role {message.role!r}."
        raise invalid_value(text, f"{path}.{name}")
    if (message.role == "tool") != (message.tool_call_id is not None):
        problem = "must have a 'tool_call_id'" if message.role == "tool" else "must not have a 'tool_call_id'"
        raise invalid_value(f"A {message.role} message {problem}.", f"{path}.tool_call_id")


def _to_floats(values: Sequence[float | None], path: str) -> list[float]:
    """Replace None with NaN. Raise ApiError (400) if a value is below the float32 range."""
    floats = np.asarray([math.nan if value is None else value for value in values], np.float64)
    is_below_range = floats < np.finfo(np.float32).min
    if is_below_range.any():
        position = int(np.argmax(is_below_range))
        message = f"The logprob is {floats[position]:g}; it must be a 32-bit float, at least -3.4e38."
        raise invalid_value(message, f"{path}[{position}]")
    return floats.tolist()
