"""OpenAI's Responses API.

A request that cannot be honoured is never silently changed: ``ModelRequest.unsupported_error`` names the
field. Some fields that agents send by default have no effect on the sampled tokens, or ask for something that
nobody can guarantee. These are accepted as hints:

    field                        reason
    tool_choice "required", or   Forcing a tool call would change the distribution that is sampled from, and
      one that names a tool      the samples would no longer be the policy's. The tools are offered.
    parallel_tool_calls: false   The same: all calls of the one sampled reply are returned.
    tools[].strict, .format      The same, for the form of a call; the model is shown the format.
    reasoning, text.verbosity    Their meaning is up to the provider; our model has no such setting.
    include "reasoning.encrypted_content"
                                 Our reasoning is returned as text, which serves the same purpose.
    store                        Every response is recorded and can be continued by its id.
    max_tool_calls               It limits calls of hosted tools, of which there are none.
    service_tier, prompt_cache_retention, prompt_cache_options
                                 They concern the provider's queues and caches.
    user, safety_identifier, metadata, client_metadata, prompt_cache_key
                                 They identify the session (``ModelRequest.session_hints``).

Tools that agents list by default and that only a provider has: ``responses_items.IGNORED_TOOLS``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from instar.gateway.base import ApiError
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, StreamWriter, TokenLogprob
from instar.gateway.dialects.common import (
    RANGES,
    SESSION_KEYS,
    check_ranges,
    check_tool_is_listed,
    decode_body,
    find_unsupported_values,
    format_named_event,
    format_openai_error,
    missing_parameter,
    no_tools_error,
    unsupported_value,
)
from instar.gateway.dialects.responses_items import RequestTools, parse_items, parse_tools
from instar.gateway.dialects.responses_output import ResponseOutput, reply_deltas
from instar.record.base import ReplyDelta
from instar.types import Json, Message
from instar.wire.openai import ResponsesReasoning, ResponsesRequestBody, ResponsesToolChoice

_decoder = msgspec.json.Decoder(ResponsesRequestBody)

_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "background": (False,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "conversation": (),
    "prompt": (),
    "moderation": (),
}
_MAX_INT = (1 << 31) - 1
_RANGES = {
    "max_output_tokens": (1, _MAX_INT),
    "max_tool_calls": (1, _MAX_INT),
    "temperature": RANGES["temperature"],
    "top_p": RANGES["top_p"],
}
_LOGPROBS = "message.output_text.logprobs"
_SUPPORTED_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")


@dataclass(frozen=True, slots=True)
class ParsedResponsesRequest:
    body: ResponsesRequestBody
    tools: RequestTools


def _find_unsupported(body: ResponsesRequestBody) -> list[ApiError]:
    errors = find_unsupported_values(body, _SUPPORTED_VALUES)
    if body.text and body.text.format and body.text.format.type != "text":
        message = f"Unsupported format {body.text.format.type!r}; supported: 'text'."
        errors.append(unsupported_value(message, "text.format.type"))
    for i, included in enumerate(body.include or ()):
        if included not in _SUPPORTED_INCLUDES:
            supported = ", ".join(map(repr, _SUPPORTED_INCLUDES))
            message = f"Unsupported {included!r}; supported: {supported}."
            errors.append(unsupported_value(message, f"include[{i}]"))
    choice = body.tool_choice
    if isinstance(choice, ResponsesToolChoice) and choice.type not in ("function", "custom"):
        message = f"Unsupported choice {choice.type!r}; supported: 'function', 'custom'."
        errors.append(unsupported_value(message, "tool_choice.type"))
    return errors


def _check_tool_choice(choice: str | ResponsesToolChoice | None, tools: RequestTools) -> None:
    if choice == "required" and not tools.offered:
        raise no_tools_error()
    if isinstance(choice, ResponsesToolChoice) and choice.type in ("function", "custom"):
        check_tool_is_listed(choice.name, {tool.name for tool in tools.by_name.values()})


def _session_hints(body: ResponsesRequestBody) -> Iterable[str]:
    for metadata in (body.metadata or {}, body.client_metadata or {}):
        for key in SESSION_KEYS:
            if isinstance(value := metadata.get(key), str) and value:
                yield f"{key}:{value}"
    for kind in ("prompt_cache_key", "safety_identifier", "user"):
        if value := getattr(body, kind):
            yield f"{kind}:{value}"


def _parse_input(body: ResponsesRequestBody, errors: list[ApiError]) -> list[Message]:
    if isinstance(body.input, str):
        return [Message(role="user", content=body.input)]
    if not body.input and body.previous_response_id is None:
        raise missing_parameter("input")
    return parse_items(body.input or (), errors)


def _build_request(body: ResponsesRequestBody) -> ModelRequest:
    check_ranges(body, _RANGES)
    errors = _find_unsupported(body)
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    messages = (*instructions, *_parse_input(body, errors))
    tools = parse_tools(body.tools or (), errors)
    _check_tool_choice(body.tool_choice, tools)
    return ModelRequest(
        model=body.model,
        messages=messages,
        tools=() if body.tool_choice == "none" else tools.offered,
        previous_response_id=body.previous_response_id,
        instruction_count=len(instructions),
        session_hints=tuple(dict.fromkeys(_session_hints(body))),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=bool(body.stream),
        include_usage=True,
        logprobs=_LOGPROBS in (body.include or ()),
        unsupported_error=errors[0] if errors else None,
        parsed_body=ParsedResponsesRequest(body, tools),
    )


# --- responses ----------------------------------------------------------------------------------


def _format_head(request_id: str, request: ModelRequest) -> Json:
    """Return the fields that are the same in every event of one response."""
    parsed: ParsedResponsesRequest = request.parsed_body
    body = parsed.body
    reasoning = body.reasoning or ResponsesReasoning()
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
        # Encoded once, because it is long and occurs three times in a stream. orjson would reject numbers
        # beyond 64 bits.
        "tools": orjson.Fragment(msgspec.json.encode(parsed.tools.echo)),
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _format_end(output: ResponseOutput, choice: ReplyChoice) -> Json:
    """Return the fields that change when the response ends."""
    is_cut = choice.finish_reason == "length"
    return {
        "status": "incomplete" if is_cut else "completed",
        "completed_at": None if is_cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output.items,
        "usage": _format_usage(choice),
    }


def _item_status(choice: ReplyChoice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _format_usage(choice: ReplyChoice) -> Json:
    return {
        "input_tokens": choice.prompt_tokens,
        "input_tokens_details": {"cached_tokens": choice.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": choice.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # not counted separately
        "total_tokens": choice.prompt_tokens + choice.sampled_tokens,
    }


class ResponsesStreamWriter(StreamWriter):
    def __init__(self, request_id: str, request: ModelRequest) -> None:
        self._head = _format_head(request_id, request)
        self._output = ResponseOutput(request_id, request.parsed_body.tools.by_name)
        self._event_count = 0

    def begin(self, index: int) -> bytes:
        return self._format_events(
            [{"type": f"response.{word}", "response": self._head} for word in ("created", "in_progress")]
        )

    def write_deltas(
        self, index: int, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]
    ) -> bytes:
        return self._format_events(self._output.add_deltas(deltas, logprobs))

    def finish(self, choices: Sequence[ReplyChoice]) -> bytes:
        events = self._output.close(_item_status(choices[0]))
        response = {**self._head, **_format_end(self._output, choices[0])}
        return self._format_events(
            [*events, {"type": f"response.{response['status']}", "response": response}]
        )

    def write_error(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": error.message}}
        response = {**self._head, **failed, "output": self._output.items}
        return self._format_events([{"type": "response.failed", "response": response}])

    def _format_events(self, events: Iterable[Json]) -> bytes:
        out: list[bytes] = []
        for event in events:
            numbered = orjson.dumps({**event, "sequence_number": self._event_count})
            out.append(format_named_event(event, numbered))
            self._event_count += 1
        return b"".join(out)


class ResponsesDialect(Dialect):
    name = "responses"
    path = "/responses"
    messages_param = "input"
    id_prefix = "resp"
    count_path = "/responses/input_tokens"

    def parse_request(self, body: bytes) -> ModelRequest:
        return _build_request(decode_body(_decoder, body))

    def format_response(
        self, request_id: str, request: ModelRequest, choices: Sequence[ReplyChoice]
    ) -> bytes:
        choice = choices[0]
        output = ResponseOutput(request_id, request.parsed_body.tools.by_name)
        output.add_deltas(reply_deltas(choice.message), choice.logprobs)
        output.close(_item_status(choice))
        return orjson.dumps({**_format_head(request_id, request), **_format_end(output, choice)})

    def create_stream_writer(self, request_id: str, request: ModelRequest) -> StreamWriter:
        return ResponsesStreamWriter(request_id, request)

    def format_error(self, error: ApiError) -> bytes:
        return orjson.dumps(format_openai_error(error))

    def parse_count_request(self, body: bytes) -> ModelRequest:
        return self.parse_request(body)

    def format_count(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})
