"""Random texts, tool calls and messages, and how agents send them back."""

from __future__ import annotations

import json
import random

from instar.record.base import ReplyDelta
from instar.record.tool_calls import format_call
from instar.types import Message, Tool, ToolCall

CALC = Tool(
    name="calc",
    description="Evaluate arithmetic.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string"}, "digits": {"type": "integer"}},
        "required": ["expression"],
    },
)
PIECES = [
    "hello", " world", "\n", "\n\n", "  ", "42", "é", "日本", "😀", "👩‍👩‍👧", "<", "<tool", "<tool_call>",
    "</tool_call>", "{", '"', "stop", "<|im_end|", "a", ".", "\t", "ö",
]  # fmt: skip


def make_words(rng: random.Random, max_pieces: int = 8) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, max_pieces)))


def make_call_text(rng: random.Random) -> str:
    arguments = json.dumps({"expression": make_words(rng, 3).replace("</tool_call>", "")}, ensure_ascii=False)
    return format_call(ToolCall(id="", name="calc", arguments=arguments))


def make_reply_text(rng: random.Random) -> str:
    parts = [make_words(rng)]
    for _ in range(rng.choice([0, 1, 1, 2])):
        parts += [make_call_text(rng), rng.choice(["", "\n", " ", make_words(rng, 3)])]
    return "".join(parts)


def make_follow_up(rng: random.Random, reply: Message) -> list[Message]:
    """Return the messages that an agent sends after a reply: tool results, a question, or both."""
    results = [
        Message(role="tool", content=make_words(rng), tool_call_id=call["id"])
        for call in reply.get("tool_calls", ())
    ]
    if results and rng.random() < 0.8:
        return results
    return [*results, Message(role="user", content=make_words(rng))]


def collect_calls(deltas: list[ReplyDelta]) -> list[ToolCall]:
    """Return the tool calls that the deltas add up to."""
    calls: list[ToolCall] = []
    for piece in (delta.call for delta in deltas if delta.call):
        if piece.index == len(calls):
            calls.append(ToolCall(id=piece.id, name=piece.name, arguments=""))
        calls[piece.index]["arguments"] += piece.arguments
    return calls


def echo_reply(rng: random.Random, reply: Message) -> Message:
    """Return the reply as an agent might echo it: stripped, reformatted and with different call ids."""
    message = Message(role="assistant", content=reply["content"])
    if rng.random() < 0.5:
        message["content"] = message["content"].strip()
    if calls := reply.get("tool_calls"):
        message["tool_calls"] = [
            ToolCall(
                id=call["id"] if rng.random() < 0.5 else "different",
                name=call["name"],
                arguments=json.dumps(json.loads(call["arguments"]), separators=(",", ":")),
            )
            for call in calls
        ]
    return message
