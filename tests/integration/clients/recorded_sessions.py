"""Load the calls that a gateway recorded for a conversation, compare them and count their tokens."""

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
    sessions = [row.session for row in await store.sessions(run_id)]
    return [RecordedSession(session, await store.calls(session.session_id)) for session in sessions]


def select_calls_with_question(
    recorded_sessions: Sequence[RecordedSession], question: str, decode: Callable[[list[int]], str]
) -> list[RecordedSession]:
    """Return the sessions that have calls whose prompt contains the question, with only those calls."""
    selected = [
        RecordedSession(
            recorded.session,
            [call for call in recorded.calls if question in decode(call.prompt_ids.tolist())],
        )
        for recorded in recorded_sessions
    ]
    return [recorded for recorded in selected if recorded.calls]


def find_continued_call(call: Call, earlier_calls: Sequence[Call]) -> Call | None:
    """Return the latest earlier call whose messages and reply are a prefix of this call's messages.

    Only the messages and tools are compared, not the links that the gateway recorded.
    """
    messages = [_normalize_message(message) for message in call.messages]
    for earlier in reversed(earlier_calls):
        earlier_messages = [_normalize_message(message) for message in (*earlier.messages, earlier.reply)]
        if (
            earlier.tools == call.tools
            and messages[: len(earlier_messages)] == earlier_messages
            and len(messages) > len(earlier_messages)
        ):
            return earlier
    return None


def is_exact(call: Call, previous: Call) -> bool:
    """True if the call extends an earlier call and its prompt starts with all tokens of ``previous``.

    ``previous`` need not be the recorded parent: if an agent adds default values to its tool calls, comparing
    messages may find an earlier call than the one that the gateway recorded as the parent.
    """
    sequence = previous.sequence
    return call.link is Link.EXTENDS and np.array_equal(call.prompt_ids[: len(sequence)], sequence)


def count_trained_tokens(recorded: RecordedSession) -> int:
    return sum(sample.trained_tokens for sample in linearize(recorded.session, recorded.calls))


def count_sampled_tokens(calls: Iterable[Call]) -> int:
    return sum(len(call.sampled_ids) for call in calls)


def count_usage(calls: Iterable[Call]) -> Counter[tuple[int, int]]:
    """Count the calls by their numbers of prompt and sampled tokens."""
    return Counter((len(call.prompt_ids), len(call.sampled_ids)) for call in calls)


def _normalize_message(message: Message) -> Any:
    """Return the message without reasoning, which agents do not send back, and with parsed arguments."""
    calls = [(call["name"], _parse_arguments(call["arguments"])) for call in message.get("tool_calls", ())]
    return message["role"], message["content"].strip(), calls


def _parse_arguments(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
