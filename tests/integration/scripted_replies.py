"""Scripted engine replies that differ between sessions."""

from __future__ import annotations


def reply(prompt: str, seed: int | None) -> str:
    """Return text whose number of digits depends on the seed."""
    return ("1 " * ((seed or 0) % 5) + "a ") * 100
