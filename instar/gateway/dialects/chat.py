"""OpenAI's chat completions.

A request that cannot be honoured is never silently changed: ``ModelRequest.unsupported_error`` names the
field. Some fields that agents send by default ask for something that nobody can guarantee, or that has no
effect on the sampled tokens. These are accepted as hints:

    field                        reason
    tool_choice "required", or   Forcing a tool call would change the distribution that is sampled from, and
      one that names a function  the samples would no longer be the policy's. The tools are offered, and
                                 ``finish_reason`` shows if one was called. (smolagents, pydantic-ai and
                                 LangChain's structured output send it by default.)
    parallel_tool_calls: false   The same: all calls of the one sampled reply are returned.
    tools[].function.strict      The same, for the form of the arguments.
    reasoning_effort, verbosity  Their meaning is up to the provider; our model has no such setting.
    prediction                   A guess of the reply that speeds it up; it changes no token.
    service_tier, prompt_cache_retention, prompt_cache_options
                                 They concern the provider's queues and caches.
    user, safety_identifier, metadata, prompt_cache_key
                                 They identify the session (``ModelRequest.session_hints``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from instar.gateway.base import ApiError, bad_request
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, StreamWriter, TokenLogprob
from instar.gateway.dialects.common import (
    RANGES,
    SESSION_KEYS,
    check_ranges,
    check_tool_is_listed,
    decode_body,
    find_unsupported_values,
    format_event,
    format_logprob,
    format_openai_error,
    format_stream_end,
    format_tool_call,
    format_usage,
    no_tools_error,
    parse_stop,
    placeholder,
    unsupported_value,
)
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.types import Json, Message, Tool, ToolCall
from instar.wire.openai import ChatContentPart, ChatRequestBody, ChatRequestMessage, ChatToolChoice

_decoder = msgspec.json.Decoder(ChatRequestBody)

_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "chat_template_kwargs": ({},),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
}
_RANGES = {**RANGES, "max_completion_tokens": RANGES["max_tokens"]}
_FINISH_REASONS = {"stop": "stop", "length": "length", "aborted": "stop"}

# --- requests -----------------------------------------------------------------------------------


def _parse_request(raw: bytes) -> ModelRequest:
    body = decode_body(_decoder, raw)
    check_ranges(body, _RANGES)
    if not body.messages:
        raise bad_request("'messages' is empty.", "messages", "invalid_value")
    errors = _find_unsupported(body)
    messages = tuple(
        _parse_message(message, f"messages[{i}]", errors) for i, message in enumerate(body.messages)
    )
    return ModelRequest(
        model=body.model,
        messages=messages,
        tools=_parse_tools(body),
        session_hints=_session_hints(body),
        n=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=parse_stop(body.stop),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=bool(body.logprobs),
        unsupported_error=errors[0] if errors else None,
    )


def _find_unsupported(body: ChatRequestBody) -> list[ApiError]:
    errors = find_unsupported_values(body, _SUPPORTED_VALUES)
    if body.response_format and body.response_format.type != "text":
        message = f"Unsupported response_format {body.response_format.type!r}; supported: 'text'."
        errors.append(unsupported_value(message, "response_format.type"))
    if body.functions:
        errors.append(_deprecated("functions", "tools"))
    if body.function_call is not None:
        errors.append(_deprecated("function_call", "tool_choice"))
    return errors


def _deprecated(field: str, replacement: str, path: str = "") -> ApiError:
    message = f"The deprecated field '{field}' is not supported; use '{replacement}'."
    return unsupported_value(message, path or field)


def _parse_message(wire: ChatRequestMessage, path: str, errors: list[ApiError]) -> Message:
    # The result must not depend on earlier messages: the request cache parses only the new ones.
    role = "system" if wire.role == "developer" else wire.role
    message = Message(role=role, content=_parse_content(wire, path, errors))
    if wire.tool_calls:
        if role != "assistant":
            raise bad_request("Only an assistant's message may have 'tool_calls'.", f"{path}.tool_calls")
        message["tool_calls"] = [
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in wire.tool_calls
        ]
    if wire.function_call is not None:
        errors.append(_deprecated("function_call", "tool_calls", f"{path}.function_call"))
    if wire.audio is not None:
        errors.append(unsupported_value("Audio is not supported.", f"{path}.audio"))
    if role == "assistant" and (reasoning := wire.reasoning_content or wire.reasoning):
        message["reasoning"] = reasoning
    if wire.tool_call_id is not None:
        message["tool_call_id"] = wire.tool_call_id
    if wire.name is not None:
        message["name"] = wire.name
    return message


def _parse_content(wire: ChatRequestMessage, path: str, errors: list[ApiError]) -> str:
    content = wire.content or wire.refusal
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_parse_part(part, f"{path}.content[{i}]", errors) for i, part in enumerate(content))


def _parse_part(part: ChatContentPart, path: str, errors: list[ApiError]) -> str:
    text = part.refusal if part.type == "refusal" else part.text if part.type == "text" else None
    if text is not None:
        return text
    message = f"Unsupported content part {part.type!r}; supported: 'text' with a 'text'."
    errors.append(unsupported_value(message, path))
    return placeholder(part, part.type)


def _parse_tools(body: ChatRequestBody) -> tuple[Tool, ...]:
    functions = [tool.function for tool in body.tools or ()]
    for i, function in enumerate(functions):
        properties = (function.parameters or {}).get("properties", {})
        if not isinstance(properties, dict):
            path = f"tools[{i}].function.parameters.properties"
            raise bad_request(f"'{path}' is not an object.", path, "invalid_type")
    _check_tool_choice(body, {function.name for function in functions})
    if body.tool_choice == "none":
        return ()
    return tuple(
        Tool(name=function.name, description=function.description or "", parameters=function.parameters or {})
        for function in functions
    )


def _check_tool_choice(body: ChatRequestBody, names: set[str]) -> None:
    if body.parallel_tool_calls is False and not names:
        message = "'parallel_tool_calls' is only allowed with 'tools'."
        raise bad_request(message, "parallel_tool_calls", "invalid_value")
    if body.tool_choice == "required" and not names:
        raise no_tools_error()
    if isinstance(body.tool_choice, ChatToolChoice):
        check_tool_is_listed(body.tool_choice.function.name, names)


def _session_hints(body: ChatRequestBody) -> tuple[str, ...]:
    # Each value is prefixed with its kind, so that a user never matches a session of the same name.
    metadata = body.metadata or {}
    values = [(key, metadata.get(key)) for key in SESSION_KEYS]
    values += [
        ("prompt_cache_key", body.prompt_cache_key),
        ("safety_identifier", body.safety_identifier),
        ("user", body.user),
    ]
    return tuple(f"{kind}:{value}" for kind, value in values if isinstance(value, str) and value)


# --- responses ----------------------------------------------------------------------------------


def _finish_reason(choice: ReplyChoice) -> str:
    if choice.finish_reason == "stop" and choice.message.get("tool_calls"):
        return "tool_calls"
    return _FINISH_REASONS[choice.finish_reason]


def _format_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    return {"content": [format_logprob(token) for token in tokens], "refusal": None}


def _format_choice(index: int, choice: ReplyChoice, logprobs: bool) -> Json:
    reply = choice.message
    message: Json = {"role": "assistant", "content": reply["content"], "refusal": None}
    if calls := reply.get("tool_calls"):
        message["content"] = reply["content"] or None
        message["tool_calls"] = [format_tool_call(call) for call in calls]
    if reasoning := reply.get("reasoning"):
        message["reasoning_content"] = reasoning
    return {
        "index": index,
        "message": message,
        "logprobs": _format_logprobs(choice.logprobs) if logprobs else None,
        "finish_reason": _finish_reason(choice),
    }


class ChatStreamWriter(StreamWriter):
    def __init__(self, request_id: str, request: ModelRequest) -> None:
        self._request = request
        self._head: Json = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        if request.include_usage:
            self._head["usage"] = None

    def begin(self, index: int) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def write_deltas(
        self, index: int, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]
    ) -> bytes:
        out: list[bytes] = []
        for delta in deltas:
            if delta.call is not None:
                out += self._call_chunks(index, delta.call)
            elif delta.reasoning:
                out.append(self._chunk(index, {"reasoning_content": delta.reasoning}))
            elif not (logprobs and delta is deltas[-1]):
                out.append(self._chunk(index, {"content": delta.text}))
        if logprobs:
            last = deltas[-1].text if deltas else ""
            out.append(self._chunk(index, {"content": last}, logprobs=_format_logprobs(logprobs)))
        return b"".join(out)

    def finish(self, choices: Sequence[ReplyChoice]) -> bytes:
        out = [self._chunk(i, {}, finish_reason=_finish_reason(choice)) for i, choice in enumerate(choices)]
        return b"".join([*out, format_stream_end(self._head, self._request, choices)])

    def write_error(self, error: ApiError) -> bytes:
        return format_event(format_openai_error(error))

    def _chunk(
        self, index: int, delta: Json, *, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return format_event({**self._head, "choices": [choice]})

    def _call_chunks(self, index: int, call: ToolCallDelta) -> list[bytes]:
        # Clients expect the name first, with empty arguments, and then the arguments.
        parts: list[Json] = []
        if call.id:
            function = {"name": call.name, "arguments": ""}
            parts.append({"index": call.index, "id": call.id, "type": "function", "function": function})
        if call.arguments:
            parts.append({"index": call.index, "function": {"arguments": call.arguments}})
        return [self._chunk(index, {"tool_calls": [part]}) for part in parts]


class ChatDialect(Dialect):
    name = "chat"
    path = "/chat/completions"
    parses_messages_independently = True
    id_prefix = "chatcmpl"

    def parse_request(self, body: bytes) -> ModelRequest:
        return _parse_request(body)

    def format_response(
        self, request_id: str, request: ModelRequest, choices: Sequence[ReplyChoice]
    ) -> bytes:
        return orjson.dumps(
            {
                "id": request_id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": request.model,
                "choices": [_format_choice(i, choice, request.logprobs) for i, choice in enumerate(choices)],
                "usage": format_usage(choices),
            }
        )

    def create_stream_writer(self, request_id: str, request: ModelRequest) -> StreamWriter:
        return ChatStreamWriter(request_id, request)

    def format_error(self, error: ApiError) -> bytes:
        return orjson.dumps(format_openai_error(error))
