"""Decide which settings of a request the engine and the model's chat template honour.

The functions are only called for requests with ``has_optional_settings``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from instar.errors import RenderError
from instar.gateway.base import ApiError, bad_request, invalid_value
from instar.gateway.dialects.base import ModelRequest
from instar.record.base import Renderer
from instar.types import FULL_SOFTMAX, OPTIONAL_SAMPLING_FIELDS, Json

_NEUTRAL: dict[str, Any] = {**FULL_SOFTMAX, "logit_bias": {}}
_IGNORABLE_FIELDS = frozenset(
    {"best_of", "compaction", "context_management", "include", "logprobs", "moderation", "store", "thread"}
    | {"top_logprobs", "truncation", "web_search_options"}
)
"""The fields that can be left out of a request. Without another one, the model would be asked something else,
or the client could not read the response."""
_SWITCHES = ("enable_thinking", "thinking")
"""The names of the template variable that turns reasoning on or off."""


class RequestSettings:
    """The settings of one request. The methods drop those that are not supported and collect their errors."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._changes: dict[str, Any] = {}
        self._errors = [error for error in request.unsupported if _is_ignorable(error)]
        self._ignored_hints: list[str] = []

    def restrict_sampling(self, supported: Collection[str], owner: str, vocab_size: int | None) -> None:
        """Drop the sampling settings that ``owner`` does not support. Raise ApiError (400) if a token of the
        bias is not in the vocabulary."""
        for name in OPTIONAL_SAMPLING_FIELDS:
            value = getattr(self._request, name)
            if value in (None, _NEUTRAL[name]):
                continue
            if name not in supported:
                message = f"'{name}' is not supported by {owner}; leave it out."
                self._errors.append(bad_request(message, name, "unsupported_value"))
                self._changes[name] = None
        for token in self._request.logit_bias or ():
            if vocab_size is not None and not 0 <= token < vocab_size:
                message = f"Token id {token} is not in the vocabulary; the largest id is {vocab_size - 1}."
                raise invalid_value(message, f"logit_bias.{token}")

    def ignore_reasoning(self) -> None:
        self._ignored_hints += self._request.reasoning

    def choose_template_kwargs(self, renderer: Renderer) -> None:
        """Keep the template's own variables, and set those that have the meaning of the request's reasoning
        fields. These are only hints, because many agents send them to every model."""
        names = renderer.template_variables
        kwargs: Json = {}
        for name, value in self._request.chat_template_kwargs.items():
            path = f"chat_template_kwargs.{name}"
            if name not in names:
                allowed = f"its variables are {', '.join(sorted(names))}" if names else "it has no variables"
                message = f"'{path}' is not used by the model's chat template; {allowed}. Leave it out."
                self._errors.append(bad_request(message, path, "unsupported_value"))
            elif not isinstance(value, bool | int | float | str | None):
                message = f"'{path}' must be a boolean, a number or text."
                raise bad_request(message, path, "invalid_type")
            elif value is not None:
                kwargs[name] = value
        for path, value in self._request.reasoning.items():
            variables = {n: v for n, v in _get_reasoning_variables(value).items() if n in names}
            if not variables:
                self._ignored_hints.append(path)
            kwargs = variables | kwargs
        self._changes["chat_template_kwargs"] = kwargs
        try:
            renderer.with_template_kwargs(kwargs)
        except RenderError as error:
            is_explicit = bool(self._request.chat_template_kwargs)
            param = "chat_template_kwargs" if is_explicit else next(iter(self._request.reasoning))
            raise invalid_value(f"'{param}' is not valid: {error}.", param) from error

    def apply(self, *, ignore: bool) -> ModelRequest:
        """Return the request without the unsupported settings. Raise ApiError (400) for the first of them,
        unless they are to be ignored."""
        request = self._request
        essential = [error for error in request.unsupported if not _is_ignorable(error)]
        if errors := essential if ignore else [*request.unsupported, *self._errors]:
            raise errors[0]
        ignored = [
            *request.ignored_fields,
            *(error.param or "" for error in self._errors),
            *self._ignored_hints,
        ]
        fields = {"unsupported": (), "ignored_fields": tuple(dict.fromkeys(ignored)), "reasoning": {}}
        return replace(request, **fields, **self._changes)


def _get_reasoning_variables(value: bool | int | str) -> Json:
    """Return the template variables that may have the meaning of a switch, a token budget, or an effort."""
    if isinstance(value, bool):
        return dict.fromkeys(_SWITCHES, value)
    if isinstance(value, int):
        return {"thinking_budget": value}
    return {"reasoning_effort": value, **dict.fromkeys(_SWITCHES, value != "none")}


def _is_ignorable(error: ApiError) -> bool:
    return (error.param or "").partition(".")[0].partition("[")[0] in _IGNORABLE_FIELDS
