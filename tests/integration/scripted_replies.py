"""Replies for the scripted engine that differ from one session to the next."""

from __future__ import annotations


def reply(prompt: str, seed: int | None) -> str:
    """More digits or fewer, as the seed has it."""
    return ("1 " * ((seed or 0) % 5) + "a ") * 100
