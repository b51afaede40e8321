"""Replies for the scripted engine that differ from one session to the next."""

from __future__ import annotations


def reply(prompt: str, seed: int | None) -> str:
    """Return a text in which the seed determines the number of digits."""
    return ("1 " * ((seed or 0) % 5) + "a ") * 100
