"""OpenAI's chat completions."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import orjson

from instar.gateway.base import ApiError, bad_request, from_validation
from instar.gateway.dialects.base import Choice, Dialect, Request, StreamWriter, TokenLogprob
from instar.record.base import CallDelta, Delta
from instar.types import Json, Message, Tool, ToolCall

# --- the wire, in -------------------------------------------------------------------------------


class Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class WireCall(msgspec.Struct):
    function: Function
    id: str = ""
    type: Literal["function"] = "function"


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class WireMessage(msgspec.Struct):
    """Fields that agents echo from our own replies and that say nothing (``refusal``, ``annotations``, ...)
    are passed over."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[WireCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionSpec(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct):
    function: FunctionSpec
    type: Literal["function"] = "function"


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str


class Body(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[WireMessage]
    model: str
    tools: list[ToolSpec] | None = None
    tool_choice: str | dict[str, Any] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Taken and of no effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    # Taken at the one value that we do anyway.
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    response_format: ResponseFormat | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


_decode_body = msgspec.json.Decoder(Body).decode

_ONLY: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (None, True),
    "store": (None, False),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "tool_choice": (None, "auto", "none"),
}
_RANGES: dict[str, tuple[float, float]] = {
    "n": (1, 128),
    "max_tokens": (1, math.inf),
    "max_completion_tokens": (1, math.inf),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 1 << 31),
    "seed": (-(1 << 63), (1 << 63) - 1),
}


def _check(body: Body) -> None:
    for name, allowed in _ONLY.items():
        if (value := getattr(body, name)) not in allowed:
            said = ", ".join(repr(choice) for choice in allowed if choice is not None)
            raise bad_request(
                f"Unsupported value for '{name}': {value!r}; supported: {said}.", name, "unsupported_value"
            )
    for name, (low, high) in _RANGES.items():
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            raise bad_request(f"'{name}' is {value}, out of [{low}, {high}].", name, "invalid_value")
    if body.top_p == 0:
        raise bad_request("'top_p' must be greater than 0.", "top_p", "invalid_value")
    if body.response_format and body.response_format.type != "text":
        raise bad_request(
            f"Unsupported response_format {body.response_format.type!r}; supported: 'text'.",
            "response_format.type",
            "unsupported_value",
        )
    if not body.messages:
        raise bad_request("'messages' is empty.", "messages", "invalid_value")


def _text(content: str | list[Part] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise bad_request(
                f"Unsupported content part {part.type!r}; supported: 'text' with a 'text'.",
                f"{path}[{i}]",
                "unsupported_value",
            )
    return "".join(part.text or "" for part in content)


def _message(wire: WireMessage, path: str) -> Message:
    role = "system" if wire.role == "developer" else wire.role
    message = Message(role=role, content=_text(wire.content, f"{path}.content"))
    if wire.tool_calls:
        if role != "assistant":
            raise bad_request("Only an assistant's message has 'tool_calls'.", f"{path}.tool_calls")
        message["tool_calls"] = [
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in wire.tool_calls
        ]
    if role == "assistant" and (reasoning := wire.reasoning_content or wire.reasoning):
        message["reasoning"] = reasoning
    if wire.tool_call_id is not None:
        message["tool_call_id"] = wire.tool_call_id
    if wire.name is not None:
        message["name"] = wire.name
    return message


def _tools(body: Body) -> tuple[Tool, ...]:
    if body.tool_choice == "none":
        return ()
    for i, spec in enumerate(body.tools or ()):
        properties = (spec.function.parameters or {}).get("properties", {})
        if not isinstance(properties, dict):
            where = f"tools[{i}].function.parameters.properties"
            raise bad_request(f"'{where}' is not an object.", where, "invalid_type")
    return tuple(
        Tool(
            name=spec.function.name,
            description=spec.function.description or "",
            parameters=spec.function.parameters or {},
        )
        for spec in body.tools or ()
    )


# --- the wire, out ------------------------------------------------------------------------------


def _finish(choice: Choice) -> str:
    return (
        "tool_calls"
        if choice.finish_reason == "stop" and choice.message.get("tool_calls")
        else {
            "stop": "stop",
            "length": "length",
            "aborted": "stop",
        }[choice.finish_reason]
    )


def _usage(choices: Sequence[Choice]) -> Json:
    prompt, sampled = choices[0].prompt_tokens, sum(choice.sampled_tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    return {
        "content": [
            {
                "token": token.text,
                "logprob": token.logprob,  # orjson writes NaN as null: missing stays missing
                "bytes": list(token.text.encode()),
                "top_logprobs": [],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _wire_call(call: ToolCall) -> Json:
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["name"], "arguments": call["arguments"]},
    }


def _wire_choice(index: int, choice: Choice, logprobs: bool) -> Json:
    message = choice.message
    wire: Json = {"role": "assistant", "content": message["content"], "refusal": None}
    if calls := message.get("tool_calls"):
        wire["content"] = message["content"] or None
        wire["tool_calls"] = [_wire_call(call) for call in calls]
    if reasoning := message.get("reasoning"):
        wire["reasoning_content"] = reasoning
    return {
        "index": index,
        "message": wire,
        "logprobs": _logprobs(choice.logprobs) if logprobs else None,
        "finish_reason": _finish(choice),
    }


def _event(value: Json) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class ChatStreamWriter(StreamWriter):
    def __init__(self, request_id: str, request: Request) -> None:
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

    def delta(self, index: int, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprob]) -> bytes:
        out: list[bytes] = []
        for delta in deltas:
            if delta.call is not None:
                out += self._call(index, delta.call)
            elif delta.reasoning:
                out.append(self._chunk(index, {"reasoning_content": delta.reasoning}))
            elif not (logprobs and delta is deltas[-1]):
                out.append(self._chunk(index, {"content": delta.text}))
        if logprobs:
            last = deltas[-1].text if deltas else ""
            out.append(self._chunk(index, {"content": last}, logprobs=_logprobs(logprobs)))
        return b"".join(out)

    def end(self, choices: Sequence[Choice]) -> bytes:
        out = [self._chunk(i, {}, finish_reason=_finish(choice)) for i, choice in enumerate(choices)]
        if self._request.include_usage:
            out.append(_event({**self._head, "choices": [], "usage": _usage(choices)}))
        return b"".join([*out, b"data: [DONE]\n\n"])

    def failure(self, error: ApiError) -> bytes:
        return _event(_error(error))

    def _chunk(
        self, index: int, delta: Json, *, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _event({**self._head, "choices": [choice]})

    def _call(self, index: int, call: CallDelta) -> list[bytes]:
        """The name first, then the arguments, as clients expect to put them together."""
        parts: list[Json] = []
        if call.id:
            function = {"name": call.name, "arguments": ""}
            parts.append({"index": call.index, "id": call.id, "type": "function", "function": function})
        if call.arguments:
            parts.append({"index": call.index, "function": {"arguments": call.arguments}})
        return [self._chunk(index, {"tool_calls": [part]}) for part in parts]


def _error(error: ApiError) -> Json:
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(
        error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    )
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code},
    }


class ChatDialect(Dialect):
    name = "chat"
    path = "/chat/completions"

    def read(self, body: bytes) -> Request:
        try:
            wire = _decode_body(body)
        except msgspec.DecodeError as error:
            raise from_validation(error) from error
        except (UnicodeDecodeError, RecursionError) as error:
            raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error
        _check(wire)
        stop = [wire.stop] if isinstance(wire.stop, str) else wire.stop or []
        if "" in stop:
            raise bad_request("A stop string is empty.", f"stop[{stop.index('')}]", "invalid_value")
        if len(stop) > 16:
            raise bad_request(f"{len(stop)} stop strings are more than 16.", "stop", "invalid_value")
        return Request(
            model=wire.model,
            messages=tuple(_message(m, f"messages[{i}]") for i, m in enumerate(wire.messages)),
            tools=_tools(wire),
            n=wire.n or 1,
            max_tokens=wire.max_completion_tokens or wire.max_tokens,
            temperature=wire.temperature,
            top_p=wire.top_p,
            top_k=wire.top_k,
            seed=wire.seed,
            stop=tuple(stop),
            stream=bool(wire.stream),
            include_usage=bool(wire.stream_options and wire.stream_options.include_usage),
            logprobs=bool(wire.logprobs),
        )

    def answer(self, request_id: str, request: Request, choices: Sequence[Choice]) -> bytes:
        return orjson.dumps(
            {
                "id": request_id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": request.model,
                "choices": [_wire_choice(i, choice, request.logprobs) for i, choice in enumerate(choices)],
                "usage": _usage(choices),
            }
        )

    def writer(self, request_id: str, request: Request) -> StreamWriter:
        return ChatStreamWriter(request_id, request)

    def error(self, error: ApiError) -> bytes:
        return orjson.dumps(_error(error))
