"""Appends new messages to tokenized conversations of models that are rendered with their chat template.

The new messages are rendered after a placeholder history. The tokens after the placeholder's last reply (the
end-of-turn token, the new messages, the start of the next reply) are appended to the real tokens. This is
correct only if these tokens do not depend on the history, so `TemplateBridge` checks several histories for
each sequence of roles that follows a reply. Sequences that fail the check are not bridged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Protocol, cast

from instar.errors import RenderError
from instar.record.base import Messages, Tools
from instar.record.hashing import normalize_call_id
from instar.types import Message, Tool, ToolCall

PROBE_TOOL = Tool(
    name="probe",
    description="Look something up.",
    parameters={
        "type": "object",
        "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["q"],
    },
)
QUESTION, REPLY = Message(role="user", content="Hi"), Message(role="assistant", content="Ok")
_PLACEHOLDER_REPLIES = ("Ok", "Two lines,\nand a number: 42.", "{}")
_REASONING = "Hm, 7440."
_HISTORY_COUNT = 6
"""The number of placeholder histories: zero to two earlier turns, with or without a system message."""
_MAX_PROBED_ROLES = 8
"""Sequences of more roles are not bridged."""


class RenderFunction(Protocol):
    def __call__(self, messages: Messages, tools: Tools, *, generation: bool) -> list[int]: ...


class TemplateBridge:
    """Appends new messages to a prompt and its reply, whose tokens do not change."""

    def __init__(
        self,
        render: RenderFunction,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        stop_ids: Collection[int],
        *,
        max_calls: int,
    ) -> None:
        """Create a bridge. ``max_calls`` is the number of tool calls in a reply that the template itself
        formats: 0 if it formats none, 1 if it accepts only one."""
        self._render = render
        self._encode = encode
        self._decode = decode
        self._stop_ids = frozenset(stop_ids)
        self._max_calls = max_calls
        self._placeholder_reasoning: dict[tuple[tuple[str, ...], bool], str | None] = {}
        """The reasoning of the placeholder reply by the roles of the new messages and the presence of tools,
        or None if such messages are not bridged."""
        self._end_ids = self._find_end_ids()
        """The stop tokens that the template itself writes after a reply without tool calls."""

    @property
    def roles(self) -> frozenset[str]:
        """The roles of new messages that are bridged if all of them have the same role."""
        tool_sets = [()] if not self._max_calls else [(), (PROBE_TOOL,)]
        return frozenset(
            role
            for role in ("user", "tool", "system")
            if all(self._choose_reasoning((role,), tools) is not None for tools in tool_sets)
        )

    def render_new(
        self, sampled_ids: Sequence[int], new_messages: Messages, tools: Tools, reply: Message | None = None
    ) -> list[int] | None:
        """Return the tokens that follow a prompt and its reply ``sampled_ids``, or None if the roles are not
        bridged or the template rejects the messages. ``reply`` has the names of the tools it called."""
        roles = _shorten_runs([message["role"] for message in new_messages])
        if not roles or "assistant" in roles or len(roles) > _MAX_PROBED_ROLES:
            return None
        reasoning = self._choose_reasoning(roles, tools)
        if reasoning is None:
            return None
        continuation = self._render_continuation(0, new_messages, tools, reasoning, reply)
        if not continuation:
            return None
        is_closed = len(sampled_ids) > 0 and sampled_ids[-1] in self._stop_ids
        # Some models end a reply with the first token of the next message. Other stop tokens end it as well.
        is_same_end = is_closed and (continuation[0] == sampled_ids[-1] or continuation[0] in self._end_ids)
        return continuation[1:] if is_same_end else continuation

    def _render_continuation(
        self,
        history_index: int,
        new_messages: Messages,
        tools: Tools,
        reasoning: str,
        reply: Message | None = None,
    ) -> list[int] | None:
        """Return the tokens after a placeholder reply, starting with its end-of-turn token if there is one.
        The list is empty if the new messages change earlier tokens. Return None if the template rejects the
        messages."""
        history = self._build_history(history_index, new_messages, reasoning, reply)
        try:
            conversation = self._render([*history, *new_messages], tools, generation=True)
            if new_messages[0]["role"] != "tool" and not reasoning:
                prompt = self._render(history[:-1], tools, generation=True)
                start = [*prompt, *self._encode(history[-1]["content"])]
                return self._skip_space(conversation[len(start) :]) if _starts(conversation, start) else []
            prompt_length = len(self._render(history[:-1], tools, generation=False))
            with_reply = self._render(history, tools, generation=False)
        except RenderError:
            return None
        pairs = enumerate(zip(with_reply, conversation, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(with_reply), len(conversation)))
        ends = (i for i in range(shared - 1, prompt_length - 1, -1) if with_reply[i] in self._stop_ids)
        if (end := next(ends, None)) is not None:
            return conversation[end:]
        if shared == len(with_reply):
            return conversation[shared:]
        # The template may write other whitespace before the end-of-turn token of its last message.
        tails = self._skip_space(with_reply[shared:]), self._skip_space(conversation[shared:])
        return tails[1] if all(tail[:1] and tail[0] in self._stop_ids for tail in tails) else []

    def _skip_space(self, continuation: list[int]) -> list[int]:
        """Drop the whitespace that a template writes between a reply and its end-of-turn token."""
        end = next((i for i, token in enumerate(continuation) if token in self._stop_ids), 0)
        return continuation if self._decode(continuation[:end]).strip() else continuation[end:]

    def _build_history(
        self, history_index: int, new_messages: Messages, reasoning: str, last_reply: Message | None
    ) -> list[Message]:
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
        results = list(takewhile(lambda message: message["role"] == "tool", new_messages))[: self._max_calls]
        if results:
            reply["content"] = ""
            reply["tool_calls"] = [
                ToolCall(id=call_id, name=name, arguments='{"q": "x"}')
                for call_id, name in pair_results(results, last_reply)
            ]
        if reasoning:
            reply["reasoning"] = reasoning
        return [*history, QUESTION, reply]

    def _choose_reasoning(self, roles: tuple[str, ...], tools: Tools) -> str | None:
        key = roles, bool(tools)
        if key not in self._placeholder_reasoning:
            # Some templates write empty reasoning into the last reply only, so reasoning is tried, too.
            probe_tools = (PROBE_TOOL,) if tools else ()
            texts = ("", _REASONING) if self._keeps_reasoning(roles, probe_tools) else ("",)
            stable = (text for text in texts if self._is_stable(roles, probe_tools, text))
            self._placeholder_reasoning[key] = next(stable, None)
        return self._placeholder_reasoning[key]

    def _keeps_reasoning(self, roles: tuple[str, ...], tools: Tools) -> bool:
        probe = _build_probe(roles, 0)
        try:
            history = self._build_history(0, probe, _REASONING, None)
            return _REASONING in self._decode(self._render([*history, *probe], tools, generation=True))
        except RenderError:
            return False

    def _is_stable(self, roles: tuple[str, ...], tools: Tools, reasoning: str) -> bool:
        outcomes = [
            self._is_history_independent(_build_probe(roles, variant), tools, reasoning)
            for variant in range(2)
        ]
        # A template must accept the first probe, but it may reject the other.
        return outcomes[0] is not None and False not in outcomes

    def _is_history_independent(self, new_messages: Messages, tools: Tools, reasoning: str) -> bool | None:
        """Return True if the continuation is the same after every history that the template accepts, False if
        it differs, or None if the template accepts no history."""
        attempts = [
            self._render_continuation(i, new_messages, tools, reasoning) for i in range(_HISTORY_COUNT)
        ]
        accepted = [tokens for tokens in attempts if tokens is not None]
        return all(tokens and tokens == accepted[0] for tokens in accepted) if accepted else None

    def _find_end_ids(self) -> frozenset[int]:
        try:
            prompt_length = len(self._render([QUESTION], (), generation=False))
            with_reply = self._render([QUESTION, REPLY], (), generation=False)
        except RenderError:
            return frozenset()
        return self._stop_ids.intersection(with_reply[prompt_length:])


def pair_results(results: Messages, reply: Message | None) -> list[tuple[str, str]]:
    """Return the call id and the tool's name of each result, by the ids or the order of the reply's calls."""
    calls = reply.get("tool_calls", []) if reply else []
    names = {normalize_call_id(call["id"]): call["name"] for call in calls}
    pairs: list[tuple[str, str]] = []
    for i, result in enumerate(results):
        call_id = result.get("tool_call_id") or f"call{i:05}"
        by_position = calls[i]["name"] if i < len(calls) else PROBE_TOOL["name"]
        name = result.get("name") or names.get(normalize_call_id(call_id), by_position)
        pairs.append((call_id, name))
    return pairs


def name_results(messages: Messages) -> list[Message]:
    """Add the tool's name to each result, which some formats need."""
    named: list[Message] = []
    for i, message in enumerate(messages):
        if message["role"] == "tool" and not message.get("name"):
            start = next((j for j in range(i, 0, -1) if messages[j - 1]["role"] != "tool"), 0)
            reply = messages[start - 1] if start else None
            if reply and reply.get("tool_calls"):
                (*_, (_, name)) = pair_results(messages[start : i + 1], reply)
                message = cast(Message, {**message, "name": name})
        named.append(message)
    return named


def _starts(sequence: list[int], prefix: list[int]) -> bool:
    return sequence[: len(prefix)] == prefix


def _shorten_runs(roles: Sequence[str]) -> tuple[str, ...]:
    """Shorten every run of the same role to at most two."""
    return tuple(role for i, role in enumerate(roles) if i < 2 or not role == roles[i - 1] == roles[i - 2])


def _build_probe(roles: tuple[str, ...], variant: int) -> list[Message]:
    texts = {
        "user": (" And\n\nthen? ", ""),
        "system": ("Mind the time.\n", "Be quick."),
        "tool": ("7440", '{"error": "none"}\n'),
    }
    probe: list[Message] = []
    for i, role in enumerate(roles):
        message = Message(role=role, content=texts[role][variant])  # type: ignore[typeddict-item]
        if role == "tool":
            message["tool_call_id"], message["name"] = f"call{i:05}", PROBE_TOOL["name"]
        probe.append(message)
    return probe
