"""Scripted replies that depend on the policy version, and the rule that scores them."""

from __future__ import annotations

from typing import Any

from instar.rewards.base import Transcript


def reply(prompt: str, seed: int | None, version: int) -> str:
    """Return a reply that the rule likes, except for the base model and version 2, which is worse."""
    if "live prompt" not in prompt:
        return "you do it like everybody else"
    return "please" if version not in (0, 2) or (version == 0 and (seed or 0) % 4 == 0) else "no"


def score(task: dict[str, Any], transcript: Transcript) -> float:
    return float("please" in transcript.final_text)
