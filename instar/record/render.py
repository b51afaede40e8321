"""Renderers: one written by hand in the `renderers` library where it knows the model, else one over the
model's own chat template with our bridge and, where the template knows no tools, our tool format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from instar.config import ModelConfig
from instar.errors import ConfigError, RenderError
from instar.models import load_tokenizer
from instar.record.base import Renderer, StreamParser
from instar.record.bridge import PROBE_TOOL, TemplateBridge
from instar.record.encode import CachingEncoder
from instar.record.stream import THINK_OPEN, Detokenizer, PlainTextScanner, ReplyScanner, TextStreamParser
from instar.record.tools import CALL_CLOSE, CALL_OPEN, parse_call, to_generic_messages
from instar.types import Json, Message, Tool, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Renderer", "TemplateRenderer", "load_renderer"]


def load_renderer(folder: Path, model: ModelConfig) -> Renderer:
    from renderers.base import MODEL_RENDERER_MAP  # slow to import

    tokenizer = load_tokenizer(folder)
    # The library maps names of published models only: a fine-tune's template may differ from its origin's.
    if (family := MODEL_RENDERER_MAP.get(model.name)) and model.tool_format != "generic":
        from instar.record.family import FamilyRenderer

        renderer = FamilyRenderer(tokenizer, family)
        # One that never tells the model of tools would drop them silently.
        if renderer.lists_tools() or tokenizer.chat_template is None:
            return renderer
    if tokenizer.chat_template is None:
        raise ConfigError(f"model.name: {model.name!r} has no chat template, so it cannot take messages")
    return TemplateRenderer(tokenizer, _eos_ids(folder), model.tool_format)


def _eos_ids(folder: Path) -> list[int]:
    """End-of-text tokens that the model's generation settings name."""
    path = folder / "generation_config.json"
    eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    return [eos] if isinstance(eos, int) else list(eos or ())


def to_template_message(message: Message) -> Json:
    """In the shape that chat templates and `renderers` read."""
    out: Json = {"role": message["role"], "content": message["content"]}
    if reasoning := message.get("reasoning"):
        out["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": _parsed_arguments(call)},
            }
            for call in calls
        ]
    if "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    if "name" in message:
        out["name"] = message["name"]
    return out


def _parsed_arguments(call: ToolCall) -> Any:
    """As an object: many templates walk through it. What is no JSON stays text."""
    try:
        return json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call["arguments"]


class TemplateRenderer(Renderer):
    """Over a model's own chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, eos_ids: Sequence[int] = (), tool_format: str = "auto"
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = CachingEncoder(tokenizer)
        # The library's own fallback, which applies the template too: it knows the stop tokens.
        from renderers.configs import DefaultRendererConfig
        from renderers.default import DefaultRenderer

        self._library = DefaultRenderer(cast(Any, tokenizer), DefaultRendererConfig())
        self._tool_role = self._writes_tool_role()
        knows_tools = self._template_calls_parse()
        if tool_format == "template" and not knows_tools:
            raise ConfigError(
                "model.tool_format: 'template' needs a chat template that lists tools and writes calls as "
                f"{CALL_OPEN}JSON{CALL_CLOSE}; this model's does not. Use 'auto' or 'generic'"
            )
        self._generic = tool_format == "generic" or not knows_tools
        stops = {*self._library.get_stop_token_ids(), *eos_ids, *self._turn_end()}
        self._stop_token_ids = tuple(sorted(stops))
        self._hidden = frozenset(self._hidden_ids()) | stops
        self._opens_reasoning = self._prompt_text().rstrip().endswith(THINK_OPEN)
        self._bridge = TemplateBridge(
            self._ids,
            self.encode,
            self._stop_token_ids,
            structured_calls=not self._generic,
            tool_formats=[()] if self._generic else [(), (PROBE_TOOL,)],
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop_token_ids

    @property
    def uses_generic_tools(self) -> bool:
        """Whether tools go by the generic format."""
        return self._generic

    @property
    def bridged_roles(self) -> frozenset[str]:
        """Roles that can follow a reply without rendering the history anew."""
        return self._bridge.roles

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        if self._generic:
            messages, tools = to_generic_messages(messages, tools, tool_role=self._tool_role), ()
        return self._ids(messages, tools, generation=True)

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> list[int] | None:
        if self._generic:
            new_messages = to_generic_messages(new_messages, tools, tool_role=self._tool_role, block=False)
            tools = ()
        return self._bridge.extend(prompt_ids, sampled_ids, new_messages, tools)

    def stream(
        self,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        *,
        eager: bool = False,
    ) -> StreamParser:
        scanner = ReplyScanner(calls=bool(tools), reasoning=self._opens_reasoning, eager=eager)
        return TextStreamParser(Detokenizer(self._decode, self._hidden), stop, scanner)

    def stream_text(self, stop: Sequence[str] = ()) -> StreamParser:
        return TextStreamParser(Detokenizer(self._decode, self._hidden), stop, PlainTextScanner())

    def encode(self, text: str) -> list[int]:
        return self._encoder(text)

    def token_text(self, token_id: int) -> str:
        return self._decode([token_id])

    def _ids(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool) -> list[int]:
        from jinja2 import TemplateError

        specs = [{"type": "function", "function": dict(tool)} for tool in tools] or None
        try:
            text = self._tokenizer.apply_chat_template(
                [to_template_message(message) for message in messages],
                tools=cast(Any, specs),
                add_generation_prompt=generation,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            # A template refuses by raise_exception, or trips over a role or field it was not written for.
            raise RenderError(f"the model's chat template refuses these messages: {error}") from error
        return self._encoder(cast(str, text))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        return self._decode(self._ids(messages, tools, generation=False))

    def _prompt_text(self) -> str:
        return self._decode(self._ids([Message(role="user", content="Hi")], (), generation=True))

    def _hidden_ids(self) -> list[int]:
        """Special tokens that are no part of a reply's text; the markers we parse stay visible."""
        special = zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True)
        return [token_id for token_id, text in special if "think" not in text and "tool_call" not in text]

    def _turn_end(self) -> set[int]:
        """The special token that the template puts behind a reply."""
        question, reply = Message(role="user", content="Hi"), Message(role="assistant", content="Ok")
        asked = self._ids([question], (), generation=True)
        answered = self._ids([question, reply], (), generation=False)
        special = set(self._tokenizer.all_special_ids)
        return {next((i for i in answered[len(asked) :] if i in special), -1)} - {-1}

    def _writes_tool_role(self) -> bool:
        mark = "7440-mark"
        try:
            text = self._text(
                [
                    Message(role="user", content="Hi"),
                    Message(role="assistant", content="Ok"),
                    Message(role="tool", content=mark),
                ]
            )
        except RenderError:
            return False
        return mark in text

    def _template_calls_parse(self) -> bool:
        """Whether the template lists tools, and writes a call in the form that we read back."""
        question = Message(role="user", content="Hi")
        call = ToolCall(id="call-0", name=PROBE_TOOL["name"], arguments='{"q": "x"}')
        try:
            listed = self._text([question], [PROBE_TOOL])
            said = self._text(
                [question, Message(role="assistant", content="", tool_calls=[call])], [PROBE_TOOL]
            )
        except RenderError:
            return False
        if listed == self._text([question]) or PROBE_TOOL["name"] not in listed:
            return False
        written = parse_call(said.rpartition(CALL_OPEN)[2].partition(CALL_CLOSE)[0])
        return written is not None and written["name"] == call["name"]
