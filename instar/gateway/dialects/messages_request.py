"""Parse requests to Anthropic's Messages API. These fields are accepted as hints (see ``base.py``):

    sampling  tools[].strict and tool_choice.disable_parallel_tool_use, unless tool_choice requires a call
    effort    output_config.effort (see ``ModelRequest.reasoning``), output_config.task_budget
    provider  cache_control, diagnostics, inference_geo, service_tier, speed
    session   metadata.user_id
    thinking  It also decides whether the thinking is returned (see ``ModelRequest.reasoning``).
    context_management.edits "clear_thinking_..."  Thinking is kept; prompts continue the sampled tokens.
    fallbacks, fallback_credit_token  They name models to use if this model declines, which it never does.

The text blocks of a system prompt, a user message and a tool result are joined by an empty line. Those of an
assistant message are concatenated, because the model sampled them as one text. A user message with tool
results becomes tool messages and user messages, in the order of its blocks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from instar.gateway.base import ApiError, bad_request, invalid_value
from instar.gateway.dialects import common
from instar.gateway.dialects.base import ModelRequest
from instar.types import Message, Tool, ToolCall
from instar.wire import anthropic as wire
from instar.wire.anthropic import MessagesContentBlock

BLOCK_SEPARATOR = "\n\n"
BILLING_PREFIX = "x-anthropic-billing-header:"
"""The start of a line that Claude Code puts before its system prompt. The line differs in each request, so it
is removed. Otherwise, no request would continue an earlier one."""
IGNORED_TOOL_TYPE_PREFIXES = ("tool_search_tool_",)
"""The model is offered all tools that a tool search could find, so it does not need the search."""

DECODER = msgspec.json.Decoder(wire.MessagesRequestBody)
_encode_arguments = json.JSONEncoder(ensure_ascii=False).encode  # writes spaces after , and :, as models do

RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (0, math.inf),
    "temperature": (0, 1),
    "top_p": (0, 1),
    "top_k": (0, 1 << 31),
}
_UNSUPPORTED_FIELDS = ("compaction", "container", "mcp_servers", "output_format", "thread")
_IGNORED_EDIT_PREFIXES = ("clear_thinking_",)
_CLAUDE_SESSION = re.compile(r"_session_([0-9A-Za-z-]+)$")


def parse_request(raw: bytes, *, needs_reply: bool = True) -> ModelRequest:
    """Parse a request for a reply or, if ``needs_reply`` is False, for a token count."""
    body = common.decode_body(DECODER, raw)
    if not body.messages:
        raise invalid_value("'messages' is empty; send at least one message.", "messages")
    common.check_ranges(body, RANGES)
    common.parse_stop(body.stop_sequences, "stop_sequences")
    _check_tool_choice(body.tool_choice, body.tools or ())
    errors = _find_unsupported(body)
    if needs_reply:
        if body.max_tokens is None:
            raise common.missing_parameter("max_tokens")
        errors += _find_reply_errors(body)
    messages = (*_parse_system(body.system, errors), *_parse_messages(body.messages, errors))
    tools, choice = _parse_tools(body, errors), body.tool_choice or wire.MessagesToolChoice("auto")
    required_output = common.parse_required_output(
        body.output_config and body.output_config.format,
        "output_config.format",
        tools,
        {"any": common.ANY_TOOL, "tool": choice.name}.get(choice.type),
        errors,
        is_single_call=choice.disable_parallel_tool_use,
    )
    return ModelRequest(
        model=body.model,
        messages=messages,
        tools=tools,
        required_output=required_output,
        session_hints=_parse_session_hints(body.metadata),
        user_ids=_parse_user_ids(body.metadata),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        reasoning=_parse_reasoning(body),
        stop=tuple(body.stop_sequences or ()),
        stream=bool(body.stream),
        unsupported=tuple(errors),
        parsed_body=body,
    )


def _check_tool_choice(choice: wire.MessagesToolChoice | None, tools: Sequence[wire.MessagesTool]) -> None:
    if choice is None or choice.type not in ("any", "tool"):
        return
    if not tools:
        raise common.no_tools_error()
    if choice.type == "tool" and choice.name is None:
        raise common.missing_parameter("tool_choice.name")
    if choice.type == "tool" and all(tool.type != "mcp_toolset" for tool in tools):
        common.check_tool_is_listed(choice.name, {tool.name for tool in tools}, "tool_choice.name")


def _find_unsupported(body: wire.MessagesRequestBody) -> list[ApiError]:
    errors = [
        common.unsupported_value(f"'{name}' is not supported; leave it out.", name)
        for name in _UNSUPPORTED_FIELDS
        if getattr(body, name)
    ]
    for i, edit in enumerate((body.context_management and body.context_management.edits) or ()):
        if not edit.type.startswith(_IGNORED_EDIT_PREFIXES):
            message = f"The context edit {edit.type!r} is not supported; leave it out."
            errors.append(common.unsupported_value(message, f"context_management.edits[{i}].type"))
    return errors


def _find_reply_errors(body: wire.MessagesRequestBody) -> list[ApiError]:
    """Return the errors that prevent a reply, but not a token count."""
    errors: list[ApiError] = []
    if body.max_tokens == 0:
        message = "'max_tokens' is 0; it must be at least 1. Cache-only requests are not supported."
        errors.append(common.unsupported_value(message, "max_tokens"))
    last_index = len(body.messages) - 1
    if body.messages[last_index].role == "assistant":
        message = "Continuing a partial reply is not supported; end 'messages' with a user message."
        errors.append(common.unsupported_value(message, f"messages[{last_index}]"))
    return errors


def _parse_tools(body: wire.MessagesRequestBody, errors: list[ApiError]) -> tuple[Tool, ...]:
    parsed = [_parse_tool(tool, f"tools[{i}]", errors) for i, tool in enumerate(body.tools or ())]
    is_tool_use_disabled = body.tool_choice is not None and body.tool_choice.type == "none"
    return () if is_tool_use_disabled else tuple(tool for tool in parsed if tool is not None)


def _parse_tool(tool: wire.MessagesTool, path: str, errors: list[ApiError]) -> Tool | None:
    if tool.type not in (None, "custom"):
        if not tool.type.startswith(IGNORED_TOOL_TYPE_PREFIXES):
            message = f"Unsupported tool type {tool.type!r}; supported: 'custom'."
            errors.append(common.unsupported_value(message, f"{path}.type"))
        return None
    if not tool.name:
        raise common.missing_parameter(f"{path}.name")
    schema_path = f"{path}.input_schema"
    if tool.input_schema is None:
        raise common.missing_parameter(schema_path)
    if not isinstance(tool.input_schema.get("properties") or {}, dict):
        path = f"{schema_path}.properties"
        raise bad_request(f"'{path}' is not an object; send a JSON schema.", path, "invalid_type")
    return Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema)


def _parse_reasoning(body: wire.MessagesRequestBody) -> dict[str, bool | int | str]:
    thinking, effort = body.thinking, body.output_config and body.output_config.effort
    fields: dict[str, bool | int | str] = {}
    if thinking is not None:
        fields["thinking"] = thinking.type != "disabled"
        if thinking.budget_tokens is not None:
            fields["thinking.budget_tokens"] = thinking.budget_tokens
    return fields | ({"output_config.effort": effort} if effort else {})


def _parse_session_hints(metadata: wire.MessagesMetadata | None) -> tuple[str, ...]:
    # Claude Code puts its session id into the user's id: ``user_…_account_…_session_<uuid>``, or JSON with a
    # ``session_id``. The rest of the user's id is the same in all sessions.
    user_id = metadata.user_id if metadata else None
    if not user_id:
        return ()
    if match := _CLAUDE_SESSION.search(user_id):
        return (f"claude-session:{match[1]}",)
    if user_id.startswith("{"):
        with suppress(ValueError, RecursionError):  # It is not JSON.
            session_id = json.loads(user_id).get("session_id")
            if session_id and isinstance(session_id, str):
                return (f"claude-session:{session_id}",)
    return (f"user_id:{user_id}",)


def _parse_user_ids(metadata: wire.MessagesMetadata | None) -> tuple[str, ...]:
    """Return the user's id, without the session id that Claude Code adds to it."""
    user_id = metadata.user_id if metadata else None
    if not user_id:
        return ()
    if user_id.startswith("{"):
        with suppress(ValueError, RecursionError):  # It is not JSON.
            fields = json.loads(user_id)
            values = (fields.get(name) for name in ("account_uuid", "device_id"))
            if ids := tuple(value for value in values if value and isinstance(value, str)):
                return ids
    return (_CLAUDE_SESSION.sub("", user_id),)


def _parse_system(system: str | list[MessagesContentBlock] | None, errors: list[ApiError]) -> list[Message]:
    texts = [system] if isinstance(system, str) else _parse_blocks(system or (), "system", errors)
    content = _join(text.partition("\n")[2] if text.startswith(BILLING_PREFIX) else text for text in texts)
    return [Message(role="system", content=content)] if content else []


def _parse_messages(items: Sequence[wire.MessagesRequestMessage], errors: list[ApiError]) -> list[Message]:
    messages: list[Message] = []
    for i, item in enumerate(items):
        content, path = item.content, f"messages[{i}].content"
        if isinstance(content, str):
            messages.append(Message(role=item.role, content=content))
        elif item.role == "assistant":
            messages.append(_parse_assistant(content, path, errors))
        elif item.role == "system":
            messages.append(Message(role="system", content=_join(_parse_blocks(content, path, errors))))
        else:
            messages += _parse_user(content, path, errors)
    return messages


def _parse_user(blocks: list[MessagesContentBlock], path: str, errors: list[ApiError]) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(_parse_block(block, f"{path}[{i}]", errors))
            continue
        if texts:
            messages.append(Message(role="user", content=_join(texts)))
            texts = []
        messages.append(_parse_tool_result(block, f"{path}[{i}]", errors))
    if texts or not messages:
        messages.append(Message(role="user", content=_join(texts)))
    return messages


def _parse_tool_result(block: MessagesContentBlock, path: str, errors: list[ApiError]) -> Message:
    if block.tool_use_id is None:
        raise common.missing_parameter(f"{path}.tool_use_id")
    content, path = block.content or "", f"{path}.content"
    if isinstance(content, dict):
        message = f"'{path}' is an object; it must be text or a list of blocks."
        raise bad_request(message, path, "invalid_type")
    text = content if isinstance(content, str) else _join(_parse_blocks(content, path, errors))
    text = f"Error: {text}" if block.is_error else text
    return Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _parse_assistant(blocks: list[MessagesContentBlock], path: str, errors: list[ApiError]) -> Message:
    # Blocks from a provider's own tools are left out, because recorded replies do not have them either.
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(blocks):
        block_path = f"{path}[{i}]"
        match block.type:
            case "text":
                texts.append(_parse_block(block, block_path, errors))
            case "tool_use":
                if not block.name:
                    raise common.missing_parameter(f"{block_path}.name")
                arguments = _encode_arguments(block.input or {})
                calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
            case "thinking":
                thinking.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case _:
                errors.append(_unsupported_block_error(block, block_path))
    message = Message(role="assistant", content="".join(texts))
    if reasoning := "".join(thinking):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _parse_blocks(blocks: Sequence[MessagesContentBlock], path: str, errors: list[ApiError]) -> list[str]:
    return [
        block.tool_name if block.type == "tool_reference" else _parse_block(block, f"{path}[{i}]", errors)
        for i, block in enumerate(blocks)
    ]


def _parse_block(block: MessagesContentBlock, path: str, errors: list[ApiError]) -> str:
    if block.type != "text":
        errors.append(_unsupported_block_error(block, path))
        return common.format_placeholder(block, block.type)
    if block.text is None:
        raise common.missing_parameter(f"{path}.text")
    return block.text


def _join(texts: Iterable[str]) -> str:
    return BLOCK_SEPARATOR.join(filter(None, texts))


def _unsupported_block_error(block: MessagesContentBlock, path: str) -> ApiError:
    message = f"Content blocks of type {block.type!r} are not supported here; leave the block out."
    return common.unsupported_value(message, path)
