"""Prompts of live sessions that are, or are not, held out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from instar.live.base import is_held_out
from instar.types import Message

MARKER = "live prompt"


def list_prompts(*, held_out: bool = True) -> Iterator[list[Message]]:
    for number in count():
        messages = [Message(role="user", content=f"{MARKER} {number}")]
        if is_held_out(messages) == held_out:
            yield messages
