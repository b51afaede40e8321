"""JSON types for OpenAI's APIs: chat completions, completions and responses.

Request bodies declare every known field and reject unknown ones, so that no setting is silently ignored. Most
objects inside a body, such as messages and tools, ignore unknown fields. Response types declare only the
fields that are read, mostly as optional, because providers omit some. Those for chat also cover completions.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ChatFunctionCall(msgspec.Struct):
    name: str
    arguments: str = "{}"


class ChatToolCall(msgspec.Struct):
    function: ChatFunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class ChatContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class ChatRequestMessage(msgspec.Struct):
    """A message. Unknown fields (``annotations``, ...), which agents copy from replies, are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ChatContentPart] | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None


class ChatFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct):
    function: ChatFunction
    type: Literal["function"] = "function"


class ChatFunctionName(msgspec.Struct):
    name: str


class ChatToolChoice(msgspec.Struct):
    function: ChatFunctionName
    type: Literal["function"]


class ResponseFormat(msgspec.Struct, omit_defaults=True):
    """The format of a reply. Chat completions have the schema in ``json_schema``, other APIs here."""

    type: str = ""
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    json_schema: ResponseFormat | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CompletionRequestFields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that requests for chat completions and for completions share."""

    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """May identify the session."""
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    # Fields of vLLM's API:
    min_p: float | None = None
    repetition_penalty: float | None = None


class ChatRequestBody(CompletionRequestFields, kw_only=True):
    messages: list[ChatRequestMessage]
    model: str
    tools: list[ChatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChatToolChoice | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    # Fields that may identify the session:
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Fields that are accepted as hints (see gateway/dialects/chat.py):
    parallel_tool_calls: bool | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # Fields that are accepted only at their no-op value:
    top_logprobs: int | None = None
    store: bool | None = None
    modalities: list[str] | None = None
    # Known fields that are rejected unless they are null (`functions` may also be empty):
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    functions: list[Any] | None = None
    function_call: Any = None


class CompletionsRequestBody(CompletionRequestFields, kw_only=True):
    model: str
    prompt: str | list[Any]
    # Fields that are accepted only with some values (see gateway/dialects/completions.py):
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ChatReplyFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ChatReplyToolCall(msgspec.Struct):
    function: ChatReplyFunction = msgspec.field(default_factory=ChatReplyFunction)
    id: str | None = None
    index: int | None = None


class ChatReplyPart(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class ChatReplyMessage(msgspec.Struct):
    content: str | list[ChatReplyPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ChatReplyToolCall] | None = None


class ChatTokenLogprob(msgspec.Struct):
    logprob: float | None = None


class ChatLogprobs(msgspec.Struct):
    """The logprobs of a choice. A chat completion has ``content``, a completion has ``token_logprobs``."""

    content: list[ChatTokenLogprob] | None = None
    token_logprobs: list[float | None] | None = None


class ChatResponseChoice(msgspec.Struct):
    """A choice. A chat completion has a ``message``, or a streamed ``delta``; a completion has ``text``."""

    index: int = 0
    message: ChatReplyMessage | None = None
    delta: ChatReplyMessage | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or the id of the stop token that ended the reply (sent by vLLM)."""


class ChatResponseChoiceWithTokens(ChatResponseChoice):
    token_ids: list[int] | None = None
    logprobs: ChatLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    """The prompt's tokens. A completion has them here; a chat completion has them next to its choices."""


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class ChatUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None


class ChatResponse(msgspec.Struct):
    """A complete response, or one chunk of a stream."""

    id: Any = None
    choices: list[ChatResponseChoice] | None = None
    usage: ChatUsage | None = None
    error: Any = None


class ChatResponseWithTokens(msgspec.Struct):
    id: Any = None
    choices: list[ChatResponseChoiceWithTokens] | None = None
    usage: ChatUsage | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None


class ResponsesContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file_id: Any = None
    file_url: Any = None
    file_data: Any = None


class ResponsesInputItem(msgspec.Struct):
    """An input item of any type. Unknown fields (``status``, ``phase``, ``annotations``,
    ``encrypted_content``, ...) are ignored, because agents copy them from responses."""

    type: str | None = None
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ResponsesContentPart] | None = None
    summary: list[ResponsesContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ResponsesContentPart] | None = None


class ResponsesTool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[ResponsesTool] | None = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesTextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: ResponseFormat | None = None
    verbosity: str | None = None


class ResponsesReasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesToolChoice(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None


class ResponsesRequestBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    input: str | list[ResponsesInputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponsesToolChoice | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: ResponsesTextConfig | None = None
    reasoning: ResponsesReasoning | None = None
    # Fields that may identify the session:
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    # Fields that are accepted as hints (see gateway/dialects/responses.py):
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # Fields that are accepted only at their no-op value:
    top_logprobs: int | None = None
    background: bool | None = None
    truncation: str | None = None
    context_management: list[Any] | None = None
    # Known fields that are rejected unless they are null:
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None


class ResponsesOutputPart(msgspec.Struct):
    type: str = ""
    text: str = ""
    refusal: str = ""


class ResponsesOutputItem(msgspec.Struct):
    type: str = ""
    content: list[ResponsesOutputPart] | None = None
    summary: list[ResponsesOutputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = ""
    input: Any = ""


class ResponsesUsage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: CachedTokens | None = None


class ResponsesIncompleteDetails(msgspec.Struct):
    reason: str | None = None


class ResponsesResponse(msgspec.Struct):
    id: str | None = None
    status: str | None = None
    output: list[ResponsesOutputItem] | None = None
    usage: ResponsesUsage | None = None
    incomplete_details: ResponsesIncompleteDetails | None = None


class ResponsesItemList(msgspec.Struct):
    """A page of the input items of a response."""

    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class ResponsesEvent(msgspec.Struct):
    type: str
    output_index: int = 0
    delta: Any = ""
    item: ResponsesOutputItem | None = None
    response: ResponsesResponse | None = None
