"""OpenAI's chat completions, in: the body of a request → a Request.

What cannot be honoured is never passed over in silence: it becomes the request's ``refusal``, which names
it. Some of what agents send by default asks for what no one can promise, or for nothing that a sampled
token could show; those are taken as they are meant, as hints:

    field                        why it is taken
    tool_choice "required", or   A model cannot be made to call a tool without bending what it samples, and
      one that names a function  bent samples are not the policy's. The tools are offered; whether one was
                                 called is told by ``finish_reason``. (smolagents, pydantic-ai and
                                 LangChain's structured output send it by default.)
    parallel_tool_calls: false   As above: the model is asked once, and its calls are all told.
    tools[].function.strict      As above, for the form of the arguments.
    reasoning_effort, verbosity  What a provider makes of them is its own; the model here has one way.
    prediction                   A guess at the reply, to speed it up; it changes no token.
    service_tier, prompt_cache_retention, prompt_cache_options
                                 The provider's queues and caches.
    user, safety_identifier, metadata, prompt_cache_key
                                 Tell whose session this is (`Request.identity`).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal

import msgspec

from instar.gateway.base import ApiError, bad_request
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.dialects.openai_common import (
    RANGES,
    StreamOptions,
    check_ranges,
    decode_body,
    find_unsupported_values,
    parse_stop,
    unsupported_value,
)
from instar.types import Message, Tool, ToolCall


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
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class WireMessage(msgspec.Struct):
    """Fields that agents echo from our own replies and that say nothing (``annotations``, ...) are passed
    over."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[WireCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None


class FunctionSpec(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct):
    function: FunctionSpec
    type: Literal["function"] = "function"


class Named(msgspec.Struct):
    name: str


class NamedChoice(msgspec.Struct):
    function: Named
    type: Literal["function"]


class ResponseFormat(msgspec.Struct):
    type: str


class Body(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[WireMessage]
    model: str
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Tell whose session this is.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Hints, as the table above says.
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # Taken at the values that ask for what is done anyway.
    top_logprobs: int | None = None
    store: bool | None = None
    response_format: ResponseFormat | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known, and never taken.
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    functions: list[Any] | None = None
    function_call: Any = None


_decoder = msgspec.json.Decoder(Body)

_ONLY: dict[str, tuple[Any, ...]] = {
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
_SESSION_KEYS = ("session_id", "conversation_id", "thread_id", "chat_id")
_LEGACY = "'{}' is the form of before 'tools', and not supported; use '{}'."


def read(raw: bytes) -> ModelRequest:
    body = decode_body(_decoder, raw)
    check_ranges(body, _RANGES)
    if not body.messages:
        raise bad_request("'messages' is empty.", "messages", "invalid_value")
    refused = _refusals(body)
    messages = tuple(_message(wire, f"messages[{i}]", refused) for i, wire in enumerate(body.messages))
    return ModelRequest(
        model=body.model,
        messages=messages,
        tools=_tools(body),
        session_hints=_identity(body),
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
        unsupported_error=refused[0] if refused else None,
    )


def _refusals(body: Body) -> list[ApiError]:
    refused = find_unsupported_values(body, _ONLY)
    if body.response_format and body.response_format.type != "text":
        told = f"Unsupported response_format {body.response_format.type!r}; supported: 'text'."
        refused.append(unsupported_value(told, "response_format.type"))
    if body.functions:
        refused.append(unsupported_value(_LEGACY.format("functions", "tools"), "functions"))
    if body.function_call is not None:
        refused.append(unsupported_value(_LEGACY.format("function_call", "tool_choice"), "function_call"))
    return refused


def _message(wire: WireMessage, path: str, refused: list[ApiError]) -> Message:
    """One message, whatever stands before it: those that were read before are not read again."""
    role = "system" if wire.role == "developer" else wire.role
    message = Message(role=role, content=_text(wire, path, refused))
    if wire.tool_calls:
        if role != "assistant":
            raise bad_request("Only an assistant's message has 'tool_calls'.", f"{path}.tool_calls")
        message["tool_calls"] = [
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in wire.tool_calls
        ]
    if wire.function_call is not None:
        where = f"{path}.function_call"
        refused.append(unsupported_value(_LEGACY.format("function_call", "tool_calls"), where))
    if wire.audio is not None:
        refused.append(unsupported_value("Audio is not supported.", f"{path}.audio"))
    if role == "assistant" and (reasoning := wire.reasoning_content or wire.reasoning):
        message["reasoning"] = reasoning
    if wire.tool_call_id is not None:
        message["tool_call_id"] = wire.tool_call_id
    if wire.name is not None:
        message["name"] = wire.name
    return message


def _text(wire: WireMessage, path: str, refused: list[ApiError]) -> str:
    content = wire.content or wire.refusal
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part(part, f"{path}.content[{i}]", refused) for i, part in enumerate(content))


def _part(part: Part, path: str, refused: list[ApiError]) -> str:
    """What is no text is named by what it holds, so that another picture is another message."""
    text = part.refusal if part.type == "refusal" else part.text if part.type == "text" else None
    if text is not None:
        return text
    told = f"Unsupported content part {part.type!r}; supported: 'text' with a 'text'."
    refused.append(unsupported_value(told, path))
    return f"[{part.type} {blake2b(msgspec.json.encode(part), digest_size=8).hexdigest()}]"


def _tools(body: Body) -> tuple[Tool, ...]:
    specs = [tool.function for tool in body.tools or ()]
    for i, spec in enumerate(specs):
        properties = (spec.parameters or {}).get("properties", {})
        if not isinstance(properties, dict):
            where = f"tools[{i}].function.parameters.properties"
            raise bad_request(f"'{where}' is not an object.", where, "invalid_type")
    _check_tool_choice(body, {spec.name for spec in specs})
    if body.tool_choice == "none":
        return ()
    return tuple(
        Tool(name=spec.name, description=spec.description or "", parameters=spec.parameters or {})
        for spec in specs
    )


def _check_tool_choice(body: Body, names: set[str]) -> None:
    choice = body.tool_choice
    if body.parallel_tool_calls is False and not names:
        told = "'parallel_tool_calls' is only allowed with 'tools'."
        raise bad_request(told, "parallel_tool_calls", "invalid_value")
    if choice == "required" and not names:
        raise bad_request("A tool is required and there is none in 'tools'.", "tool_choice", "invalid_value")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        told = f"The tool {choice.function.name!r} is not in 'tools'."
        raise bad_request(told, "tool_choice", "invalid_value")


def _identity(body: Body) -> tuple[str, ...]:
    """Each with its kind, so that a user is never taken for a session of the same name."""
    metadata = body.metadata or {}
    named = [(key, metadata.get(key)) for key in _SESSION_KEYS]
    named += [
        ("prompt_cache_key", body.prompt_cache_key),
        ("safety_identifier", body.safety_identifier),
        ("user", body.user),
    ]
    return tuple(f"{kind}:{value}" for kind, value in named if isinstance(value, str) and value)
