"""Appends new messages to tokenized conversations of models that are rendered with their chat template.

The new messages are rendered after a placeholder history. The tokens after the placeholder's last reply (the
end-of-turn token, the new messages, the start of the next reply) are appended to the real tokens. This is
correct only if these tokens do not depend on the history, so `TemplateBridge` checks several histories for
each role that can follow a reply. Roles that fail the check are not bridged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Protocol

from instar.errors import RenderError
from instar.record.base import Messages, Tools
from instar.types import Message, Tool, ToolCall

PROBE_TOOL = Tool(
    name="probe",
    description="Look something up.",
    parameters={"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
)
QUESTION, REPLY = Message(role="user", content="Hi"), Message(role="assistant", content="Ok")
_PLACEHOLDER_REPLIES = ("Ok", "Two lines,\nand a number: 42.", "{}")
_HISTORY_COUNT = 6
"""The number of placeholder histories: zero to two earlier turns, with or without a system message."""


class RenderFunction(Protocol):
    def __call__(self, messages: Messages, tools: Tools, *, generation: bool) -> list[int]: ...


class TemplateBridge:
    """Appends new messages to a prompt and its reply, whose tokens do not change."""

    def __init__(
        self,
        render: RenderFunction,
        encode: Callable[[str], list[int]],
        stop_ids: Collection[int],
        *,
        has_structured_calls: bool,
        tool_sets: Sequence[Tools] = ((),),
    ) -> None:
        """Create a bridge and verify it with each of the ``tool_sets``. ``has_structured_calls`` is True if
        the template itself formats the tool calls of a reply."""
        self._render = render
        self._encode = encode
        self._stop_ids = frozenset(stop_ids)
        self._has_structured_calls = has_structured_calls
        self.roles = frozenset(
            role
            for role in ("user", "tool", "system")
            if all(self._is_stable(role, tools) for tools in tool_sets)
        )
        """The roles of new messages that passed the check."""

    def render_new(
        self, sampled_ids: Sequence[int], new_messages: Messages, tools: Tools
    ) -> list[int] | None:
        """Return the tokens that follow a prompt and its reply ``sampled_ids``, or None if a role is not
        bridged or the template rejects the messages."""
        roles = [message["role"] for message in new_messages]
        if not roles or roles[0] not in self.roles or "assistant" in roles:
            return None
        if "system" in roles and "system" not in self.roles:
            return None
        continuation = self._render_continuation(0, new_messages, tools)
        if not continuation:
            return None
        is_closed = len(sampled_ids) > 0 and sampled_ids[-1] in self._stop_ids
        return continuation[1:] if is_closed else continuation

    def _render_continuation(
        self, history_index: int, new_messages: Messages, tools: Tools
    ) -> list[int] | None:
        """Return the tokens after a placeholder reply, starting with its end-of-turn token. The list is empty
        if there is no such token, or if the new messages change the tokens up to it. Return None if the
        template rejects the messages."""
        history = self._build_history(history_index, new_messages)
        try:
            prompt_length = len(self._render(history[:-1], tools, generation=False))
            with_reply = self._render(history, tools, generation=False)
            conversation = self._render([*history, *new_messages], tools, generation=True)
        except RenderError:
            return None
        reply = range(prompt_length, len(with_reply))
        end = next((i for i in reversed(reply) if with_reply[i] in self._stop_ids), None)
        if end is None or conversation[: end + 1] != with_reply[: end + 1]:
            return []
        return conversation[end:]

    def _build_history(self, history_index: int, new_messages: Messages) -> list[Message]:
        """Return a placeholder conversation that ends with a reply and can precede ``new_messages``."""
        reply = Message(
            role="assistant", content=_PLACEHOLDER_REPLIES[history_index % len(_PLACEHOLDER_REPLIES)]
        )
        history: list[Message] = []
        if history_index % 2:
            history.append(Message(role="system", content="Be brief."))
        for turn in range(history_index // 2):
            history += [
                Message(role="user", content=f"Question {turn}?"),
                Message(role="assistant", content=f"Answer {turn}."),
            ]
        results = takewhile(lambda message: message["role"] == "tool", new_messages)
        call_ids = [message.get("tool_call_id") or "call-0" for message in results]
        if call_ids and self._has_structured_calls:
            reply["content"] = ""
            reply["tool_calls"] = [
                ToolCall(id=call_id, name=PROBE_TOOL["name"], arguments='{"q": "x"}') for call_id in call_ids
            ]
        return [*history, QUESTION, reply]

    def _is_stable(self, role: str, tools: Tools) -> bool:
        probes = _build_probes(role)
        outcomes = [self._is_history_independent(messages, tools) for messages in probes]
        # A template must accept the first probe, but it may reject the others.
        if outcomes[0] is None or False in outcomes:
            return False
        return role == "tool" or self._matches_full_render(probes[0], tools)

    def _is_history_independent(self, new_messages: Messages, tools: Tools) -> bool | None:
        """Return True if the continuation is the same after every history that the template accepts, False if
        it differs, or None if the template accepts no history."""
        attempts = [self._render_continuation(i, new_messages, tools) for i in range(_HISTORY_COUNT)]
        accepted = [tokens for tokens in attempts if tokens is not None]
        return all(tokens and tokens == accepted[0] for tokens in accepted) if accepted else None

    def _matches_full_render(self, new_messages: Messages, tools: Tools) -> bool:
        """Return True if prompt + reply + continuation equals the rendered conversation for every history."""
        for i in range(_HISTORY_COUNT):
            if (continuation := self._render_continuation(i, new_messages, tools)) is None:
                continue
            history = self._build_history(i, new_messages)
            prompt = self._render(history[:-1], tools, generation=True)
            conversation = self._render([*history, *new_messages], tools, generation=True)
            if [*prompt, *self._encode(history[-1]["content"]), *continuation] != conversation:
                return False
        return True


def _build_probes(role: str) -> list[list[Message]]:
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
