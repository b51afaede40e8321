"""Return recorded replies as responses of the Responses API again, with their input items.

A call does not contain everything that a response repeats from its request. The rest is stored next to the
call (``build_response_fields``).
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from instar.gateway.dialects.base import ModelRequest, ReplyChoice
from instar.gateway.dialects.common import split_reply
from instar.gateway.dialects.responses import ParsedResponsesRequest, finish_response, format_head
from instar.gateway.dialects.responses_items import ClientTool, list_stored_tools, make_item_id
from instar.gateway.dialects.responses_output import ResponseOutput
from instar.types import Call, Json, Message
from instar.wire.openai import ResponsesRequestBody


def format_stored_response(call: Call, fields: Json) -> bytes:
    """Return the response to a recorded call. ``fields`` was built by ``build_response_fields``."""
    body = msgspec.convert({"model": call.model, **fields["body"]}, ResponsesRequestBody)
    body.instructions = call.messages[0]["content"] if fields["instruction_count"] else None
    tools = list_stored_tools(call.tools, fields["tools"])
    request = ModelRequest(call.model, (), parsed_body=ParsedResponsesRequest(body, tools))
    choice = ReplyChoice(call.reply, call.finish_reason, len(call.prompt_ids), len(call.sampled_ids))
    output = ResponseOutput(call.request_id, tools.by_name)
    output.add_deltas(split_reply(call.reply))
    response, _ = finish_response(format_head(call.request_id, request), output, choice)
    response["created_at"] = int(call.started_at)
    if response["completed_at"] is not None:
        response["completed_at"] = int(call.ended_at)
    if not len(call.prompt_ids):
        response["usage"] = None  # The tokens of a call with a secret are not stored.
    return orjson.dumps(response)


def list_input_items(call: Call, fields: Json) -> list[Json]:
    """Return the items from which the reply was sampled, oldest first, without the instructions. They include
    those of the responses that the request continued."""
    tools = list_stored_tools(call.tools, fields["tools"]).by_name
    custom_calls: set[str] = set()
    items: list[Json] = []
    for message in call.messages[fields["instruction_count"] :]:
        for item in _list_message_items(message, tools, custom_calls):
            prefix = {"reasoning": "rs", "message": "msg"}.get(item["type"], "fc")
            items.append({**item, "id": make_item_id(prefix, call.request_id, f"in{len(items)}")})
    return items


def _list_message_items(
    message: Message, tools: dict[str, ClientTool], custom_calls: set[str]
) -> list[dict[str, Any]]:
    """Return the items of a message. ``custom_calls`` collects the ids of the calls of custom tools, whose
    results have a type of their own."""
    match message["role"]:
        case "assistant":
            output = ResponseOutput("", tools)
            output.add_deltas(split_reply(message))
            output.close()
            custom_calls |= {item["call_id"] for item in output.items if item["type"] == "custom_tool_call"}
            return output.items
        case "tool":
            call_id = message.get("tool_call_id", "")
            kind = "custom_tool_call" if call_id in custom_calls else "function_call"
            fields = {"call_id": call_id, "output": message["content"], "status": "completed"}
            return [{"type": f"{kind}_output", **fields}]
        case role:
            content = [{"type": "input_text", "text": message["content"]}]
            return [{"type": "message", "role": role, "status": "completed", "content": content}]
