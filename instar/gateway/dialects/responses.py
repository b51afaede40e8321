"""OpenAI's Responses.

What cannot be honoured is never passed over in silence: it becomes the request's ``refusal``, which names
it. Some of what agents send by default asks for nothing that a sampled token could show, or for what no one
can promise; those are taken as hints:

    field                        why it is taken
    tool_choice "required", or   A model cannot be made to call a tool without bending what it samples, and
      one that names a tool      bent samples are not the policy's. The tools are offered.
    parallel_tool_calls: false   As above: the model is asked once, and its calls are all told.
    tools[].strict, .format      As above, for the form of a call; the model is shown the format.
    reasoning, text.verbosity    What a provider makes of them is its own; the model here has one way.
    include "reasoning.encrypted_content"
                                 Our reasoning is told openly, which serves the same.
    store                        Every answer is recorded, and can be continued by its id.
    max_tool_calls               Counts the calls of hosted tools, of which there are none.
    service_tier, prompt_cache_retention, prompt_cache_options
                                 The provider's queues and caches.
    user, safety_identifier, metadata, client_metadata, prompt_cache_key
                                 Tell whose session this is (`Request.identity`).

Tools that agents list as a matter of course and that only a provider has: `responses_items.LEFT_OUT`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import orjson

from instar.gateway.base import ApiError, bad_request
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, StreamWriter, TokenLogprob
from instar.gateway.dialects.openai_common import (
    RANGES,
    check_ranges,
    decode_body,
    find_unsupported_values,
    unsupported_value,
)
from instar.gateway.dialects.openai_errors import format_openai_error
from instar.gateway.dialects.responses_items import Item, RequestTools, ToolSpec, parse_items, parse_tools
from instar.gateway.dialects.responses_output import ResponseOutput, reply_deltas
from instar.record.base import ReplyDelta
from instar.types import Json, Message

# --- the wire, in -------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class TextFormat(msgspec.Struct):
    type: str


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ToolChoice(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None


class Body(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    # By these an agent may mean its session.
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    # Hints, as the table above says.
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # Taken at the values that ask for what is done anyway.
    top_logprobs: int | None = None
    background: bool | None = None
    truncation: str | None = None
    context_management: list[Any] | None = None
    # Known, and never taken.
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None


_decoder = msgspec.json.Decoder(Body)

_ONLY: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "background": (False,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "conversation": (),
    "prompt": (),
    "moderation": (),
}
_MANY = (1 << 31) - 1
_RANGES = {
    "max_output_tokens": (1, _MANY),
    "max_tool_calls": (1, _MANY),
    "temperature": RANGES["temperature"],
    "top_p": RANGES["top_p"],
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDE = (_LOGPROBS, "reasoning.encrypted_content")
_SESSION_KEYS = ("session_id", "conversation_id", "thread_id", "chat_id")


@dataclass(frozen=True, slots=True)
class ParsedResponsesRequest:
    """The body, and its tools as they were read."""

    body: Body
    tools: RequestTools


def _refusals(body: Body) -> list[ApiError]:
    refused = find_unsupported_values(body, _ONLY)
    if body.text and body.text.format and body.text.format.type != "text":
        told = f"Unsupported format {body.text.format.type!r}; supported: 'text'."
        refused.append(unsupported_value(told, "text.format.type"))
    for i, included in enumerate(body.include or ()):
        if included not in _INCLUDE:
            said = ", ".join(map(repr, _INCLUDE))
            refused.append(
                unsupported_value(f"Unsupported {included!r}; supported: {said}.", f"include[{i}]")
            )
    if isinstance(body.tool_choice, ToolChoice) and body.tool_choice.type not in ("function", "custom"):
        told = f"Unsupported choice {body.tool_choice.type!r}; supported: 'function', 'custom'."
        refused.append(unsupported_value(told, "tool_choice.type"))
    return refused


def _check_tool_choice(choice: str | ToolChoice | None, tools: RequestTools) -> None:
    if choice == "required" and not tools.offered:
        raise bad_request("A tool is required and there is none in 'tools'.", "tool_choice", "invalid_value")
    if not isinstance(choice, ToolChoice) or choice.type not in ("function", "custom"):
        return
    if choice.name not in {tool.name for tool in tools.by_name.values()}:
        raise bad_request(f"The tool {choice.name!r} is not in 'tools'.", "tool_choice", "invalid_value")


def _identity(body: Body) -> Iterable[str]:
    for named in (body.metadata or {}, body.client_metadata or {}):
        for key in _SESSION_KEYS:
            if isinstance(value := named.get(key), str) and value:
                yield f"{key}:{value}"
    for kind in ("prompt_cache_key", "safety_identifier", "user"):
        if value := getattr(body, kind):
            yield f"{kind}:{value}"


def _messages(body: Body, refused: list[ApiError]) -> list[Message]:
    if isinstance(body.input, str):
        return [Message(role="user", content=body.input)]
    if not body.input and body.previous_response_id is None:
        raise bad_request("Missing required parameter: 'input'.", "input", "missing_required_parameter")
    return parse_items(body.input or (), refused)


def _request(body: Body) -> ModelRequest:
    check_ranges(body, _RANGES)
    refused = _refusals(body)
    leading = [Message(role="system", content=body.instructions)] if body.instructions else []
    messages = (*leading, *_messages(body, refused))
    tools = parse_tools(body.tools or (), refused)
    _check_tool_choice(body.tool_choice, tools)
    return ModelRequest(
        model=body.model,
        messages=messages,
        tools=() if body.tool_choice == "none" else tools.offered,
        previous_response_id=body.previous_response_id,
        instruction_count=len(leading),
        session_hints=tuple(dict.fromkeys(_identity(body))),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=bool(body.stream),
        include_usage=True,
        logprobs=_LOGPROBS in (body.include or ()),
        unsupported_error=refused[0] if refused else None,
        parsed_body=ParsedResponsesRequest(body, tools),
    )


# --- the wire, out ------------------------------------------------------------------------------


def _head(request_id: str, request: ModelRequest) -> Json:
    """What every telling of one response shares."""
    asked: ParsedResponsesRequest = request.parsed_body
    body = asked.body
    reasoning = body.reasoning or Reasoning()
    return {
        "id": request_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
        # Told three times in a stream, and long: written once. Numbers may be longer than orjson's.
        "tools": orjson.Fragment(msgspec.json.encode(asked.tools.echo)),
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _ended(output: ResponseOutput, choice: ReplyChoice) -> Json:
    """What a response has gained at its end."""
    cut = choice.finish_reason == "length"
    return {
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output.items,
        "usage": _usage(choice),
    }


def _item_status(choice: ReplyChoice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _usage(choice: ReplyChoice) -> Json:
    return {
        "input_tokens": choice.prompt_tokens,
        "input_tokens_details": {"cached_tokens": choice.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": choice.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # not counted apart
        "total_tokens": choice.prompt_tokens + choice.sampled_tokens,
    }


class ResponsesStreamWriter(StreamWriter):
    def __init__(self, request_id: str, request: ModelRequest) -> None:
        self._head = _head(request_id, request)
        self._output = ResponseOutput(request_id, request.parsed_body.tools.by_name)
        self._told = 0

    def begin(self, index: int) -> bytes:
        return self._tell(
            [{"type": f"response.{word}", "response": self._head} for word in ("created", "in_progress")]
        )

    def write_deltas(
        self, index: int, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]
    ) -> bytes:
        return self._tell(self._output.add_deltas(deltas, logprobs))

    def finish(self, choices: Sequence[ReplyChoice]) -> bytes:
        events = self._output.close(_item_status(choices[0]))
        response = {**self._head, **_ended(self._output, choices[0])}
        return self._tell([*events, {"type": f"response.{response['status']}", "response": response}])

    def write_error(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": error.message}}
        response = {**self._head, **failed, "output": self._output.items}
        return self._tell([{"type": "response.failed", "response": response}])

    def _tell(self, events: Iterable[Json]) -> bytes:
        told: list[bytes] = []
        for event in events:
            numbered = orjson.dumps({**event, "sequence_number": self._told})
            told.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), numbered))
            self._told += 1
        return b"".join(told)


class ResponsesDialect(Dialect):
    name = "responses"
    path = "/responses"
    messages_param = "input"
    id_prefix = "resp"
    count_path = "/responses/input_tokens"

    def parse_request(self, body: bytes) -> ModelRequest:
        return _request(decode_body(_decoder, body))

    def format_response(
        self, request_id: str, request: ModelRequest, choices: Sequence[ReplyChoice]
    ) -> bytes:
        choice = choices[0]
        output = ResponseOutput(request_id, request.parsed_body.tools.by_name)
        output.add_deltas(reply_deltas(choice.message), choice.logprobs)
        output.close(_item_status(choice))
        return orjson.dumps({**_head(request_id, request), **_ended(output, choice)})

    def create_stream_writer(self, request_id: str, request: ModelRequest) -> StreamWriter:
        return ResponsesStreamWriter(request_id, request)

    def format_error(self, error: ApiError) -> bytes:
        return orjson.dumps(format_openai_error(error))

    def parse_count_request(self, body: bytes) -> ModelRequest:
        return self.parse_request(body)

    def format_count(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})
