"""The parts of live learning that other packages share."""

from __future__ import annotations

import asyncio
import hashlib
import re
import unicodedata
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from instar.store.base import Store
from instar.types import Channel, PolicyStage, Session

POLL_SECONDS = 5.0
HELD_OUT_SHARE = 0.1
"""The share of live sessions that evaluate candidates and are never trained on."""
_ESCAPED_SPACE = re.compile(r"\\[nrt]")


def is_held_out(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a live session whose first call has these messages is held out. The choice depends only
    on `hash_prompt`, so that a prompt that an agent repeats is always on the same side. Prompts without
    messages are never held out, because nothing distinguishes them."""
    return bool(messages) and int.from_bytes(hash_prompt(messages)[:8], "big") < HELD_OUT_SHARE * 2**64


async def find_held_out(store: Store, sessions: Iterable[Session]) -> set[str]:
    """Return the ids of the live sessions that are held out."""
    prompts = await store.first_prompts([s.session_id for s in sessions if s.channel is Channel.LIVE])
    return {session_id for session_id, messages in prompts.items() if is_held_out(messages)}


def hash_prompt(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a hash of the roles, texts and tool calls of the messages, without differences in case, white
    space (also in escaped text, such as code or JSON), Unicode forms and the ids of tool calls."""
    parts = [
        (
            message["role"],
            _normalize(message.get("content")),
            [(_normalize(c["name"]), _normalize(c["arguments"])) for c in message.get("tool_calls") or ()],
        )
        for message in messages
    ]
    return hashlib.sha256(msgspec.json.encode(parts)).digest()


def _normalize(text: object) -> str:
    content = _ESCAPED_SPACE.sub(" ", unicodedata.normalize("NFKC", str(text or "")))
    return " ".join(content.casefold().encode("utf-8", "replace").decode().split())


class StageOutcome(NamedTuple):
    """The decision of a `StageCheck`."""

    action: Literal["advance", "wait", "reject"]
    reason: str = ""


StageCheck = Callable[[str, int, PolicyStage], Awaitable[StageOutcome]]
"""Decides about a version by its policy id, its number and its stage, `shadow` or `canary`. It is called
repeatedly until the version leaves the stage."""


async def skip_stage(policy_id: str, version: int, stage: PolicyStage) -> StageOutcome:
    """Advance every version at once, for runs without shadow and canary versions."""
    return StageOutcome("advance")


MayRun = Callable[[], Awaitable[bool]]
"""Returns True if work in the background may run now."""


async def may_always_run() -> bool:
    return True


async def wait_until_allowed(may_run: MayRun, poll_seconds: float = POLL_SECONDS) -> None:
    while not await may_run():  # noqa: ASYNC110 - the answer depends on the time and on other processes
        await asyncio.sleep(poll_seconds)
