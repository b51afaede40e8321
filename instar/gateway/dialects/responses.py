"""OpenAI's Responses API. These request fields are accepted as hints (see ``base.py``):

    sampling        parallel_tool_calls: false and tools[].strict, unless tool_choice requires a call;
                    tools[].format (the model is shown the format)
    effort          reasoning (for its effort, see ``ModelRequest.reasoning``), text.verbosity
    provider        service_tier, prompt_cache_retention, prompt_cache_options
    session         user, safety_identifier, metadata, client_metadata, prompt_cache_key
    include "reasoning.encrypted_content"  Reasoning is returned as text, which serves the same purpose.
    max_tool_calls  It limits hosted tool calls, and no hosted tools are offered.

Every reply is recorded. With ``store: false``, requests cannot refer to it by an id.
``responses_items.IGNORED_TOOLS`` are OpenAI's tools that agents list by default. The model does not see them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from instar.gateway.base import ApiError
from instar.gateway.dialects import common
from instar.gateway.dialects.base import (
    Dialect,
    ModelRequest,
    ReplyChoice,
    ReplyChoices,
    StreamWriter,
    TokenLogprobs,
)
from instar.gateway.dialects.responses_items import RequestTools, parse_items, parse_tools
from instar.gateway.dialects.responses_output import ResponseOutput
from instar.record.base import ReplyDelta
from instar.types import Json, Message
from instar.wire import openai as wire

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
    "temperature": common.RANGES["temperature"],
    "top_p": common.RANGES["top_p"],
}
_INCLUDE_LOGPROBS = "message.output_text.logprobs"
_REPEATED_FIELDS = (
    "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "previous_response_id",
    "prompt_cache_key", "reasoning", "safety_identifier", "temperature", "text", "tool_choice", "top_p",
    "user",
)  # fmt: skip
"""The request fields that a response repeats, except those that a recorded call contains."""
_SUPPORTED_INCLUDES = (_INCLUDE_LOGPROBS, "reasoning.encrypted_content")


@dataclass(frozen=True, slots=True)
class ParsedResponsesRequest:
    body: wire.ResponsesRequestBody
    tools: RequestTools


def _find_unsupported(body: wire.ResponsesRequestBody) -> list[ApiError]:
    errors = common.find_unsupported_values(body, _SUPPORTED_VALUES)
    for i, included in enumerate(body.include or ()):
        if included not in _SUPPORTED_INCLUDES:
            supported = ", ".join(map(repr, _SUPPORTED_INCLUDES))
            message = f"Unsupported value in 'include': {included!r}; supported: {supported}."
            errors.append(common.unsupported_value(message, f"include[{i}]"))
    choice = body.tool_choice
    if isinstance(choice, wire.ResponsesToolChoice) and choice.type not in ("function", "custom"):
        message = f"Unsupported tool choice {choice.type!r}; supported: 'function', 'custom'."
        errors.append(common.unsupported_value(message, "tool_choice.type"))
    return errors


def format_head(request_id: str, request: ModelRequest) -> Json:
    """Return the response fields that are known before the output."""
    parsed: ParsedResponsesRequest = request.parsed_body
    body = parsed.body
    reasoning = body.reasoning or wire.ResponsesReasoning()
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
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": msgspec.to_builtins((body.text and body.text.format) or {"type": "text"})},
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
        # Encode the tools only once, because the list is long and a stream contains it three times. Use
        # msgspec, because orjson rejects integers beyond 64 bits.
        "tools": orjson.Fragment(msgspec.json.encode(parsed.tools.echo)),
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def finish_response(head: Json, output: ResponseOutput, choice: ReplyChoice) -> tuple[Json, list[Json]]:
    """Finish the output. Return the complete response and the last output events."""
    is_truncated = choice.finish_reason == "length"
    status = "incomplete" if is_truncated else "completed"
    events = output.close(status)
    response = {
        **head,
        "status": status,
        "completed_at": None if is_truncated else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
        "output": output.items,
        "usage": {
            "input_tokens": choice.prompt_tokens,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": choice.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},  # Reasoning is not counted separately.
            "total_tokens": choice.prompt_tokens + choice.sampled_tokens,
        },
    }
    return response, events


class ResponsesStreamWriter(StreamWriter):
    def __init__(self, request_id: str, request: ModelRequest) -> None:
        super().__init__(request_id, request)
        self._head = format_head(request_id, request)
        self._output = ResponseOutput(request_id, request.parsed_body.tools.by_name)
        self._event_count = 0

    def begin(self, index: int) -> bytes:
        types = ("response.created", "response.in_progress")
        return self._format_events([{"type": type_, "response": self._head} for type_ in types])

    def write_deltas(self, index: int, deltas: Sequence[ReplyDelta], logprobs: TokenLogprobs) -> bytes:
        return self._format_events(self._output.add_deltas(deltas, logprobs))

    def finish(self, choices: ReplyChoices) -> bytes:
        response, events = finish_response(self._head, self._output, choices[0])
        events.append({"type": f"response.{response['status']}", "response": response})
        return self._format_events(events)

    def write_error(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": error.message}}
        response = {**self._head, **failed, "output": self._output.items}
        return self._format_events([{"type": "response.failed", "response": response}])

    def _format_events(self, events: Iterable[Json]) -> bytes:
        formatted: list[bytes] = []
        for event in events:
            data = orjson.dumps({**event, "sequence_number": self._event_count})
            formatted.append(common.format_named_event(event, data))
            self._event_count += 1
        return b"".join(formatted)


class ResponsesDialect(Dialect):
    name = "responses"
    path = "/responses"
    messages_param = "input"
    id_prefix = "resp"
    count_path = "/responses/input_tokens"
    stream_writer_class = ResponsesStreamWriter
    decoder = msgspec.json.Decoder(wire.ResponsesRequestBody)
    ranges = _RANGES
    response_type = wire.ResponsesResponse

    def parse_request(self, body: bytes) -> ModelRequest:
        parsed = common.decode_body(self.decoder, body)
        common.check_ranges(parsed, self.ranges)
        return self._build_request(parsed, None)

    def resolve_references(self, request: ModelRequest, replies: Mapping[str, Message]) -> ModelRequest:
        return self._build_request(request.parsed_body.body, replies)

    def _build_request(
        self, parsed: wire.ResponsesRequestBody, replies: Mapping[str, Message] | None
    ) -> ModelRequest:
        """Return the request. ``replies`` has the replies of the responses that it refers to, by response id,
        or is None if they were not looked up yet."""
        errors = _find_unsupported(parsed)
        referenced_ids: tuple[str, ...] = ()
        instructions = [Message(role="system", content=parsed.instructions)] if parsed.instructions else []
        if isinstance(parsed.input, str):
            messages = [Message(role="user", content=parsed.input)]
        elif not parsed.input and parsed.previous_response_id is None:
            raise common.missing_parameter("input")
        else:
            messages, referenced_ids = parse_items(parsed.input or (), errors, replies)
        tools = parse_tools(parsed.tools or (), errors)
        effort = parsed.reasoning.effort if parsed.reasoning else None
        choice = parsed.tool_choice
        if choice == "required" and not tools.offered:
            raise common.no_tools_error()
        required_tool = common.ANY_TOOL if choice == "required" else None
        if isinstance(choice, wire.ResponsesToolChoice) and choice.type in ("function", "custom"):
            common.check_tool_is_listed(choice.name, {tool.name for tool in tools.by_name.values()})
            required_tool = next(key for key, tool in tools.by_name.items() if tool.name == choice.name)
        offered = () if choice == "none" else tools.offered
        required_output = common.parse_required_output(
            parsed.text and parsed.text.format,
            "text.format",
            offered,
            required_tool,
            errors,
            is_single_call=parsed.parallel_tool_calls is False,
        )
        return ModelRequest(
            model=parsed.model,
            messages=(*instructions, *messages),
            tools=offered,
            required_output=required_output,
            previous_response_id=parsed.previous_response_id,
            referenced_ids=referenced_ids,
            instruction_count=len(instructions),
            session_hints=common.parse_session_hints(parsed, parsed.metadata, parsed.client_metadata),
            user_ids=common.parse_user_ids(parsed, parsed.metadata, parsed.client_metadata),
            max_tokens=parsed.max_output_tokens,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            reasoning={"reasoning.effort": effort} if effort else {},
            stream=bool(parsed.stream),
            include_usage=True,
            logprobs=_INCLUDE_LOGPROBS in (parsed.include or ()),
            unsupported=tuple(errors),
            parsed_body=ParsedResponsesRequest(parsed, tools),
        )

    def build_response_fields(self, request: ModelRequest) -> Json:
        parsed: ParsedResponsesRequest = request.parsed_body
        if parsed.body.store is False:
            return {"store": False}
        body = {name: getattr(parsed.body, name) for name in _REPEATED_FIELDS}
        return {
            "store": True,
            "instruction_count": request.instruction_count,
            "body": msgspec.to_builtins({name: value for name, value in body.items() if value is not None}),
            "tools": parsed.tools.to_stored_names(),
        }

    def format_response(self, request_id: str, request: ModelRequest, choices: ReplyChoices) -> bytes:
        choice = choices[0]
        output = ResponseOutput(request_id, request.parsed_body.tools.by_name)
        output.add_deltas(common.split_reply(choice.message), choice.logprobs)
        return orjson.dumps(finish_response(format_head(request_id, request), output, choice)[0])

    def format_count(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})
