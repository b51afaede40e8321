"""What a gateway has recorded of a conversation, held against what it should have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from instar.data.linearize import linearize
from instar.store.base import Store
from instar.types import Call, Link, Message, Session


@dataclass(frozen=True)
class RecordedSession:
    session: Session
    calls: list[Call]


async def load_recorded_sessions(store: Store, run_id: str) -> list[RecordedSession]:
    rows = [row.session for row in await store.sessions(run_id)]
    return [RecordedSession(session, await store.calls(session.session_id)) for session in rows]


def select_calls_with_question(
    found: Sequence[RecordedSession], question: str, decode: Callable[[list[int]], str]
) -> list[RecordedSession]:
    """The sessions with calls whose prompt holds the question, with those calls alone."""
    held = [
        RecordedSession(
            one.session, [call for call in one.calls if question in decode(call.prompt_ids.tolist())]
        )
        for one in found
    ]
    return [one for one in held if one.calls]


def find_continued_call(call: Call, before: Sequence[Call]) -> Call | None:
    """The latest call whose messages and reply this one's begin with, by what they say: told from the
    messages alone, not from what the gateway made of them."""
    own = [_normalize_message(message) for message in call.messages]
    for earlier in reversed(before):
        said = [_normalize_message(message) for message in (*earlier.messages, earlier.reply)]
        if earlier.tools == call.tools and own[: len(said)] == said and len(own) > len(said):
            return earlier
    return None


def is_exact(call: Call, before: Call) -> bool:
    """Whether it is linked to what came before, and its prompt begins with that one's prompt and sampled
    tokens. (An agent that fills in defaults may go on from a later call than its messages tell.)"""
    sequence = before.sequence
    return call.link is Link.EXTENDS and np.array_equal(call.prompt_ids[: len(sequence)], sequence)


def count_trained_tokens(found: RecordedSession) -> int:
    return sum(sample.trained_tokens for sample in linearize(found.session, found.calls))


def count_sampled_tokens(calls: Iterable[Call]) -> int:
    return sum(len(call.sampled_ids) for call in calls)


def count_usage(calls: Iterable[Call]) -> Counter[tuple[int, int]]:
    """Prompt and sampled tokens of each."""
    return Counter((len(call.prompt_ids), len(call.sampled_ids)) for call in calls)


def _normalize_message(message: Message) -> Any:
    """Without reasoning, which agents do not send back, and the spelling of arguments."""
    calls = [(call["name"], _parse_arguments(call["arguments"])) for call in message.get("tool_calls", ())]
    return message["role"], message["content"].strip(), calls


def _parse_arguments(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
