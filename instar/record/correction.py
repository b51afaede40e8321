"""The answer that a person would have given, as the tokens that the model would have sampled for it."""

from __future__ import annotations

import numpy as np

from instar.errors import RenderError
from instar.record.base import Renderer
from instar.types import Call, Ids, Message

TALK = (
    Message(role="user", content="Hi"),
    Message(role="assistant", content="Ok"),
    Message(role="user", content="Hi"),
)
"""Behind its reply stands how the model's format ends one."""
REASONING_END = "\n</think>\n\n"


def encode_correction(renderer: Renderer, call: Call, text: str) -> Ids:
    """``text`` in the place of what was sampled behind the call's prompt, with the token that ends a reply.
    A tool call is written as the model writes it. Raises RenderError where the model's format has no way to
    say exactly that there."""
    prompt, end = call.prompt_ids.tolist(), _end(renderer, call)
    # Of a prompt that opens the reasoning, the answer begins behind its end.
    for before in ("", REASONING_END):
        ids = [*renderer.encode(before + text), end]
        if _says(renderer, call, prompt, ids, text):
            return np.asarray(ids, np.int32)
    raise RenderError("the model's format reads it as something else than an answer")


def _end(renderer: Renderer, call: Call) -> int:
    """The token that the model ended this call with, or would have."""
    stops = renderer.stop_token_ids
    if len(call.sampled_ids) and (last := int(call.sampled_ids[-1])) in stops:
        return last
    asked, answered = renderer.render(TALK[:1]), renderer.render(TALK)
    begin = next((i for i, (a, b) in enumerate(zip(asked, answered, strict=False)) if a != b), len(asked))
    end = next((token for token in answered[begin:] if token in stops), None)
    if end is None:
        raise RenderError("the model's format does not tell how an answer ends")
    return end


def _says(renderer: Renderer, call: Call, prompt: list[int], ids: list[int], text: str) -> bool:
    if call.dialect in ("completions", "tokens") or not call.messages:
        parser = renderer.stream_text()
        parser.feed(ids)
        parser.finish()
        return parser.message["content"] == text
    said = renderer.parse(ids, call.tools, prompt_ids=prompt)
    return bool(said.get("tool_calls")) or said["content"].strip() == text.strip()
