"""JSON types for Anthropic's Messages API. They treat unknown fields like the types in ``openai.py``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from instar.wire.openai import ResponseFormat


class MessagesContentBlock(msgspec.Struct):
    """A content block of any type. Fields that do not reach a model (``cache_control``, ``citations``,
    ``signature``, ``caller``) are ignored."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[MessagesContentBlock] | dict[str, Any] | None = None
    """The content of a tool result. The result of a provider's own tool may be an object."""
    is_error: bool | None = None
    tool_name: str = ""
    # Fields of images, documents and other media:
    source: Any = None
    title: Any = None
    context: Any = None
    file_id: Any = None


class MessagesRequestMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[MessagesContentBlock]


class MessagesTool(msgspec.Struct):
    """A tool that an agent offers. Fields about how a provider runs the tool (``cache_control``, ``strict``,
    ``eager_input_streaming``, ``input_examples``, ``allowed_callers``) are ignored. A tool with
    ``defer_loading`` is offered to the model from the start."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesThinking(msgspec.Struct):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class MessagesContextEdit(msgspec.Struct):
    type: str


class MessagesContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[MessagesContextEdit] | None = None


class MessagesOutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    task_budget: dict[str, Any] | None = None
    format: ResponseFormat | None = None


class MessagesMetadata(msgspec.Struct):
    user_id: str | None = None


class MessagesRequestBody(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[MessagesRequestMessage]
    model: str
    max_tokens: int | None = None
    system: str | list[MessagesContentBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: MessagesThinking | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = None
    # Fields that are accepted as hints (see gateway/dialects/messages_request.py):
    cache_control: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    service_tier: str | None = None
    speed: str | None = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    # Fields that are partly accepted as hints and partly rejected:
    output_config: MessagesOutputConfig | None = None
    context_management: MessagesContextManagement | None = None
    # Known fields that are rejected unless they are empty:
    compaction: Any = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    output_format: Any = None
    thread: Any = None


class MessagesReplyBlock(msgspec.Struct):
    type: str = ""
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))


class MessagesUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class MessagesResponse(msgspec.Struct):
    id: Any = None
    content: list[MessagesReplyBlock] | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage | None = None


class MessagesDelta(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessagesEvent(msgspec.Struct):
    type: str
    index: int = 0
    message: MessagesResponse | None = None
    content_block: MessagesReplyBlock | None = None
    delta: MessagesDelta | None = None
    usage: MessagesUsage | None = None
