"""Detects the format of a model's replies from its chat template and its tokenizer, never from its name.

`TemplateProbe` renders short conversations with calls and reasoning. The tool format is the one with which
the stream parser reads the rendered calls back; the tokens that end a reply are those that follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from instar.errors import ConfigError, RenderError
from instar.record.base import Messages, Tools
from instar.record.bridge import PROBE_TOOL, QUESTION, REPLY
from instar.record.hashing import parse_arguments
from instar.record.roles import RoleRules, shorten_id
from instar.record.stream import Detokenizer, ReplyScanner, TextStreamParser, TokenDecoder
from instar.record.tool_formats import (
    REASONING_FORMATS,
    THINK,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
)
from instar.types import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARK = "7440-mark"
"""A text that no chat template contains, so finding it in a prompt shows that its message was rendered."""
PROBE_CALLS = (
    ToolCall(id="functions.probe:0", name=PROBE_TOOL["name"], arguments='{"q": "x-7440 y", "n": 2}'),
    ToolCall(id="functions.probe:1", name=PROBE_TOOL["name"], arguments='{"n": 3, "q": "z-7440"}'),
)


class RenderTemplate(Protocol):
    def __call__(self, messages: Messages, tools: Tools, *, generation: bool) -> list[int]: ...


class TemplateProbe:
    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, render: RenderTemplate, decode: TokenDecoder
    ) -> None:
        self._render = render
        self._decode = decode
        self._template = str(tokenizer.chat_template)
        added = tokenizer.added_tokens_decoder
        self._added_texts = frozenset(token.content for token in added.values())
        special = {i: token.content for i, token in added.items() if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self._special: dict[int, str] = special
        reasoning_format = self._detect_reasoning_format()
        self.can_reason = reasoning_format is not None
        self.reasoning_format = reasoning_format or THINK

    def hide(self, *formats: ToolFormat | ReasoningFormat | None) -> frozenset[int]:
        """Return the special tokens that are not part of a reply's text in these formats."""
        markers = [marker for known in formats if known for marker in known.markers if marker]
        return frozenset(
            i
            for i, text in self._special.items()
            if not any(text in marker for marker in markers)
            and "think" not in text
            and "tool_call" not in text
        )

    def _detect_reasoning_format(self) -> ReasoningFormat | None:
        def is_known(text: str) -> bool:
            return text in self._template or text in self._added_texts

        for known in REASONING_FORMATS:
            if is_known(known.begin.strip()) and is_known(known.end):
                return known
        return None

    def render_text(self, messages: Messages, tools: Tools, *, generation: bool = False) -> str | None:
        try:
            return self._decode(self._render(messages, tools, generation=generation))
        except RenderError:
            return None

    def accepts_calls(self) -> bool:
        return self.render_text([QUESTION, _build_reply("")], ()) is not None

    def writes_reasoning(self) -> bool:
        return MARK in (self.render_text([QUESTION, _build_reply(MARK)], ()) or "")

    def supports_tool_role(self) -> bool:
        return MARK in (self.render_text([QUESTION, REPLY, Message(role="tool", content=MARK)], ()) or "")

    def drops_reasoning(self) -> bool:
        """Return True if the template writes the reasoning of a reply, but not after another user message."""
        reply = Message(role="assistant", content="Ok", reasoning=MARK)
        is_written = self.writes_reasoning() or MARK in (self.render_text([QUESTION, reply], ()) or "")
        return is_written and MARK not in (self.render_text([QUESTION, reply, QUESTION], ()) or MARK)

    def detect_tool_format(self) -> tuple[ToolFormat | None, bool]:
        """Return the format of the template's tool calls, or None if the template does not list tools or its
        format is unknown, and True if the template formats the calls of a reply itself."""
        with_tools = self.render_text([QUESTION], [PROBE_TOOL], generation=True)
        if with_tools is None or PROBE_TOOL["name"] not in with_tools:
            return None, False
        for call_id in (PROBE_CALLS[0]["id"], shorten_id(PROBE_CALLS[0]["id"])):
            call = ToolCall(id=call_id, name=PROBE_CALLS[0]["name"], arguments=PROBE_CALLS[0]["arguments"])
            reply = Message(role="assistant", content="", tool_calls=[call])
            try:
                prompt = self._render([QUESTION], [PROBE_TOOL], generation=True)
                with_call = self._render([QUESTION, reply], [PROBE_TOOL], generation=False)
            except RenderError:
                continue
            shared = next(
                (i for i, (a, b) in enumerate(zip(prompt, with_call, strict=False)) if a != b), len(prompt)
            )
            for known in TOOL_FORMATS:
                if self._can_parse(known, with_call[:shared], with_call[shared:], call):
                    return known, True
            if "x-7440" in self._decode(with_call[shared:]):
                return None, False  # the format is not known
            break
        # The template leaves the text of calls to the caller.
        return next((f for f in TOOL_FORMATS if f.write and self._mentions(f, with_tools)), None), False

    def _mentions(self, known: ToolFormat, prompt: str) -> bool:
        return known.begin in prompt or known.begin in self._added_texts

    def _can_parse(
        self, known: ToolFormat, prompt_ids: Sequence[int], ids: Sequence[int], call: ToolCall
    ) -> bool:
        scanner = ReplyScanner(
            tool_format=known,
            tools=[PROBE_TOOL],
            reasoning_format=self.reasoning_format,
            starts_in_reasoning=self.ends_in_reasoning(prompt_ids),
        )
        detokenizer = Detokenizer(self._decode, self.hide(known, self.reasoning_format))
        parser = TextStreamParser(detokenizer, (), scanner)
        parser.feed(ids)
        parser.finish()
        calls = parser.message.get("tool_calls", [])
        return len(calls) == 1 and (calls[0]["name"], parse_arguments(calls[0])) == (
            call["name"],
            parse_arguments(call),
        )

    def ends_in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        tail = self._decode(list(prompt_ids[-16:])).rstrip()
        return tail.endswith(self.reasoning_format.begin.rstrip())

    def find_stop_ids(self, eos_ids: Iterable[int], tool_format: ToolFormat | None) -> frozenset[int]:
        """Return the tokens that end a reply: ``eos_ids`` and the special tokens that follow a reply."""
        stop_ids = set(eos_ids)
        reply = Message(role="assistant", content=MARK)
        self._add_stop_id(stop_ids, [QUESTION, reply], [QUESTION], (), MARK)
        if tool_format is not None:
            calling = Message(role="assistant", content="", tool_calls=list(PROBE_CALLS[:1]))
            result = Message(
                role="tool", content="Ok", tool_call_id=PROBE_CALLS[0]["id"], name=PROBE_TOOL["name"]
            )
            closer = tool_format.end or "}"
            self._add_stop_id(stop_ids, [QUESTION, calling], [result], [PROBE_TOOL], closer, tool_format)
        return frozenset(stop_ids)

    def _add_stop_id(
        self,
        stop_ids: set[int],
        conversation: list[Message],
        more: list[Message],
        tools: Tools,
        last_text: str,
        tool_format: ToolFormat | None = None,
    ) -> None:
        """Add the special token that follows ``last_text`` at the end of the conversation, or the first one
        of the next messages, unless a known stop token follows."""
        text = self.render_text(conversation, tools) or ""
        longer = self.render_text([*conversation, *more], tools, generation=True) or ""
        tails = [text.rpartition(last_text)[2]]
        if longer.startswith(text):
            tails.append(longer[len(text) :])
        for tail in tails:
            specials = self._leading_specials(tail, tool_format)
            if specials:
                if not stop_ids.intersection(specials):
                    stop_ids.add(specials[0])
                return

    def _leading_specials(self, text: str, tool_format: ToolFormat | None) -> list[int]:
        """Return the special tokens at the start of the text, with only whitespace or wrappers between."""
        ids = {token: i for i, token in self._special.items()}
        longest_first = sorted(ids, key=len, reverse=True)
        leading: list[int] = []
        skipped = (*tool_format.wrappers, "}", "]", "`") if tool_format else ()
        while text := text.lstrip():
            if wrapper := next((w for w in skipped if text.startswith(w)), None):
                text = text[len(wrapper) :]
            elif token := next((t for t in longest_first if text.startswith(t)), None):
                leading.append(ids[token])
                text = text[len(token) :]
            else:
                break
        return leading

    def detect_role_rules(self, tool_format: ToolFormat | None, *, formats_calls: bool) -> RoleRules | None:
        """Return the rules, or None if the template accepts all messages."""
        rules = RoleRules.probe(lambda messages, tools: self.render_text(messages, tools, generation=True))
        if tool_format is not None and formats_calls:
            rules = rules.probe_tools(self.render_text, [PROBE_TOOL], PROBE_CALLS)
        return None if rules == RoleRules() else rules


def _build_reply(reasoning: str) -> Message:
    return Message(role="assistant", content="", reasoning=reasoning, tool_calls=[PROBE_CALLS[0]])


def choose_family(tokenizer: PreTrainedTokenizerFast, name: str) -> str:
    """Return the family ``name``, or with `auto` the only family whose special tokens the tokenizer has."""
    from renderers.base import MODEL_RENDERER_MAP, create_renderer
    from renderers.configs import config_from_name

    names = list(dict.fromkeys(MODEL_RENDERER_MAP.values()))
    if name != "auto":
        if name not in names:
            raise ConfigError(
                f"model.renderer: {name!r} is not known; choose auto, template or {', '.join(sorted(names))}"
            )
        return name
    supported: list[str] = []
    for family in names:
        try:
            create_renderer(tokenizer, cast(Any, config_from_name(family)))
        except Exception:  # noqa: BLE001 - they raise many types if the tokenizer lacks their tokens
            continue
        supported.append(family)
    if len(supported) != 1:
        raise ConfigError(
            "model.name: the model has no chat template, and its special tokens are those of "
            f"{', '.join(supported) or 'no known family'}; set model.renderer, or choose another model"
        )
    return supported[0]
