"""Adapts messages to chat templates that reject some sequences of roles.

Some templates have no system role, want users and assistants to alternate, or allow one tool call per reply.
`RoleRules.probe` renders short conversations to see which of them a template rejects or drops. Messages that
a template accepts are not changed.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from instar.record.base import Messages, Tools
from instar.types import Message, ToolCall

RenderText = Callable[[Messages, Tools], str | None]
"""A function that returns the rendered text of messages, or None if the template rejects them."""
_ID_LENGTH = 9
_ID_ALPHABET = string.ascii_letters + string.digits
_SHORT_ID = re.compile(rf"[a-zA-Z0-9]{{{_ID_LENGTH}}}")
_FIRST, _SECOND, _THIRD = "7440-first", "7440-second", "7440-third"
"""Texts that no chat template contains, so that the text of a prompt shows which messages are rendered."""


@dataclass(frozen=True, slots=True)
class RoleRules:
    """The ways in which a template's messages must be changed."""

    folds_system: bool = False
    """Add the system message to the first user message."""
    joins_systems: bool = False
    """Join the system messages at the start."""
    moves_late_system: bool = False
    """Send system messages after the first turn as user messages."""
    alternates: bool = False
    """Join consecutive messages of the user, or of the assistant."""
    joins_user_to_tool: bool = False
    """Add a user message after a tool result to the result."""
    single_calls: bool = False
    """Split replies with several tool calls into one reply per call."""
    short_ids: bool = False
    """Replace ids of tool calls by ids of nine letters and digits."""

    @staticmethod
    def probe(render: RenderText) -> RoleRules:
        def accepts(*messages: Message) -> bool:
            text = render(messages, ())
            return text is not None and all(message["content"].strip() in text for message in messages)

        user, again = Message(role="user", content=_FIRST), Message(role="user", content=_SECOND)
        reply = Message(role="assistant", content="Ok")
        system, late = Message(role="system", content=_THIRD), Message(role="system", content="7440-late")
        folds_system = not accepts(system, user)
        return RoleRules(
            folds_system=folds_system,
            joins_systems=folds_system or not accepts(system, late, user),
            moves_late_system=not accepts(user, reply, again, late) or not accepts(user, reply, late, again),
            alternates=not accepts(user, again),
        )

    def probe_tools(self, render: RenderText, tools: Tools, calls: Sequence[ToolCall]) -> RoleRules:
        """Return the rules for a template that renders ``tools`` and results of two ``calls``."""
        user = Message(role="user", content=_FIRST)

        def accepts(calls: Sequence[ToolCall], *more: Message) -> bool:
            reply = Message(role="assistant", content="", tool_calls=list(calls))
            contents = (_SECOND, _THIRD)[: len(calls)]
            results = [
                Message(role="tool", content=text, tool_call_id=call["id"], name=call["name"])
                for text, call in zip(contents, calls, strict=True)
            ]
            text = render([user, reply, *results, *more], tools)
            texts = [*contents, *(message["content"] for message in more)]
            return text is not None and all(expected in text for expected in texts)

        short_ids = not accepts(calls[:1])
        if short_ids:
            calls = [cast(ToolCall, {**call, "id": shorten_id(call["id"])}) for call in calls]
            short_ids = accepts(calls[:1])
        both = render([user, Message(role="assistant", content="", tool_calls=list(calls))], tools)
        return replace(
            self,
            short_ids=short_ids,
            single_calls=both is None
            or calls[-1]["arguments"].split('"')[-2] not in both
            or not accepts(calls),
            joins_user_to_tool=not accepts(calls[:1], Message(role="user", content="7440-more")),
        )

    def apply(self, messages: Messages) -> list[Message]:
        adapted: list[Message] = []
        for message in self._split_replies(messages) if self.single_calls else messages:
            message = self._shorten_ids(message) if self.short_ids else message
            self._append(adapted, message)
        if self.folds_system and adapted and adapted[0]["role"] == "system":
            first = next((m for m in adapted[:2] if m["role"] == "user"), None)
            system = Message(role="user", content=adapted[0]["content"])
            adapted[: 2 if first else 1] = [_join(system, first) if first else system]
        return adapted

    def _append(self, adapted: list[Message], message: Message) -> None:
        last = adapted[-1]["role"] if adapted else None
        role = message["role"]
        if role == "system" and last not in (None, "system") and self.moves_late_system:
            message = cast(Message, {**message, "role": "user"})
            role = "user"
        is_joined = (
            (role == last == "system" and self.joins_systems)
            or (role == last and role in ("user", "assistant") and self.alternates)
            or (role == "user" and last == "tool" and self.joins_user_to_tool)
        )
        if is_joined:
            adapted[-1] = _join(adapted[-1], message)
        else:
            adapted.append(message)

    def _split_replies(self, messages: Messages) -> list[Message]:
        split: list[Message] = []
        i = 0
        while i < len(messages):
            message = messages[i]
            i += 1
            calls = message.get("tool_calls", [])
            if len(calls) < 2:
                split.append(message)
                continue
            results: list[Message] = []
            while i < len(messages) and messages[i]["role"] == "tool":
                results.append(messages[i])
                i += 1
            for position, call in enumerate(calls):
                part = cast(Message, {**message, "tool_calls": [call]})
                if position:
                    part = Message(role="assistant", content="", tool_calls=[call])
                own = [result for result in results if result.get("tool_call_id") == call["id"]]
                split += [part, *own]
                results = [result for result in results if result not in own]
            split += results
        return split

    def _shorten_ids(self, message: Message) -> Message:
        shortened = cast(Message, dict(message))
        if call_id := message.get("tool_call_id"):
            shortened["tool_call_id"] = shorten_id(call_id)
        if calls := message.get("tool_calls"):
            shortened["tool_calls"] = [
                cast(ToolCall, {**call, "id": shorten_id(call["id"])}) for call in calls
            ]
        return shortened


def shorten_id(call_id: str) -> str:
    """Return the id itself if it has nine letters and digits, else a hash of it."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    characters: list[str] = []
    for _ in range(_ID_LENGTH):
        number, index = divmod(number, len(_ID_ALPHABET))
        characters.append(_ID_ALPHABET[index])
    return "".join(characters)


def _join(first: Message, second: Message) -> Message:
    texts = [text for text in (first["content"], second["content"]) if text]
    joined = cast(Message, {**first, "content": "\n\n".join(texts)})
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined
