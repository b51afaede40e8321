"""Renderers, which convert messages to prompts and sampled tokens to replies.

`TemplateRenderer` uses the model's own chat template, reads the template's own format of tool calls, and
extends a prompt with `TemplateBridge` without rendering the history again. If the template does not support
tools, the generic tool format is used (see `record.tool_calls`). The format is detected from the template and
the tokenizer, never from the model's name. `FamilyRenderer` uses the `renderers` library for models without a
chat template, and where `model.renderer` names a family.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar, cast

from instar.config import ModelConfig
from instar.errors import ConfigError, PromptTooLong, RenderError
from instar.models import load_tokenizer
from instar.record.base import Messages, Renderer, StreamParser, Tools, contains_any, to_template_message
from instar.record.bridge import QUESTION, TemplateBridge, name_results
from instar.record.content import ContentEscaper, split_reasoning
from instar.record.detect import TemplateProbe, choose_family
from instar.record.roles import RoleRules
from instar.record.stream import Detokenizer, ReplyScanner, TextStreamParser, TokenDecoder
from instar.record.template_kwargs import check_template_kwargs, find_template_variables
from instar.record.token_bounds import TokenBound
from instar.record.tool_calls import to_generic_messages
from instar.record.tool_formats import HERMES, ToolFormat
from instar.types import Json, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

R = TypeVar("R", list[int], list[int] | None)
_UNLIMITED = 1_000_000
_MIN_LONG_TEXT_CHARS = 16 * 1024
_MAX_CACHED_BYTES = 8 * 1024 * 1024
_PERIOD_SECONDS = 30.0
_CACHE_ENTRY_BYTES = 192
"""The memory of a cache entry without its text and tokens."""
_ENCODING_PROBES = (
    "{0}user\nHello there.{1}\n{0}assistant\n",
    " {0}  system\n\n\tA  B{1}{1}\n {0}\n",
    "é{0}日本語 naïve{1}🙂 'quoted' {0}x{1}",
    "{0}{1}",
    "a{0} b{1} c\n\n{0}\n d",
)


def load_renderer(folder: Path, model: ModelConfig) -> Renderer:
    tokenizer = load_tokenizer(folder)
    allow_special_tokens = model.allow_special_tokens_in_content
    has_template = tokenizer.chat_template is not None
    if model.renderer not in ("template", "auto" if has_template else "template"):
        from instar.record.family import FamilyRenderer

        family = choose_family(tokenizer, model.renderer)
        return FamilyRenderer(tokenizer, family, allow_special_tokens=allow_special_tokens)
    if not has_template:
        raise ConfigError(f"model.name: {model.name!r} has no chat template; choose a model that has one")
    path = folder / "generation_config.json"
    eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    eos_ids = [eos] if isinstance(eos, int) else list(eos or ())
    return TemplateRenderer(tokenizer, eos_ids, model.tool_format, allow_special_tokens=allow_special_tokens)


class CachingEncoder:
    """Encodes text and caches the tokens of the pieces between added tokens, such as `<|im_start|>`.

    A tokenizer encodes these pieces separately. With the cache, an agent's instructions and tools, and the
    messages of a history that is rendered again, are encoded only once. The constructor verifies that pieces
    can be encoded separately; if not, complete texts are encoded without the cache.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        max_cached_bytes: int = _MAX_CACHED_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        self._max_period_bytes = max_cached_bytes // 2
        self._clock = clock
        self._recent: dict[str, array[int]] = {}  # a list would need ten times the memory
        """The tokens of the pieces that were used in this period, which ends after `_PERIOD_SECONDS`, or when
        half of the maximum size is reached."""
        self._older: dict[str, array[int]] = {}
        """The pieces of the previous period that were not used since. They are dropped when this one ends."""
        self._period_started_at = clock()
        self._recent_bytes = self._older_bytes = 0
        self._lock = Lock()
        self._added_ids: dict[str, int] = {}
        self.splitter = self._create_splitter()
        """The pattern that splits text into pieces, or None if pieces cannot be encoded separately."""

    def __call__(self, text: str) -> list[int]:
        if self.splitter is None:
            return self.encode_uncached(text)
        return list(chain.from_iterable(map(self._encode_piece, self.splitter.split(text))))

    def encode_uncached(self, text: str) -> list[int]:
        if len(text) < _MIN_LONG_TEXT_CHARS:
            return self._backend.encode(text, add_special_tokens=False).ids
        # This method is slower for short texts, but it releases the GIL.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_piece(self, piece: str) -> Sequence[int]:
        if not piece:
            return []
        if (added := self._added_ids.get(piece)) is not None:
            return [added]
        with self._lock:
            if (ids := self._recent.get(piece)) is not None:
                return ids
            ids = self._older.get(piece)
        if ids is None:
            ids = array("i", self.encode_uncached(piece))
        self._add_to_cache(piece, ids)
        return ids

    @property
    def cached_bytes(self) -> int:
        return self._recent_bytes + self._older_bytes

    def _add_to_cache(self, piece: str, ids: array[int]) -> None:
        size = sys.getsizeof(piece) + sys.getsizeof(ids) + _CACHE_ENTRY_BYTES
        with self._lock:
            if piece in self._recent or size > self._max_period_bytes:
                return
            now = self._clock()
            is_full = self._recent_bytes + size > self._max_period_bytes
            if is_full or now > self._period_started_at + _PERIOD_SECONDS:
                self._older, self._recent = self._recent, {}
                self._older_bytes, self._recent_bytes = self._recent_bytes, 0
                self._period_started_at = now
            self._recent[piece] = ids
            self._recent_bytes += size

    def _create_splitter(self) -> re.Pattern[str] | None:
        """Return the pattern that splits text, or None if the pieces cannot be encoded separately."""
        added: list[dict[str, Any]] = json.loads(self._backend.to_str())["added_tokens"]
        if not added or any(t["lstrip"] or t["rstrip"] or t["single_word"] or t["normalized"] for t in added):
            return None
        self._added_ids = {token["content"]: token["id"] for token in added}
        longest_first = sorted(self._added_ids, key=len, reverse=True)
        self.splitter = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        pairs = zip(longest_first, longest_first[::-1], strict=True)
        texts = [probe.format(*pair) for pair in list(pairs)[:8] for probe in _ENCODING_PROBES]
        is_exact = all(self(text) == self.encode_uncached(text) for text in texts)
        return self.splitter if is_exact else None


class TokenizerRenderer(Renderer):
    """The part of a renderer that depends only on the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, allow_special_tokens: bool = False) -> None:
        """Create a renderer. With ``allow_special_tokens``, the content of messages can contain them."""
        self._tokenizer = tokenizer
        self._escaper = None if allow_special_tokens else ContentEscaper(tokenizer)
        self._decode = TokenDecoder(tokenizer.backend_tokenizer)
        self._bound = TokenBound(tokenizer.backend_tokenizer)
        self._stop_token_ids: tuple[int, ...] = ()
        self._hidden_ids: frozenset[int] = frozenset()
        """The tokens that are not part of a reply's text."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop_token_ids

    def stream_text(self, stop: Sequence[str] = ()) -> StreamParser:
        scanner = ReplyScanner(plain_text=True)
        return TextStreamParser(Detokenizer(self._decode, self._hidden_ids), stop, scanner)

    def decode_token(self, token_id: int) -> str:
        return self._decode([token_id])

    def _render_as_text(
        self,
        render: Callable[[Messages, Tools], R],
        messages: Messages,
        tools: Tools,
        *,
        keep_arguments: bool = False,
    ) -> R:
        """Return ``render(messages, tools)``, in which the content of the messages and tools is plain text.
        With ``keep_arguments``, ``render`` uses the text of tool arguments instead of their JSON value."""
        escaper = self._escaper
        try:
            if escaper is None or not contains_any((messages, tools), escaper.content_markers):
                return render(messages, tools)
            escaped_tools = escaper.escape(list(tools))
            escaped = escaper.escape_messages(messages, keep_arguments=keep_arguments)
        except RecursionError as error:
            raise RenderError("the tools or tool arguments are nested too deeply; flatten them") from error
        prompt = render(escaped, escaped_tools)
        if escaped == list(messages) or (split := split_reasoning(messages)) == list(messages):
            return prompt
        # A template cannot find the reasoning in an escaped reply. The replies are split here if that results
        # in the text that the template itself produces.
        escaped = escaper.escape_messages(split, keep_arguments=keep_arguments)
        try:
            expected = self._decode_prompt(render(messages, tools))
            split_prompt = render(escaped, escaped_tools)
        except RenderError:
            return prompt
        return split_prompt if self._decode_prompt(split_prompt) == expected else prompt

    def _decode_prompt(self, ids: list[int] | None) -> str | None:
        return None if ids is None else self._decode(ids)

    def check_messages(self, messages: Messages) -> None:
        # Formats may trim texts and omit parts of replies, so only these texts are certain to be rendered.
        self._check_length("".join(m["content"].strip() for m in messages if m["role"] in ("user", "tool")))

    def _check_length(self, text: str) -> None:
        limit = self.max_prompt_tokens
        if limit is not None and len(text) > limit and (min_tokens := self._bound.compute(text)) > limit:
            raise PromptTooLong(f"the prompt has at least {min_tokens} tokens, but the limit is {limit}")


class TemplateRenderer(TokenizerRenderer):
    """A renderer that uses the model's own chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        eos_ids: Sequence[int] = (),
        tool_format: str = "auto",
        *,
        allow_special_tokens: bool = False,
    ) -> None:
        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._encoder = CachingEncoder(tokenizer)
        self.template_variables = find_template_variables(tokenizer)
        self._template_kwargs: Json = {}
        self._rules: RoleRules | None = None
        self._reasoning_key, self._arguments_as_text = "reasoning_content", False
        probe = TemplateProbe(tokenizer, self._render_ids, self._decode)
        if not probe.accepts_calls():
            self._arguments_as_text = True
            self._arguments_as_text = probe.accepts_calls()
        if not probe.writes_reasoning():
            self._reasoning_key = "thinking"
            self._reasoning_key = "thinking" if probe.writes_reasoning() else "reasoning_content"
        self._has_tool_role = probe.supports_tool_role()
        native_format, formats_calls = probe.detect_tool_format()
        if tool_format == "template" and native_format is None:
            raise ConfigError(
                "model.tool_format: 'template' is set, but the model's chat template does not list tools, or "
                "writes calls in a format that is not known; use 'auto' or 'generic'"
            )
        self.uses_generic_tools = tool_format == "generic" or native_format is None
        self.tool_format: ToolFormat = (
            HERMES if self.uses_generic_tools or not native_format else native_format
        )
        self._formats_calls = formats_calls and not self.uses_generic_tools
        self._rules = probe.detect_role_rules(self.tool_format, formats_calls=self._formats_calls)
        self.reasoning_format, self.can_reason = probe.reasoning_format, probe.can_reason
        if isinstance(eos_id := tokenizer.eos_token_id, int):
            eos_ids = [*eos_ids, eos_id]
        stop_ids = probe.find_stop_ids(eos_ids, self.tool_format if self._formats_calls else None)
        self._stop_token_ids = tuple(sorted(stop_ids))
        self._hidden_ids = probe.hide(self.tool_format, self.reasoning_format) | stop_ids
        self._probe_prompts(probe)

    def create_variant(self, kwargs: Json) -> TemplateRenderer:
        check_template_kwargs(self._tokenizer, kwargs, allow_special_tokens=self._escaper is None)
        variant = copy.copy(self)
        variant._template_kwargs = kwargs
        variant._probe_prompts(TemplateProbe(self._tokenizer, variant._render_ids, self._decode))
        return variant

    def _probe_prompts(self, probe: TemplateProbe) -> None:
        """Detect what depends on the variables of the template."""
        self.drops_reasoning = probe.drops_reasoning()
        self._opens_reasoning = self.ends_in_reasoning(self._render_ids([QUESTION], (), generation=True))
        is_single = self._rules is not None and self._rules.single_calls
        max_calls = (1 if is_single else _UNLIMITED) if self._formats_calls else 0
        self._bridge = TemplateBridge(
            self._render_ids, self.encode, self._decode, self._stop_token_ids, max_calls=max_calls
        )
        self.bridged_roles = self._bridge.roles
        """The roles of new messages that do not require rendering the history again."""

    def render(self, messages: Messages, tools: Tools = ()) -> list[int]:
        return self._render_as_text(
            self._render_prompt, messages, tools, keep_arguments=not self._formats_calls
        )

    def _render_prompt(self, messages: Messages, tools: Tools) -> list[int]:
        return self._render_ids(*self._write_calls(messages, tools), generation=True)

    def _write_calls(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        """Return the messages and tools for the template, with calls as text if it does not format them."""
        if self.uses_generic_tools:
            return to_generic_messages(messages, tools, has_tool_role=self._has_tool_role), ()
        if self._formats_calls or self.tool_format.write is None:
            return messages, tools
        written: list[Message] = []
        for message in messages:
            if calls := message.get("tool_calls"):
                content = f"{message['content']}\n" if message["content"] else ""
                message = Message(role="assistant", content=content + self.tool_format.write(calls))
            written.append(message)
        return written, tools

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Messages,
        tools: Tools = (),
        reply: Message | None = None,
    ) -> list[int] | None:
        if (
            self.drops_reasoning
            and any(message["role"] == "user" for message in new_messages)
            and (self._has_reasoning(prompt_ids) or self._has_reasoning(sampled_ids))
        ):
            return None
        new_ids = self._render_as_text(
            partial(self._render_new, sampled_ids, reply),
            new_messages,
            tools,
            keep_arguments=not self._formats_calls,
        )
        return None if new_ids is None else [*prompt_ids, *sampled_ids, *new_ids]

    def _render_new(
        self, sampled_ids: Sequence[int], reply: Message | None, new_messages: Messages, tools: Tools
    ) -> list[int] | None:
        if self.uses_generic_tools:
            tools = ()
        new_messages, _ = self._write_calls(new_messages, ())
        return self._bridge.render_new(sampled_ids, new_messages, tools, reply)

    def stream(
        self,
        tools: Tools = (),
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        *,
        eager: bool = False,
    ) -> StreamParser:
        scanner = ReplyScanner(
            tool_format=self.tool_format if tools else None,
            tools=tools,
            reasoning_format=self.reasoning_format,
            starts_in_reasoning=self.ends_in_reasoning(prompt_ids) if prompt_ids else self._opens_reasoning,
            eager=eager,
        )
        return TextStreamParser(Detokenizer(self._decode, self._hidden_ids), stop, scanner)

    def ends_in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        tail = self._decode(list(prompt_ids[-16:])).rstrip()
        return tail.endswith(self.reasoning_format.begin.rstrip())

    def encode(self, text: str) -> list[int]:
        self._check_length(text)
        return self._encoder(text)

    def _render_ids(self, messages: Messages, tools: Tools, *, generation: bool) -> list[int]:
        from jinja2 import TemplateError

        specs = [{"type": "function", "function": dict(tool)} for tool in tools] or None
        messages = self._rules.apply(messages) if self._rules else messages
        if any(message["role"] == "tool" for message in messages):
            messages = name_results(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                [to_template_message(m, self._reasoning_key, self._arguments_as_text) for m in messages],
                tools=cast(Any, specs),
                add_generation_prompt=generation,
                tokenize=False,
                **self._template_kwargs,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            # A template may call raise_exception, or fail on a role or field that it does not support.
            raise RenderError(f"the model's chat template rejects these messages: {error}") from error
        return self._encode_rendered(cast(str, text))

    def _encode_rendered(self, text: str) -> list[int]:
        if self._escaper is None or not contains_any(text, self._escaper.prompt_markers):
            return self.encode(text)
        self._check_length(self._escaper.unescape(text))
        return self._escaper.encode(text)

    def _has_reasoning(self, ids: Sequence[int]) -> bool:
        begin = self.reasoning_format.begin
        token_id = self._tokenizer.get_added_vocab().get(begin)
        return token_id in ids if token_id is not None else begin in self._decode(list(ids))
