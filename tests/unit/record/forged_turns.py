"""Conversations with the texts of control tokens in their content, compared with harmless ones."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from transformers import PreTrainedTokenizerFast

from instar.errors import RenderError
from instar.record.base import Tools
from instar.record.render import TokenizerRenderer
from instar.types import Message, Tool, ToolCall

WriteText = Callable[[], str]
SHORT_ID = re.compile(r'(?<=id": ")[A-Za-z0-9]{9}(?=")')
"""A call id in the form that some templates require. Ids that contain special tokens get another one."""
WORDS = [
    "hello",
    " world",
    "\n",
    " ",
    "日本",
    "😀",
    "é",
    "a < b",
    "<b>",
    "[1]",
    "{",
    "|",
    ">",
    "42",
    "\\u003c",
]


def make_normal_text(rng: random.Random) -> str:
    return "x" + "".join(rng.choices(WORDS, k=rng.randint(0, 6))) + "."


def make_forged_text(rng: random.Random, control_texts: list[str]) -> str:
    """Return complete, split and nested control tokens, and texts that look like them."""
    pieces: list[str] = []
    for _ in range(rng.randint(1, 4)):
        text, other = rng.choices(control_texts, k=2)
        cut = rng.randrange(len(text))
        pieces += rng.choice(
            [
                [text],
                [text, "\n", other, "assistant\nYes"],
                [text[:cut], other, text[cut:]],
                [text[:cut]],
                [text[cut:]],
                [text.replace("<", "＜").replace(">", "＞")],
                [text.replace("<", "\\u003c")],
                [rng.choice(WORDS)],
            ]
        )
    return "".join(pieces) or "x"


def make_tool(write: WriteText) -> Tool:
    schema = {"type": "string", "description": write(), "enum": [write(), write()]}
    parameters = {"type": "object", "properties": {write(): schema}, "required": [write()]}
    return Tool(name=write(), description=write(), parameters=parameters)


def make_messages(rng: random.Random, write: WriteText, write_reply: WriteText) -> list[Message]:
    """Return a conversation. ``write`` writes the text of every field except the content of replies."""
    messages = [Message(role="system", content=write())] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        messages.append(Message(role="user", content=write(), name=write()))
        reply = Message(role="assistant", content=write_reply())
        if rng.random() < 0.4:
            reply["reasoning"] = write()
        if rng.random() < 0.6:
            arguments = {write(): write(), "nested": [{"a": write()}, 1.5, None]}
            text = json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
            if rng.random() < 0.3:
                text = text.replace("<", "\\u003c")
            call_id = write()
            reply["tool_calls"] = [ToolCall(id=call_id, name=write(), arguments=text)]
            messages += [reply, Message(role="tool", content=write(), tool_call_id=call_id, name=write())]
        else:
            messages.append(reply)
    return [*messages, Message(role="user", content=write())]


def list_control_texts(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the special tokens and the other added tokens that are neither whitespace nor HTML tags."""
    added = tokenizer.added_tokens_decoder.values()
    return [t.content for t in added if t.special or re.search(r"[|｜_]|think", t.content)]


def list_control_ids(renderer: TokenizerRenderer, ids: list[int], control_texts: list[str]) -> list[int]:
    control_ids = set(renderer._tokenizer.convert_tokens_to_ids(control_texts))
    return [token_id for token_id in ids if token_id in control_ids]


@dataclass(frozen=True)
class ForgedTurn:
    """A conversation with control tokens in its content, and the same one with harmless content."""

    messages: list[Message]
    tools: list[Tool]
    harmless_messages: list[Message]
    harmless_tools: list[Tool]


def make_forged_turn(control_texts: list[str], seed: int) -> ForgedTurn:
    # Templates move reasoning out of a reply's content, so replies do not contain its end.
    in_replies = [text for text in control_texts if "think" not in text]

    def make(forged: bool) -> tuple[list[Message], list[Tool]]:
        rng, texts, numbers = random.Random(seed), random.Random(seed), count()
        # Some templates treat messages alike that equal the last one, so harmless texts are different, too.
        write = (lambda: make_forged_text(texts, control_texts)) if forged else (lambda: f"x{next(numbers)}")
        write_reply = (lambda: make_forged_text(texts, in_replies)) if forged else write
        messages = make_messages(rng, write, write_reply)
        return messages, [make_tool(write)] if rng.random() < 0.5 else []

    return ForgedTurn(*make(True), *make(False))


def render_prompts(renderer: TokenizerRenderer, turn: ForgedTurn) -> list[tuple[list[int], list[int]]] | None:
    """Return prompts with forged and with harmless content: the complete conversation, and its last message
    as the continuation of another one. Return None if the template does not accept the conversation."""
    try:
        harmless = renderer.render(turn.harmless_messages, turn.harmless_tools)
    except RenderError:  # Some templates only accept turns that alternate.
        return None
    prompt = renderer.render([Message(role="user", content="Hi")])
    sampled = [*renderer.encode("Ok"), renderer.stop_token_ids[0]]
    continued = renderer.extend(prompt, sampled, turn.messages[-1:])
    expected = renderer.extend(prompt, sampled, turn.harmless_messages[-1:])
    assert (continued is None) == (expected is None)
    return [(renderer.render(turn.messages, turn.tools), harmless), (continued or [], expected or [])]


def count_added_tokens(renderer: TokenizerRenderer, turn: ForgedTurn, control_texts: list[str]) -> int | None:
    """Count the control tokens by which prompts with forged content differ from those with harmless content.
    Return None if the template does not accept the conversation."""
    prompts = render_prompts(renderer, turn)
    if prompts is None:
        return None
    added = 0
    for ids, harmless_ids in prompts:
        actual = list_control_ids(renderer, ids, control_texts)
        expected = list_control_ids(renderer, harmless_ids, control_texts)
        if actual != expected:
            difference = (Counter(actual) - Counter(expected)) + (Counter(expected) - Counter(actual))
            added += max(1, difference.total())
    return added


def check_forged_turn(
    renderer: TokenizerRenderer, unsafe: TokenizerRenderer, control_texts: list[str], seed: int
) -> bool:
    """Check that forged content adds no control token to a prompt or its continuation, and changes no text.
    ``unsafe`` is the same renderer with special tokens in content. Return True if they were forged there."""
    turn = make_forged_turn(control_texts, seed)
    added = count_added_tokens(renderer, turn, control_texts)
    if added is None:
        return False
    assert added == 0, turn
    ids, unsafe_ids = (r.render(turn.messages, turn.tools) for r in (renderer, unsafe))
    # Tokenizers with byte fallback may add a space after each special token.
    spaces = " " if renderer._decode.byte_ids else "\0"
    text, unsafe_text = (
        SHORT_ID.sub("", r._decode(prompt)).replace(spaces, "")
        for r, prompt in ((renderer, ids), (unsafe, unsafe_ids))
    )
    assert text == unsafe_text, turn
    return list_control_ids(unsafe, unsafe_ids, control_texts) != list_control_ids(
        renderer, ids, control_texts
    )


def check_normal_turn(renderer: TokenizerRenderer, unsafe: TokenizerRenderer, seed: int) -> None:
    """Check that content without control tokens is rendered as by the unmodified template."""
    rng = random.Random(seed)
    messages = make_messages(rng, lambda: make_normal_text(rng), lambda: make_normal_text(rng))
    tools: Tools = [make_tool(lambda: make_normal_text(rng))] if rng.random() < 0.5 else []
    try:
        expected = unsafe.render(messages, tools)
    except RenderError:  # Some templates only accept turns that alternate.
        return
    assert renderer.render(messages, tools) == expected
