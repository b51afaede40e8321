"""OpenAI's chat completions. These request fields are accepted as hints (see ``base.py``):

sampling    parallel_tool_calls: false and tools[].function.strict, unless tool_choice requires a call
effort      reasoning_effort (see ``ModelRequest.reasoning``), verbosity
provider    service_tier, prompt_cache_retention, prompt_cache_options
session     user, safety_identifier, metadata, prompt_cache_key
prediction  A guess at the reply, which can speed up sampling but changes no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import orjson

from instar.gateway.base import ApiError, bad_request, invalid_value
from instar.gateway.dialects import common
from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, ReplyChoices, TokenLogprobs
from instar.record.base import ReplyDelta, ToolCallDelta
from instar.types import Json, Message, Tool, ToolCall
from instar.wire import openai as wire

_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
}

_RANGES = {**common.RANGES, "max_completion_tokens": common.RANGES["max_tokens"]}


def _find_unsupported(body: wire.ChatRequestBody) -> list[ApiError]:
    errors = common.find_unsupported_values(body, _SUPPORTED_VALUES)
    if body.functions:
        errors.append(_deprecated_field_error("functions", "tools"))
    if body.function_call is not None:
        errors.append(_deprecated_field_error("function_call", "tool_choice"))
    return errors


def _deprecated_field_error(field: str, replacement: str, path: str = "") -> ApiError:
    message = f"The deprecated field '{field}' is not supported; use '{replacement}'."
    return common.unsupported_value(message, path or field)


def _parse_message(item: wire.ChatRequestMessage, path: str, errors: list[ApiError]) -> Message:
    # The result must not depend on earlier messages, because the request cache parses only the new messages.
    role = "system" if item.role == "developer" else item.role
    message = Message(role=role, content=_parse_content(item, path, errors))
    if item.tool_calls:
        if role != "assistant":
            text = f"Only assistant messages may have 'tool_calls'; this message has the role {item.role!r}."
            raise bad_request(text, f"{path}.tool_calls")
        message["tool_calls"] = [
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in item.tool_calls
        ]
    if item.function_call is not None:
        errors.append(_deprecated_field_error("function_call", "tool_calls", f"{path}.function_call"))
    if item.audio is not None:
        errors.append(common.unsupported_value("Audio is not supported; leave it out.", f"{path}.audio"))
    if role == "assistant" and (reasoning := item.reasoning_content or item.reasoning):
        message["reasoning"] = reasoning
    if item.tool_call_id is not None:
        message["tool_call_id"] = item.tool_call_id
    if item.name is not None:
        message["name"] = item.name
    return message


def _parse_content(item: wire.ChatRequestMessage, path: str, errors: list[ApiError]) -> str:
    content = item.content or item.refusal
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_parse_part(part, f"{path}.content[{i}]", errors) for i, part in enumerate(content))


def _parse_part(part: wire.ChatContentPart, path: str, errors: list[ApiError]) -> str:
    text = part.refusal if part.type == "refusal" else part.text if part.type == "text" else None
    if text is not None:
        return text
    message = f"Unsupported content part {part.type!r}; send a 'text' part with the field 'text'."
    errors.append(common.unsupported_value(message, path))
    return common.format_placeholder(part, part.type)


def _parse_tools(body: wire.ChatRequestBody) -> tuple[Tool, ...]:
    functions = [tool.function for tool in body.tools or ()]
    for i, function in enumerate(functions):
        properties = (function.parameters or {}).get("properties", {})
        if not isinstance(properties, dict):
            path = f"tools[{i}].function.parameters.properties"
            raise bad_request(f"'{path}' is not an object; send a JSON schema.", path, "invalid_type")
    _check_tool_choice(body, {function.name for function in functions})
    if body.tool_choice == "none":
        return ()
    return tuple(
        Tool(name=function.name, description=function.description or "", parameters=function.parameters or {})
        for function in functions
    )


def _check_tool_choice(body: wire.ChatRequestBody, names: set[str]) -> None:
    if body.parallel_tool_calls is False and not names:
        message = "'parallel_tool_calls' is false, but 'tools' is empty; leave 'parallel_tool_calls' out."
        raise invalid_value(message, "parallel_tool_calls")
    if body.tool_choice == "required" and not names:
        raise common.no_tools_error()
    if isinstance(body.tool_choice, wire.ChatToolChoice):
        common.check_tool_is_listed(body.tool_choice.function.name, names)


def _format_logprobs(tokens: TokenLogprobs) -> Json:
    return {"content": [common.format_logprob(token) for token in tokens], "refusal": None}


def _format_choice(index: int, choice: ReplyChoice, *, has_logprobs: bool) -> Json:
    reply = choice.message
    message: Json = {"role": "assistant", "content": reply["content"], "refusal": None}
    if calls := reply.get("tool_calls"):
        message["content"] = reply["content"] or None
        message["tool_calls"] = [common.format_tool_call(call) for call in calls]
    if reasoning := reply.get("reasoning"):
        message["reasoning_content"] = reasoning
    return {
        "index": index,
        "message": message,
        "logprobs": _format_logprobs(choice.logprobs) if has_logprobs else None,
        "finish_reason": common.format_finish_reason(choice),
    }


class ChatStreamWriter(common.ChunkStreamWriter):
    object_name = "chat.completion.chunk"
    empty_content: ClassVar[Json] = {"delta": {}}

    def begin(self, index: int) -> bytes:
        return self._format_delta(index, {"role": "assistant", "content": ""})

    def write_deltas(self, index: int, deltas: Sequence[ReplyDelta], logprobs: TokenLogprobs) -> bytes:
        chunks: list[bytes] = []
        for delta in deltas:
            if delta.call is not None:
                chunks += self._format_call(index, delta.call)
            elif delta.reasoning:
                chunks.append(self._format_delta(index, {"reasoning_content": delta.reasoning}))
            elif not (logprobs and delta is deltas[-1]):
                chunks.append(self._format_delta(index, {"content": delta.text}))
        if logprobs:
            text = deltas[-1].text if deltas else ""
            chunks.append(self._format_delta(index, {"content": text}, _format_logprobs(logprobs)))
        return b"".join(chunks)

    def _format_delta(self, index: int, delta: Json, logprobs: Json | None = None) -> bytes:
        return self._format_chunk(index, {"delta": delta}, logprobs=logprobs)

    def _format_call(self, index: int, call: ToolCallDelta) -> list[bytes]:
        # Clients expect the name first, with empty arguments, and then the arguments.
        parts: list[Json] = []
        if call.id:
            function = {"name": call.name, "arguments": ""}
            parts.append({"index": call.index, "id": call.id, "type": "function", "function": function})
        if call.arguments:
            parts.append({"index": call.index, "function": {"arguments": call.arguments}})
        return [self._format_delta(index, {"tool_calls": [part]}) for part in parts]


class ChatDialect(Dialect):
    name = "chat"
    path = "/chat/completions"
    parses_messages_independently = True
    id_prefix = "chatcmpl"
    stream_writer_class = ChatStreamWriter
    decoder = msgspec.json.Decoder(wire.ChatRequestBody)
    ranges = _RANGES
    response_type = wire.ChatResponse

    def parse_request(self, body: bytes) -> ModelRequest:
        parsed = common.decode_body(self.decoder, body)
        common.check_ranges(parsed, self.ranges)
        if not parsed.messages:
            raise invalid_value("'messages' is empty; send at least one message.", "messages")
        errors = _find_unsupported(parsed)
        messages = tuple(
            _parse_message(message, f"messages[{i}]", errors) for i, message in enumerate(parsed.messages)
        )
        tools, choice = _parse_tools(parsed), parsed.tool_choice
        required_tool = common.ANY_TOOL if choice == "required" else None
        if isinstance(choice, wire.ChatToolChoice):
            required_tool = choice.function.name
        is_single_call = parsed.parallel_tool_calls is False
        required_output = common.parse_required_output(
            parsed.response_format,
            "response_format",
            tools,
            required_tool,
            errors,
            is_single_call=is_single_call,
        )
        return ModelRequest(
            model=parsed.model,
            messages=messages,
            tools=tools,
            required_output=required_output,
            session_hints=common.parse_session_hints(parsed, parsed.metadata),
            user_ids=common.parse_user_ids(parsed, parsed.metadata),
            n=parsed.n or 1,
            max_tokens=parsed.max_completion_tokens or parsed.max_tokens,
            **common.parse_sampling(parsed),
            chat_template_kwargs=parsed.chat_template_kwargs or {},
            reasoning={"reasoning_effort": parsed.reasoning_effort} if parsed.reasoning_effort else {},
            stop=common.parse_stop(parsed.stop),
            stream=bool(parsed.stream),
            include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
            logprobs=bool(parsed.logprobs),
            unsupported=tuple(errors),
        )

    def format_response(self, request_id: str, request: ModelRequest, choices: ReplyChoices) -> bytes:
        head = common.format_response_head("chat.completion", request_id, request)
        formatted = [
            _format_choice(i, choice, has_logprobs=request.logprobs) for i, choice in enumerate(choices)
        ]
        return orjson.dumps({**head, "choices": formatted, "usage": common.format_usage(choices)})
