"""Renders a session for a judge. Each call becomes a step with the messages added since its parent call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from instar.rewards.judge.rubric import JudgePromptPart, truncate_parts
from instar.types import Call, CallStatus, Link, Message, Task

MAX_FOLLOWING_CALLS = 3
"""The maximum number of later calls to show after a step. Nothing after the next user message is shown."""


@dataclass(frozen=True, slots=True)
class SessionStep:
    number: int
    call: Call
    before: tuple[JudgePromptPart, ...]
    """The messages added since the parent call. A note comes first if the parent is not the previous step."""
    reply: JudgePromptPart
    after: tuple[JudgePromptPart, ...]
    """The messages and replies that followed in the same conversation. See MAX_FOLLOWING_CALLS."""

    is_answered_by_user: bool = False
    """True if a user message follows in the same conversation."""

    @property
    def is_complete(self) -> bool:
        return self.call.status is CallStatus.OK


def build_steps(calls: Sequence[Call]) -> list[SessionStep]:
    numbers = {call.call_id: number for number, call in enumerate(calls, 1)}
    following: dict[str, Call] = {}
    for call in calls:
        if call.parent_id is not None and call.link is Link.EXTENDS:
            following.setdefault(call.parent_id, call)
    steps: list[SessionStep] = []
    for number, call in enumerate(calls, 1):
        parent_number = numbers.get(call.parent_id or "")
        before: list[JudgePromptPart] = []
        if parent_number is not None and parent_number != number - 1:
            before.append(JudgePromptPart(f"step {number} continues step {parent_number}"))
        elif parent_number is None and number > 1:
            before.append(JudgePromptPart(f"step {number} starts a new conversation"))
        parent = None if parent_number is None else calls[parent_number - 1]
        before += [_render_part(f"step {number}", message) for message in _find_new_messages(call, parent)]
        suffix = "" if call.status is CallStatus.OK else ", incomplete"
        reply = JudgePromptPart(f"step {number}: assistant's reply{suffix}", _render_message(call.reply))
        after = tuple(_render_following(call, number, following))
        is_answered = _is_answered_by_user(call, following)
        steps.append(SessionStep(number, call, tuple(before), reply, after, is_answered))
    return steps


def _find_new_messages(call: Call, parent: Call | None) -> Sequence[Message]:
    """Return the messages of a call after the prefix that it shares with its parent's messages and reply."""
    if parent is None:
        return call.messages
    if call.link is Link.EXTENDS:
        return call.messages[len(parent.messages) + 1 :]
    earlier = (*parent.messages, parent.reply)
    pairs = zip(earlier, call.messages, strict=False)
    return call.messages[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]


def _is_answered_by_user(call: Call, following: dict[str, Call]) -> bool:
    current = call
    for _ in range(MAX_FOLLOWING_CALLS):
        if (next_call := following.get(current.call_id)) is None:
            return False
        if any(message["role"] == "user" for message in _find_new_messages(next_call, current)):
            return True
        current = next_call
    return False


def _render_following(call: Call, number: int, following: dict[str, Call]) -> Iterator[JudgePromptPart]:
    label = f"step {number}, what came next"
    current = call
    for _ in range(MAX_FOLLOWING_CALLS):
        if (next_call := following.get(current.call_id)) is None:
            return
        messages = _find_new_messages(next_call, current)
        yield from (_render_part(label, message) for message in messages)
        if any(message["role"] == "user" for message in messages):
            return
        yield JudgePromptPart(f"{label}: assistant's reply", _render_message(next_call.reply))
        current = next_call


def _render_part(label: str, message: Message) -> JudgePromptPart:
    return JudgePromptPart(f"{label}: {message['role']}", _render_message(message))


def _render_message(message: Message) -> str:
    lines: list[str] = []
    if reasoning := message.get("reasoning"):
        lines.append(f"(thinks) {reasoning}")
    if name := message.get("name"):
        lines.append(f"({name})")
    if message["content"]:
        lines.append(message["content"])
    lines += [
        f"(calls the tool) {call['name']} {call['arguments']}" for call in message.get("tool_calls", ())
    ]
    return "\n".join(lines)


def render_task(task: Task, max_chars: int) -> list[JudgePromptPart]:
    """Return the prompt parts with the task's data, or an empty list for a session without a task."""
    if not task.data:
        return []
    text = json.dumps(task.data, ensure_ascii=False, default=str)
    return truncate_parts([JudgePromptPart("task data", text)], max_chars)


def render_conversation(calls: Sequence[Call]) -> list[JudgePromptPart]:
    return [part for step in build_steps(calls) for part in (*step.before, step.reply)]


def split_into_windows(
    steps: Sequence[SessionStep],
    render_step: Callable[[SessionStep], Sequence[JudgePromptPart]],
    max_chars: int,
) -> Iterator[tuple[list[SessionStep], list[JudgePromptPart]]]:
    """Yield windows of consecutive steps with their prompt parts, at most ``max_chars`` characters each."""
    window: list[SessionStep] = []
    parts: list[JudgePromptPart] = []
    size = 0
    for step in steps:
        step_parts = truncate_parts(render_step(step), max_chars)
        length = sum(len(part.text) for part in step_parts)
        if window and size + length > max_chars:
            yield window, parts
            window, parts, size = [], [], 0
        window.append(step)
        parts += step_parts
        size += length
    if window:
        yield window, parts
