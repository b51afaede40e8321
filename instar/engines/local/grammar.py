"""Token masks for replies of a required form, computed by llguidance."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from instar.errors import ConstraintError
from instar.types import CallForm, OutputConstraint

logger = logging.getLogger(__name__)

Mask = NDArray[np.bool_]
MAX_CACHED_GRAMMARS = 64
_ANY_TEXT = "/(?s:.*)/"
_ANY_OBJECT = '{"type": "object"}'
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""With arbitrary whitespace, a model could write whitespace until the maximum length."""
_GAP = '("\\n" | "\\n\\n")?'
"""The text that models write between their reasoning and the reply."""


class TokenMatcher:
    """Follows one reply and computes the tokens that can come next."""

    def __init__(self, matcher: LLMatcher, stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._stop_ids = sorted(stop_ids)

    def compute_mask(self, vocab_size: int) -> Mask:
        """Return True for each token that can come next: only those that end the reply if it is complete, or
        after an error."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[:vocab_size]
        mask = np.zeros(vocab_size, np.bool_)
        mask[: len(allowed)] = allowed
        if self._matcher.is_error():
            mask[:] = False
        if self._matcher.is_error() or self._matcher.is_accepting():
            mask[[token for token in self._stop_ids if token < vocab_size]] = True
        return mask

    def consume(self, token: int) -> str | None:
        """Add a token. Return the reason if the rest of the reply cannot be constrained, or else None."""
        if not self._matcher.is_error() and token not in self._stop_ids:
            self._matcher.consume_token(token)
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else None


class GrammarCompiler:
    """Compiles constraints. `start` may run in any thread, because compiling may take a second."""

    def __init__(self, tokenizer: Any, eos_ids: Collection[int]) -> None:
        """Load the vocabulary, which takes up to a second and stops all other Python threads."""
        self._eos_ids = sorted(eos_ids) or [i for i in [tokenizer.eos_token_id] if i is not None]
        self._compile_cached = lru_cache(MAX_CACHED_GRAMMARS)(self._compile)
        backend = tokenizer.backend_tokenizer
        try:
            if not self._eos_ids:
                raise ValueError("it has no token that ends a reply")
            self._tokenizer = LLTokenizer(backend.to_str(), eos_token=self._eos_ids)
        except ValueError as error:
            logger.warning("Replies cannot be constrained, because of the model's tokenizer: %s", error)
            self._tokenizer = None
            return
        added = backend.get_added_tokens_decoder().items()
        is_special = self._tokenizer.is_special_token
        self._special_tokens = {token.content: i for i, token in added if is_special(i)}

    @property
    def is_available(self) -> bool:
        return self._tokenizer is not None

    def start(self, constraint: OutputConstraint, stop_ids: Collection[int]) -> TokenMatcher:
        """Return the matcher of a new reply. Raise ConstraintError if the constraint is not supported."""
        return TokenMatcher(self._compile_cached(constraint).deep_copy(), {*self._eos_ids, *stop_ids})

    def _compile(self, constraint: OutputConstraint) -> LLMatcher:
        try:
            return self._compile_exactly(constraint)
        except ConstraintError:
            # An agent may list tools that it does not require, so their schemas are not errors.
            calls = tuple(map(self._drop_unsupported_schema, constraint.calls))
            if calls == constraint.calls:
                raise
        return self._compile_exactly(msgspec.structs.replace(constraint, calls=calls))

    def _drop_unsupported_schema(self, call: CallForm) -> CallForm:
        try:
            self._compile_exactly(OutputConstraint(calls=(call,)))
        except ConstraintError:
            return msgspec.structs.replace(call, schema=_ANY_OBJECT)
        return call

    def _compile_exactly(self, constraint: OutputConstraint) -> LLMatcher:
        assert self._tokenizer is not None
        try:
            grammar = write_grammar(constraint, self._special_tokens)
        except (ValueError, RecursionError) as error:  # for example, a redacted schema
            raise ConstraintError(f"The JSON schema cannot be read: {error}") from error
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        probe = matcher.deep_copy()
        probe.compute_bitmask()  # some schemas exceed a limit only here
        if probe.is_error():
            reason = probe.get_error().partition("\n")[0].rpartition("failed to compile JSON schema: ")[2]
            raise ConstraintError(f"The JSON schema is not supported: {reason}")
        return matcher


def write_grammar(constraint: OutputConstraint, special_tokens: dict[str, int]) -> str:
    """Return the grammar in llguidance's variant of Lark, in which added tokens are not text."""
    rules: list[str] = []
    choices: list[str] = []
    if constraint.schema is not None:
        rules.append(f"value: {_write_schema(constraint.schema)}")
        choices.append("value")
    if constraint.calls:
        names = [f"call_{i}" for i in range(len(constraint.calls))]
        for name, call in zip(names, constraint.calls, strict=True):
            rules += _write_call(name, call, special_tokens)
        rules.append(f"call: {' | '.join(names)}")
        separator = constraint.separator
        more = "" if separator is None else f" ({_write_text(separator, special_tokens)} call)*"
        choices.append(f"call{more}")
    start = " | ".join(choices)
    if constraint.reasoning is not None:
        begin, end = constraint.reasoning
        if end in special_tokens:
            rules.append(f"thought: {_ANY_TEXT} <[{special_tokens[end]}]>")
        else:
            rules.append(f"thought[suffix={json.dumps(end)}]: {_ANY_TEXT}")
        reasoning = f"{_write_text(begin, special_tokens)} thought {_GAP}"
        start = f"({reasoning}){'?' if begin else ''} ({start})"
    return "\n".join(["%llguidance {}", f"start: {start}", *rules, ""])


def _write_call(name: str, call: CallForm, special_tokens: dict[str, int]) -> list[str]:
    begin, end = _write_text(call.begin, special_tokens), _write_text(call.end, special_tokens)
    # Few tools limit their schemas to the supported keywords, so the others are not enforced.
    schema = _write_schema(call.schema, lenient=True)
    return [f"{name}: {begin} {name}_arguments {end}", f"{name}_arguments: {schema}"]


def _write_schema(schema: str, **options: bool) -> str:
    return f"%json {json.dumps({**json.loads(schema), 'x-guidance': {**_JSON_STYLE, **options}})}"


def _write_text(text: str, special_tokens: dict[str, int]) -> str:
    pattern = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or "(?!)"
    parts: Sequence[str] = re.split(f"({pattern})", text)
    return " ".join(
        f"<[{special_tokens[part]}]>" if part in special_tokens else json.dumps(part)
        for part in parts
        if part
    )
