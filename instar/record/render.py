"""Renderers, which convert messages to prompts and sampled tokens to replies.

The `renderers` library has renderers for some model families. Other models are rendered with their chat
template. `TemplateBridge` extends a prompt without rendering the history again. If the template does not
support tools, the generic tool format is used (see `record.tool_calls`).
"""

from __future__ import annotations

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
from instar.record.bridge import PROBE_TOOL, QUESTION, REPLY, TemplateBridge
from instar.record.content import ContentEscaper, split_reasoning
from instar.record.stream import THINK_OPEN, Detokenizer, ReplyScanner, TextStreamParser, TokenDecoder
from instar.record.token_bounds import TokenBound
from instar.record.tool_calls import CALL_CLOSE, CALL_OPEN, parse_call, to_generic_messages
from instar.types import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

R = TypeVar("R", list[int], list[int] | None)
_MIN_LONG_TEXT_CHARS = 16 * 1024
_MAX_CACHED_BYTES = 8 * 1024 * 1024
_PERIOD_SECONDS = 30.0
_CACHE_ENTRY_BYTES = 192
"""The memory of a cache entry without its text and tokens."""
_PROBE_TEXT = "7440-mark"
"""A text that no chat template contains, so finding it in a prompt shows that its message was rendered."""
_ENCODING_PROBES = (
    "{0}user\nHello there.{1}\n{0}assistant\n",
    " {0}  system\n\n\tA  B{1}{1}\n {0}\n",
    "é{0}日本語 naïve{1}🙂 'quoted' {0}x{1}",
    "{0}{1}",
    "a{0} b{1} c\n\n{0}\n d",
)


def load_renderer(folder: Path, model: ModelConfig) -> Renderer:
    from renderers.base import MODEL_RENDERER_MAP  # slow to import

    tokenizer = load_tokenizer(folder)
    # The library only knows published models by name. A fine-tuned model is not mapped to its base model,
    # because its template may be different.
    if (family := MODEL_RENDERER_MAP.get(model.name)) and model.tool_format != "generic":
        from instar.record.family import FamilyRenderer

        renderer = FamilyRenderer(
            tokenizer, family, allow_special_tokens=model.allow_special_tokens_in_content
        )
        # A renderer that does not support tools would drop them silently.
        if renderer.supports_tools() or tokenizer.chat_template is None:
            return renderer
    if tokenizer.chat_template is None:
        raise ConfigError(f"model.name: {model.name!r} has no chat template; choose a model that has one")
    path = folder / "generation_config.json"
    eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    eos_ids = [eos] if isinstance(eos, int) else list(eos or ())
    return TemplateRenderer(
        tokenizer,
        eos_ids,
        model.tool_format,
        allow_special_tokens=model.allow_special_tokens_in_content,
    )


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
        from renderers.configs import DefaultRendererConfig
        from renderers.default import DefaultRenderer

        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._encoder = CachingEncoder(tokenizer)
        # The library's template renderer is used only for its stop tokens.
        default_renderer = DefaultRenderer(cast(Any, tokenizer), DefaultRendererConfig())
        self._has_tool_role = self._supports_tool_role()
        has_tools = self._supports_tool_calls()
        if tool_format == "template" and not has_tools:
            raise ConfigError(
                "model.tool_format: 'template' is set, but the model's chat template does not list tools, or "
                f"does not write calls as {CALL_OPEN}JSON{CALL_CLOSE}; use 'auto' or 'generic'"
            )
        self.uses_generic_tools = tool_format == "generic" or not has_tools
        prompt = self._render_ids([QUESTION], (), generation=True)
        conversation = self._render_ids([QUESTION, REPLY], (), generation=False)
        special_ids = tokenizer.all_special_ids
        turn_end = [token_id for token_id in conversation[len(prompt) :] if token_id in special_ids][:1]
        stop_ids = {*default_renderer.get_stop_token_ids(), *eos_ids, *turn_end}
        self._stop_token_ids = tuple(sorted(stop_ids))
        # Reasoning and tool call markers are not hidden, because the parser needs them.
        special = zip(special_ids, tokenizer.all_special_tokens, strict=True)
        hidden_ids = {i for i, text in special if "think" not in text and "tool_call" not in text}
        self._hidden_ids = frozenset(hidden_ids | stop_ids)
        self._opens_reasoning = self._decode(prompt).rstrip().endswith(THINK_OPEN)
        self._bridge = TemplateBridge(
            self._render_ids,
            self.encode,
            self._stop_token_ids,
            has_structured_calls=not self.uses_generic_tools,
            tool_sets=[()] if self.uses_generic_tools else [(), (PROBE_TOOL,)],
        )
        self.bridged_roles = self._bridge.roles
        """The roles of new messages that do not require rendering the history again."""

    def render(self, messages: Messages, tools: Tools = ()) -> list[int]:
        return self._render_as_text(
            self._render_prompt, messages, tools, keep_arguments=self.uses_generic_tools
        )

    def _render_prompt(self, messages: Messages, tools: Tools) -> list[int]:
        if self.uses_generic_tools:
            messages, tools = to_generic_messages(messages, tools, has_tool_role=self._has_tool_role), ()
        return self._render_ids(messages, tools, generation=True)

    def extend(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], new_messages: Messages, tools: Tools = ()
    ) -> list[int] | None:
        new_ids = self._render_as_text(
            partial(self._render_new, sampled_ids),
            new_messages,
            tools,
            keep_arguments=self.uses_generic_tools,
        )
        return None if new_ids is None else [*prompt_ids, *sampled_ids, *new_ids]

    def _render_new(
        self, sampled_ids: Sequence[int], new_messages: Messages, tools: Tools
    ) -> list[int] | None:
        if self.uses_generic_tools:
            new_messages, tools = to_generic_messages(new_messages, (), has_tool_role=self._has_tool_role), ()
        return self._bridge.render_new(sampled_ids, new_messages, tools)

    def stream(
        self,
        tools: Tools = (),
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        *,
        eager: bool = False,
    ) -> StreamParser:
        scanner = ReplyScanner(
            parse_calls=bool(tools), starts_in_reasoning=self._opens_reasoning, eager=eager
        )
        return TextStreamParser(Detokenizer(self._decode, self._hidden_ids), stop, scanner)

    def encode(self, text: str) -> list[int]:
        self._check_length(text)
        return self._encoder(text)

    def _render_ids(self, messages: Messages, tools: Tools, *, generation: bool) -> list[int]:
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
            # A template may call raise_exception, or fail on a role or field that it does not support.
            raise RenderError(f"the model's chat template rejects these messages: {error}") from error
        return self._encode_rendered(cast(str, text))

    def _encode_rendered(self, text: str) -> list[int]:
        if self._escaper is None or not contains_any(text, self._escaper.prompt_markers):
            return self.encode(text)
        self._check_length(self._escaper.unescape(text))
        return self._escaper.encode(text)

    def _render_text(self, messages: Messages, tools: Tools = ()) -> str:
        return self._decode(self._render_ids(messages, tools, generation=False))

    def _supports_tool_role(self) -> bool:
        result = Message(role="tool", content=_PROBE_TEXT)
        try:
            return _PROBE_TEXT in self._render_text([QUESTION, REPLY, result])
        except RenderError:
            return False

    def _supports_tool_calls(self) -> bool:
        """Return True if the template renders tools, and renders calls as `parse_call` expects them."""
        call = ToolCall(id="call-0", name=PROBE_TOOL["name"], arguments='{"q": "x"}')
        reply = Message(role="assistant", content="", tool_calls=[call])
        try:
            with_tools = self._render_text([QUESTION], [PROBE_TOOL])
            with_call = self._render_text([QUESTION, reply], [PROBE_TOOL])
        except RenderError:
            return False
        if with_tools == self._render_text([QUESTION]) or PROBE_TOOL["name"] not in with_tools:
            return False
        parsed = parse_call(with_call.rpartition(CALL_OPEN)[2].partition(CALL_CLOSE)[0])
        return parsed is not None and parsed["name"] == call["name"]
