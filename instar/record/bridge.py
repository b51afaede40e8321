"""The exact continuation of a conversation, for chat templates without a hand-written bridge.

To find what a template writes after a reply, the new messages are rendered after a placeholder history. The
tokens after the placeholder's reply (the end-of-turn token, the new messages, the start of the next reply)
are appended to the real tokens. This is correct only if these tokens do not depend on the history.
`TemplateBridge` verifies this once for each role that can follow a reply, with histories of different shapes.
A role for which the tokens depend on the history is not bridged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
"""The number of placeholder histories: with and without a system message, with up to two earlier turns."""


class TokenRenderer(Protocol):
    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool
    ) -> list[int]: ...


class TemplateBridge:
    def __init__(
        self,
        render: TokenRenderer,
        encode: Callable[[str], list[int]],
        stop_ids: Collection[int],
        *,
        structured_calls: bool,
        tool_formats: Sequence[Sequence[Tool]] = ((),),
    ) -> None:
        """``structured_calls`` is True if the template itself writes an assistant's calls. ``tool_formats``
        are the sets of tools with which the independence of the history is verified."""
        self._render = render
        self._encode = encode
        self._stop_ids = frozenset(stop_ids)
        self._structured_calls = structured_calls
        self.roles = frozenset(
            role
            for role in ("user", "tool", "system")
            if all(self._is_stable(role, tools) for tools in tool_formats)
        )
        """The roles that may follow a reply while the tokens before them stay unchanged."""

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
        continuation = self._continuation(0, new_messages, tools)
        if not continuation:
            return None
        is_closed = len(sampled_ids) > 0 and sampled_ids[-1] in self._stop_ids
        return [*prompt_ids, *sampled_ids, *(continuation[1:] if is_closed else continuation)]

    def _continuation(self, shape: int, new: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """Return the tokens that follow a placeholder reply, starting with its end-of-turn token. The list is
        empty if these tokens cannot be located. Return None if the template rejects such a conversation."""
        history = self._history(shape, new)
        try:
            prompt_length = len(self._render(history[:-1], tools, generation=False))
            with_reply = self._render(history, tools, generation=False)
            conversation = self._render([*history, *new], tools, generation=True)
        except RenderError:
            return None
        reply = range(prompt_length, len(with_reply))
        end = next((i for i in reversed(reply) if with_reply[i] in self._stop_ids), None)
        if end is None or conversation[: end + 1] != with_reply[: end + 1]:
            return []
        return conversation[end:]

    def _history(self, shape: int, new: Sequence[Message]) -> list[Message]:
        """Return a placeholder conversation that ends with a reply which ``new`` can follow."""
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
        call_ids: list[str] = []
        for message in new:
            if message["role"] != "tool":
                break
            call_ids.append(message.get("tool_call_id") or "call-0")
        if call_ids and self._structured_calls:
            reply["content"] = ""
            reply["tool_calls"] = [
                ToolCall(id=call_id, name=PROBE_TOOL["name"], arguments='{"q": "x"}') for call_id in call_ids
            ]
        return [*before, question, reply]

    def _is_stable(self, role: str, tools: Sequence[Tool]) -> bool:
        probes = _new_messages(role)
        outcomes = [self._is_history_independent(new, tools) for new in probes]
        # A template may reject the longer probes (two user messages in a row, for example), but not the first
        # one.
        if outcomes[0] is None or False in outcomes:
            return False
        return role == "tool" or self._matches_full_render(probes[0], tools)

    def _is_history_independent(self, new: Sequence[Message], tools: Sequence[Tool]) -> bool | None:
        """Return True if the continuation is the same after every history, or None if the template rejects
        these messages after every history."""
        attempts = [self._continuation(shape, new, tools) for shape in range(_SHAPES)]
        accepted = [tokens for tokens in attempts if tokens is not None]
        return all(tokens and tokens == accepted[0] for tokens in accepted) if accepted else None

    def _matches_full_render(self, new: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Return True if prompt + reply + continuation is what the template writes for the whole
        conversation."""
        for shape in range(_SHAPES):
            if (continuation := self._continuation(shape, new, tools)) is None:
                continue
            history = self._history(shape, new)
            prompt = self._render(history[:-1], tools, generation=True)
            conversation = self._render([*history, *new], tools, generation=True)
            if [*prompt, *self._encode(history[-1]["content"]), *continuation] != conversation:
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
