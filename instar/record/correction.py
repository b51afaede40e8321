"""Encodes a human correction as the tokens that the model would have sampled."""

from __future__ import annotations

import numpy as np

from instar.errors import RenderError
from instar.record.base import Renderer
from instar.record.bridge import QUESTION, REPLY
from instar.record.nodes import common_prefix_length
from instar.types import Call, Ids

_REASONING_END = "\n</think>\n\n"


def encode_correction(renderer: Renderer, call: Call, text: str) -> Ids:
    """Encode ``text`` as a reply to the call's prompt, including the end-of-reply token. Raises RenderError
    if the format has no such token, or if the tokens are parsed as neither this text nor tool calls."""
    prompt, end = call.prompt_ids.tolist(), _find_end_token(renderer, call)
    # If the prompt opens a reasoning block, the block must be closed before the text.
    for prefix in ("", _REASONING_END):
        ids = [*renderer.encode(prefix + text), end]
        if _parses_as(renderer, call, prompt, ids, text):
            return np.asarray(ids, np.int32)
    raise RenderError(
        "the correction is not a valid reply in this model's format: it is parsed as different text"
    )


def _find_end_token(renderer: Renderer, call: Call) -> int:
    stops = renderer.stop_token_ids
    if len(call.sampled_ids) and (last_id := int(call.sampled_ids[-1])) in stops:
        return last_id
    prompt, complete = renderer.render([QUESTION]), renderer.render([QUESTION, REPLY, QUESTION])
    reply_start = common_prefix_length(np.asarray(prompt), np.asarray(complete))
    end = next((token for token in complete[reply_start:] if token in stops), None)
    if end is None:
        raise RenderError("the model's format has no end-of-reply token")
    return end


def _parses_as(renderer: Renderer, call: Call, prompt: list[int], ids: list[int], text: str) -> bool:
    if call.dialect in ("completions", "tokens") or not call.messages:
        return _decode_text(renderer, ids) == text
    reply = renderer.parse(ids, call.tools, prompt_ids=prompt)
    if reply.get("tool_calls"):
        return True
    # Some families keep control tokens, such as the start of a turn, as text in the content.
    texts = (reply["content"], _decode_text(renderer, renderer.encode(text)))
    return all(parsed.strip() == text.strip() for parsed in texts)


def _decode_text(renderer: Renderer, ids: list[int]) -> str:
    """Return the text of the tokens without control tokens."""
    parser = renderer.stream_text()
    parser.feed(ids)
    parser.finish()
    return parser.message["content"]
