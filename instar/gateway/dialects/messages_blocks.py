"""Anthropic's Messages, in: their content blocks → messages.

What stands in several blocks is one text here: a system prompt, a user's text and a tool's result are their
blocks with an empty line between, an assistant's text is its blocks one behind the other, for so it was cut.
A user's message with tool results becomes tool messages and user messages, in the order of its blocks.
What only a provider could make something of is appended to ``refused``.

Claude Code puts a line ``x-anthropic-billing-header: ...`` in front of its system prompt, other in each
request and not meant for the model: it is left out, else no request would continue another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from instar.gateway.base import ApiError, bad_request
from instar.types import Message, ToolCall

BETWEEN_BLOCKS = "\n\n"
BILLING_LINE = "x-anthropic-billing-header:"


class Block(msgspec.Struct):
    """A content block of any type. Marks that say nothing to a model (``cache_control``, ``citations``,
    ``signature``, ``caller``) are passed over."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    """An object is what a provider's own tool gave back."""
    is_error: bool | None = None
    tool_name: str = ""
    # What pictures, documents and the like hold.
    source: Any = None
    title: Any = None
    context: Any = None
    file_id: Any = None


class WireMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


_arguments = json.JSONEncoder(ensure_ascii=False).encode
"""Spaced as models write it."""


def parse_system(system: str | list[Block] | None, refused: list[ApiError]) -> list[Message]:
    blocks = [system] if isinstance(system, str) else _texts(system or (), "system", refused)
    content = _joined(map(_without_billing, blocks))
    return [Message(role="system", content=content)] if content else []


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_LINE) else text


def parse_messages(wires: Sequence[WireMessage], refused: list[ApiError]) -> list[Message]:
    messages: list[Message] = []
    for i, wire in enumerate(wires):
        content, path = wire.content, f"messages[{i}].content"
        if isinstance(content, str):
            messages.append(Message(role=wire.role, content=content))
        elif wire.role == "assistant":
            messages.append(_assistant(content, path, refused))
        elif wire.role == "system":
            messages.append(Message(role="system", content=_joined(_texts(content, path, refused))))
        else:
            messages += _user(content, path, refused)
    return messages


def _user(blocks: list[Block], path: str, refused: list[ApiError]) -> list[Message]:
    messages: list[Message] = []
    said: list[str] = []
    for i, block in enumerate(blocks):
        where = f"{path}[{i}]"
        if block.type == "tool_result":
            if said:
                messages.append(Message(role="user", content=_joined(said)))
                said = []
            messages.append(_tool_result(block, where, refused))
        else:
            said.append(_text(block, where, refused))
    if said or not messages:
        messages.append(Message(role="user", content=_joined(said)))
    return messages


def _tool_result(block: Block, path: str, refused: list[ApiError]) -> Message:
    if block.tool_use_id is None:
        raise _missing(f"{path}.tool_use_id")
    content, where = block.content or "", f"{path}.content"
    if isinstance(content, dict):
        raise bad_request(f"'{where}' is an object; text or blocks are needed.", where, "invalid_type")
    text = content if isinstance(content, str) else _joined(_texts(content, where, refused))
    if block.is_error:
        text = f"Error: {text}"
    return Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _assistant(blocks: list[Block], path: str, refused: list[ApiError]) -> Message:
    """Without what the tools of a provider did in its course: an answer is recorded without it, too."""
    said: list[str] = []
    thought: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(blocks):
        where = f"{path}[{i}]"
        match block.type:
            case "text":
                said.append(_text(block, where, refused))
            case "tool_use":
                calls.append(_tool_use(block, where))
            case "thinking":
                thought.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case _:
                refused.append(_unsupported(block, where))
    message = Message(role="assistant", content="".join(said))
    if reasoning := "".join(thought):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Block, path: str) -> ToolCall:
    if not block.name:
        raise _missing(f"{path}.name")
    return ToolCall(id=block.id, name=block.name, arguments=_arguments(block.input or {}))


def _texts(blocks: Sequence[Block], path: str, refused: list[ApiError]) -> list[str]:
    return [
        block.tool_name if block.type == "tool_reference" else _text(block, f"{path}[{i}]", refused)
        for i, block in enumerate(blocks)
    ]


def _text(block: Block, path: str, refused: list[ApiError]) -> str:
    """What is no text is named by what it holds, so that another picture is another message."""
    if block.type != "text":
        refused.append(_unsupported(block, path))
        return f"[{block.type} {blake2b(msgspec.json.encode(block), digest_size=8).hexdigest()}]"
    if block.text is None:
        raise _missing(f"{path}.text")
    return block.text


def _joined(texts: Iterable[str]) -> str:
    return BETWEEN_BLOCKS.join(filter(None, texts))


def _unsupported(block: Block, path: str) -> ApiError:
    return bad_request(f"Unsupported content block {block.type!r} here.", path, "unsupported_value")


def _missing(path: str) -> ApiError:
    return bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
