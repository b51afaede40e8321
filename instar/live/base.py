"""The parts of live learning that other packages share."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

POLL_SECONDS = 5.0

MayRun = Callable[[], Awaitable[bool]]
"""Returns True if work in the background may use the engine now."""

HELD_OUT_SHARE = 0.1
"""The share of live sessions that evaluate candidates and are never trained on."""


def is_held_out(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a live session whose first call has these messages is held out. The choice depends only
    on a hash of the messages, without differences in case and white space, so that a prompt that an agent
    repeats is always on the same side."""
    content = msgspec.json.encode(messages, order="deterministic").decode()
    digest = hashlib.sha256(" ".join(content.casefold().split()).encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


async def may_always_run() -> bool:
    return True


async def wait_until_allowed(may_run: MayRun) -> None:
    while not await may_run():  # noqa: ASYNC110 - the answer depends on the time and on other processes
        await asyncio.sleep(POLL_SECONDS)
