"""The exact continuation of a conversation, for a chat template that nobody wrote a bridge for.

What a template writes behind a reply is found by rendering the new messages behind a stand-in history and
taking what follows the stand-in's reply: the end-of-turn token, the new messages, the opening of the next
reply. That difference is put behind the real tokens. It is right only if it does not depend on what
stands before; `TemplateBridge` proves this once, over histories of different shapes, for each role
that can follow a reply, and refuses to bridge a role for which it does not hold.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from instar.errors import RenderError
from instar.types import Message, Tool, ToolCall

PROBE_TOOL = Tool(
    name="probe",
    description="Look something up.",
    parameters={"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
)
_REPLIES = ("Ok", "Two lines,\nand a number: 42.", "{}")
_SHAPES = 6
"""Stand-in histories to try: with and without a system message, up to two turns before."""


class RenderIds(Protocol):
    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool
    ) -> list[int]: ...


class Encode(Protocol):
    def __call__(self, text: str) -> list[int]: ...


class TemplateBridge:
    def __init__(
        self,
        render: RenderIds,
        encode: Encode,
        stop_ids: Collection[int],
        *,
        structured_calls: bool,
        tool_formats: Sequence[Sequence[Tool]] = ((),),
    ) -> None:
        """``structured_calls``: the template itself writes an assistant's calls. ``tool_formats``: sets of
        tools to prove stability under."""
        self._render = render
        self._encode = encode
        self._stop_ids = frozenset(stop_ids)
        self._structured_calls = structured_calls
        self.roles = frozenset(
            role
            for role in ("user", "tool", "system")
            if all(self._is_stable(role, tools) for tools in tool_formats)
        )
        """Roles that may follow a reply with the tokens before them unchanged."""

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        if not new_messages or new_messages[0]["role"] not in self.roles:
            return None
        if any(message["role"] == "assistant" for message in new_messages):
            return None
        if "system" not in self.roles and any(message["role"] == "system" for message in new_messages):
            return None
        behind = self._behind(0, new_messages, tools)
        if not behind:
            return None
        closed = len(sampled_ids) > 0 and sampled_ids[-1] in self._stop_ids
        return [*prompt_ids, *sampled_ids, *(behind[1:] if closed else behind)]

    def _behind(self, shape: int, new: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """The tokens from the end-of-turn token of a stand-in history on; empty when they are not to be
        found, None when the template refuses such a conversation."""
        history = self._history(shape, new)
        try:
            asked = len(self._render(history[:-1], tools, generation=False))
            answered = self._render(history, tools, generation=False)
            whole = self._render([*history, *new], tools, generation=True)
        except RenderError:
            return None
        end = next((i for i in reversed(range(asked, len(answered))) if answered[i] in self._stop_ids), None)
        if end is None or whole[: end + 1] != answered[: end + 1]:
            return []
        return whole[end:]

    def _history(self, shape: int, new: Sequence[Message]) -> list[Message]:
        """A stand-in conversation, up to and with a reply that ``new`` can follow."""
        question = Message(role="user", content="Hi")
        reply = Message(role="assistant", content=_REPLIES[shape % len(_REPLIES)])
        before: list[Message] = []
        if shape % 2:
            before.append(Message(role="system", content="Be brief."))
        for turn in range(shape // 2):
            before += [
                Message(role="user", content=f"Question {turn}?"),
                Message(role="assistant", content=f"Answer {turn}."),
            ]
        answered: list[str] = []
        for message in new:
            if message["role"] != "tool":
                break
            answered.append(message.get("tool_call_id") or "call-0")
        if answered and self._structured_calls:
            reply["content"] = ""
            reply["tool_calls"] = [
                ToolCall(id=call_id, name=PROBE_TOOL["name"], arguments='{"q": "x"}') for call_id in answered
            ]
        return [*before, question, reply]

    def _is_stable(self, role: str, tools: Sequence[Tool]) -> bool:
        probes = _new_messages(role)
        outcomes = [self._same_behind_all(new, tools) for new in probes]
        # A template may refuse the longer ones (two user messages in a row, say), not the plain one.
        if outcomes[0] is None or False in outcomes:
            return False
        return role == "tool" or self._matches_whole_render(probes[0], tools)

    def _same_behind_all(self, new: Sequence[Message], tools: Sequence[Tool]) -> bool | None:
        """None when the template refuses these messages behind every history."""
        tried = [self._behind(shape, new, tools) for shape in range(_SHAPES)]
        found = [behind for behind in tried if behind is not None]
        return all(behind and behind == found[0] for behind in found) if found else None

    def _matches_whole_render(self, new: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """That prompt + reply + difference is what the template writes for the whole conversation."""
        for shape in range(_SHAPES):
            if (behind := self._behind(shape, new, tools)) is None:
                continue
            history = self._history(shape, new)
            prompt = self._render(history[:-1], tools, generation=True)
            whole = self._render([*history, *new], tools, generation=True)
            if [*prompt, *self._encode(history[-1]["content"]), *behind] != whole:
                return False
        return True


def _new_messages(role: str) -> list[list[Message]]:
    user = Message(role="user", content=" And\n\nthen? ")
    if role == "user":
        return [[user], [Message(role="user", content="")]]
    results = [
        Message(role="tool", content="7440", tool_call_id="call-0", name=PROBE_TOOL["name"]),
        Message(role="tool", content='{"error": "none"}\n', tool_call_id="call-1", name=PROBE_TOOL["name"]),
    ]
    if role == "system":
        system = Message(role="system", content="Mind the time.\n")
        return [[user, system], [system, user], [*results, system]]
    return [results[:1], results, [*results, user]]
