"""Keeps the content of messages from producing control tokens, such as `<|im_end|>`.

A tokenizer turns the text of a control token into that token, whoever wrote the text: a web page that
contains `<|im_end|>` could end its turn and forge another one. `ContentEscaper` therefore replaces the first
character of such a text by a lone surrogate, which no valid text contains, before the messages are rendered.
The control tokens in the rendered text are then those of the template. They are replaced by aliases, the
content is unescaped, and the result is encoded by a copy of the tokenizer that knows only the aliases.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, cast

from instar.errors import ConfigError
from instar.record.base import Messages, contains_any
from instar.record.hashing import parse_arguments
from instar.record.tool_formats import THINK
from instar.types import Message, ToolCall

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")
_FIRST_SURROGATE = 0xDD00
"""Other programs use U+DC00 and U+DFFF as the ends of a range, and U+DC80 to U+DCFF for invalid bytes."""
_HTML_TAG = re.compile(
    r"</?(a|b|bbox|blockquote|body|br|caption|code|div|em|footer|h[1-6]|head|hr|html|i|iframe|img|li|ol|p|pre|s"
    r"|span|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)
"""Tags that some tokenizers, such as Gemma's, encode as one token in ordinary text."""


class ContentEscaper:
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend: Any = tokenizer.backend_tokenizer
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        template = str(tokenizer.chat_template or "")
        control = {i: token for i, token in added.items() if _is_control_token(token, template)}
        self._control_ids = frozenset(control)
        self._model = backend.model
        # Content cannot contain an alias, because it does not know the random number.
        prefix = f"[{secrets.token_hex(8)}"
        self._aliases = {token.content: f"{prefix}x{i}]" for i, token in control.items()}
        self._max_length = max(map(len, self._aliases), default=0)
        self._lengths: dict[str, list[int]] = {}
        """The lengths of the control tokens that start with the same two characters, longest first."""
        for text in sorted(self._aliases, key=len, reverse=True):
            lengths = self._lengths.setdefault(text[:2], [])
            lengths += [len(text)] if len(text) not in lengths else []
        self._prefixes = {text[:end] for text in self._aliases for end in range(1, len(text))}
        self._first_characters = sorted({text[0] for text in self._aliases})
        self._first_pattern = re.compile(
            f"[{re.escape(''.join(self._first_characters))}]" if control else r"\Z\A"
        )
        self._surrogates = {
            character: chr(_FIRST_SURROGATE + i) for i, character in enumerate(self._first_characters)
        }
        # Lone surrogates in JSON with ASCII characters only. Such JSON writes emoji as pairs of surrogates.
        codes = [f"{ord(surrogate):04x}" for surrogate in self._surrogates.values()]
        self._json_pattern = re.compile(rf"\\u(?<!\\ud[89ab][0-9a-f]{{2}}\\u)({'|'.join(codes)})")
        self._unescape_table = str.maketrans({s: character for character, s in self._surrogates.items()})
        self._plain: Any = _copy_tokenizer(backend, added, self._aliases)
        self._original_ids = {
            self._plain.token_to_id(self._aliases.get(token.content, token.content)): i
            for i, token in added.items()
        }
        # A token that is matched after normalization may also match other texts, such as `＜|im_end|＞`.
        normalizer = backend.normalizer
        has_normalizer = (
            normalizer is not None and json.loads(normalizer.__getstate__()).get("normalizers") != []
        )
        always_encodes = has_normalizer and any(token.normalized for token in control.values())
        if has_normalizer:
            self._check_aliases(token for token in control.values() if token.content in template)
        self.content_markers = (*self._first_characters, "\\u")
        """Content without any of these texts does not change when it is escaped."""
        self.prompt_markers = ("",) if always_encodes else tuple(self._surrogates.values())
        """Rendered text with any of these texts must be encoded with `encode`."""

    def _check_aliases(self, tokens: Iterable[AddedToken]) -> None:
        """Raise ConfigError if a control token of the template is not recognized after other text."""
        for token in tokens:
            alias = self._aliases[token.content]
            ids = self._plain.encode(f"x{alias}", add_special_tokens=False).ids
            if token.normalized and self._plain.token_to_id(alias) not in ids:
                raise ConfigError(
                    f"model.name: the tokenizer recognizes {token.content!r}, which the chat template uses, "
                    "only after a space; set `normalized` of this token to false in tokenizer.json, or set "
                    "model.allow_special_tokens_in_content to true"
                )

    def escape(self, value: T) -> T:
        """Return the JSON value with the first characters of all control tokens escaped."""
        if isinstance(value, str):
            return cast(T, self._escape_text(value))
        if isinstance(value, dict):
            items = cast(dict[str, Any], value).items()
            return cast(T, {self._escape_text(key): self.escape(item) for key, item in items})
        if isinstance(value, list | tuple):
            return cast(T, [self.escape(item) for item in cast(Sequence[Any], value)])
        return value

    def escape_messages(self, messages: Messages, *, keep_arguments: bool) -> list[Message]:
        """Return the escaped messages. ``keep_arguments`` is True if the arguments of tool calls are rendered
        as text, and False if their JSON value is rendered."""
        escaped = self.escape(list(messages))
        if not keep_arguments:
            calls = [call for message in messages for call in message.get("tool_calls", ())]
            escaped_calls = [call for message in escaped for call in message.get("tool_calls", ())]
            for call, escaped_call in zip(calls, escaped_calls, strict=True):
                escaped_call["arguments"] = self._escape_arguments(call)
        return escaped

    def encode(self, text: str) -> list[int]:
        """Encode text that was rendered from escaped content. Control tokens in it become tokens."""
        pieces: list[str] = []
        position = 0
        for start, end in self._find_control_texts(text):
            if start >= position:
                pieces += [text[position:start], self._aliases[text[start:end]]]
                position = end
        plain_text = self.unescape("".join([*pieces, text[position:]]))
        # Unlike `encode`, this method releases the GIL.
        ids: list[int] = self._plain.encode_batch_fast([plain_text], add_special_tokens=False)[0].ids
        return list(chain.from_iterable(map(self._to_original_ids, ids)))

    def unescape(self, text: str) -> str:
        # Some formats write JSON with ASCII characters only.
        if self._surrogates:
            text = self._json_pattern.sub(lambda match: chr(int(match[1], 16)), text)
        return text.translate(self._unescape_table)

    def _to_original_ids(self, token_id: int) -> Sequence[int]:
        if (original := self._original_ids.get(token_id)) is not None:
            return (original,)
        if token_id not in self._control_ids:
            return (token_id,)
        # The vocabulary of the model itself contains the text of the control token.
        text = self._model.id_to_token(token_id)
        return [token.id for part in (text[:1], text[1:]) for token in self._model.tokenize(part)]

    def _escape_text(self, text: str) -> str:
        if not contains_any(text, self._first_characters):
            return text
        starts = [start for start, _ in self._find_control_texts(text)]
        # The text that follows in the prompt could complete the token.
        stripped = text.rstrip()
        tail_start = max(0, len(stripped) - self._max_length)
        starts += [i for i in range(tail_start, len(stripped)) if stripped[i:] in self._prefixes]
        if not starts:
            return text
        characters = list(text)
        for start in starts:
            characters[start] = self._surrogates[text[start]]
        return "".join(characters)

    def _escape_arguments(self, call: ToolCall) -> str:
        text = call["arguments"]
        if not contains_any(text, self.content_markers):
            return text
        value = parse_arguments(call)
        escaped = self.escape(value)
        if escaped == value:
            return text
        return escaped if isinstance(escaped, str) else json.dumps(escaped, ensure_ascii=False)

    def _find_control_texts(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end of the longest control token at each position of the text."""
        for match in self._first_pattern.finditer(text):
            start = match.start()
            first_two = text[start : start + 2]
            for length in (*self._lengths.get(first_two, ()), *self._lengths.get(first_two[0], ())):
                if text[start : start + length] in self._aliases:
                    yield start, start + length
                    break


def split_reasoning(messages: Messages) -> list[Message]:
    """Move the reasoning at the start of a reply's content to its own field, as many chat templates do."""
    return [_split_reply(message) for message in messages]


def _split_reply(message: Message) -> Message:
    before, closed, _ = message["content"].partition(THINK.end)
    if message["role"] != "assistant" or not closed or message.get("reasoning"):
        return message
    content = message["content"].rpartition(THINK.end)[2].lstrip("\n")
    reasoning = before.rpartition(THINK.begin)[2].strip("\n")
    return cast(Message, {**message, "content": content, "reasoning": reasoning})


class ContentTokenizer:
    """A tokenizer for the `renderers` library that encodes escaped content as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, escaper: ContentEscaper) -> None:
        self._tokenizer = tokenizer
        self._escaper = escaper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        if not contains_any(text, self._escaper.prompt_markers):
            return self._tokenizer(text, **options)
        ids = self._escaper.encode(text)
        # The library uses offsets only to tell which tokens are content, which is ignored here.
        return {"input_ids": ids, "offset_mapping": [(0, 0)] * len(ids)}

    def encode(self, text: str, **options: Any) -> list[int]:
        if contains_any(text, self._escaper.prompt_markers):
            return self._escaper.encode(text)
        return self._tokenizer.encode(text, **options)


def _is_control_token(token: AddedToken, template: str) -> bool:
    """Return False for words, whitespace and HTML tags, which tokenizers may add to encode ordinary text."""
    text = token.content
    if token.special:
        return bool(text.strip())
    if all(character.isalnum() or character.isspace() or character in "_▁" for character in text):
        return False
    return _HTML_TAG.fullmatch(text) is None or text in template


def _copy_tokenizer(backend: Any, added: dict[int, AddedToken], aliases: dict[str, str]) -> Any:
    """Return a tokenizer with the same model, in which control tokens have their aliases as text."""
    from tokenizers import AddedToken, Tokenizer

    copy: Any = Tokenizer(backend.model)  # shares the memory of the model
    if backend.normalizer is not None:
        copy.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        copy.pre_tokenizer = backend.pre_tokenizer
    copy.add_tokens(
        [
            AddedToken(
                aliases.get(token.content, token.content),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            for token in added.values()
        ]
    )
    return copy
