"""A session as a judge reads it: its calls as steps, each message once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from instar.rewards.judge.rubric import JudgePromptPart, truncate_parts
from instar.types import Call, CallStatus, Link, Message, Task

LOOK_AHEAD = 3
"""Further calls in which it is looked for what happened next, until a user speaks."""


@dataclass(frozen=True, slots=True)
class SessionStep:
    """One call. ``after`` is what came next in the same conversation, empty where nothing did."""

    number: int
    call: Call
    before: tuple[JudgePromptPart, ...]
    reply: JudgePromptPart
    after: tuple[JudgePromptPart, ...]

    @property
    def is_complete(self) -> bool:
        return self.call.status is CallStatus.OK


def build_steps(calls: Sequence[Call]) -> list[SessionStep]:
    numbers = {call.call_id: number for number, call in enumerate(calls, 1)}
    by_id = {call.call_id: call for call in calls}
    following: dict[str, Call] = {}
    for call in calls:
        if call.parent_id is not None and call.link is Link.EXTENDS:
            following.setdefault(call.parent_id, call)
    return [_step(call, number, numbers, by_id, following) for number, call in enumerate(calls, 1)]


def _step(
    call: Call, number: int, numbers: dict[str, int], by_id: dict[str, Call], following: dict[str, Call]
) -> SessionStep:
    parent = by_id.get(call.parent_id or "")
    before: list[JudgePromptPart] = []
    if parent is not None and numbers[parent.call_id] != number - 1:
        before.append(JudgePromptPart(f"step {number} goes on from step {numbers[parent.call_id]}"))
    elif parent is None and number > 1:
        before.append(JudgePromptPart(f"step {number} begins another conversation"))
    before += [_part(f"step {number}", message) for message in _new_messages(call, parent)]
    broken = "" if call.status is CallStatus.OK else ", broken off"
    reply = JudgePromptPart(f"step {number}: reply of the assistant{broken}", render_message(call.reply))
    return SessionStep(number, call, tuple(before), reply, tuple(_after(call, number, following)))


def _new_messages(call: Call, parent: Call | None) -> Sequence[Message]:
    """Those that were not shown with the parent."""
    if parent is None:
        return call.messages
    if call.link is Link.EXTENDS:
        return call.messages[len(parent.messages) + 1 :]
    shown = (*parent.messages, parent.reply)
    same = 0
    while same < min(len(shown), len(call.messages)) and shown[same] == call.messages[same]:
        same += 1
    return call.messages[same:]


def _after(call: Call, number: int, following: dict[str, Call]) -> Iterator[JudgePromptPart]:
    current = call
    for _ in range(LOOK_AHEAD):
        if (then := following.get(current.call_id)) is None:
            return
        news = _new_messages(then, current)
        yield from (_part(f"step {number}, what came next", message) for message in news)
        if any(message["role"] == "user" for message in news):
            return
        yield JudgePromptPart(
            f"step {number}, what came next: reply of the assistant", render_message(then.reply)
        )
        current = then


def _part(where: str, message: Message) -> JudgePromptPart:
    return JudgePromptPart(f"{where}: {message['role']}", render_message(message))


def render_message(message: Message) -> str:
    parts: list[str] = []
    if reasoning := message.get("reasoning"):
        parts.append(f"(thinks) {reasoning}")
    if name := message.get("name"):
        parts.append(f"({name})")
    if message["content"]:
        parts.append(message["content"])
    parts += [
        f"(calls the tool) {call['name']} {call['arguments']}" for call in message.get("tool_calls", ())
    ]
    return "\n".join(parts)


def render_task(task: Task, limit: int) -> list[JudgePromptPart]:
    """What the session was given to do; nothing for a person's own use."""
    if not task.data:
        return []
    text = json.dumps(task.data, ensure_ascii=False, default=str)
    return truncate_parts([JudgePromptPart("the task, as data", text)], limit)


def render_conversation(calls: Sequence[Call]) -> list[JudgePromptPart]:
    """A whole session."""
    return [part for step in build_steps(calls) for part in (*step.before, step.reply)]


def split_into_windows(
    steps: Sequence[SessionStep], shown: Callable[[SessionStep], Sequence[JudgePromptPart]], limit: int
) -> Iterator[tuple[list[SessionStep], list[JudgePromptPart]]]:
    """The steps in as few runs as fit the limit, each with what is shown of them."""
    taken: list[SessionStep] = []
    parts: list[JudgePromptPart] = []
    size = 0
    for step in steps:
        own = truncate_parts(shown(step), limit)
        length = sum(len(part.text) for part in own)
        if taken and size + length > limit:
            yield taken, parts
            taken, parts, size = [], [], 0
        taken.append(step)
        parts += own
        size += length
    if taken:
        yield taken, parts
