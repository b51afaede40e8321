"""Edit JSON bodies that are passed on. Unchanged values are copied without being parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from instar.types import FULL_SOFTMAX

Fields = dict[str, msgspec.Raw]

_decode = msgspec.json.Decoder(Fields).decode
_decode_choices = msgspec.json.Decoder(list[Fields]).decode
_encode = msgspec.json.encode
_NULL = msgspec.Raw(b"null")

# vLLM takes its sampling defaults from the model's generation config. A trainable call must be sampled from
# the full softmax unless the agent sets other values, because only the agent's settings are recorded.
_SERVER_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class AddedFields:
    """Response fields that the gateway requested for itself and removes from the agent's response."""

    has_token_ids: bool
    has_logprobs: bool

    def __bool__(self) -> bool:
        return self.has_token_ids or self.has_logprobs


def set_fields(body: bytes, changes: Mapping[str, Any]) -> bytes:
    return _merge(_decode(body), changes)


def _merge(fields: Fields, changes: Mapping[str, Any]) -> bytes:
    return _encode(fields | {name: msgspec.Raw(_encode(value)) for name, value in changes.items()})


def override_sampling(body: bytes, dialect: str, settings: Mapping[str, Any]) -> bytes:
    """Replace the sampling settings in the body. The names of the settings depend on the dialect."""
    changes = dict(settings)
    if (limit := changes.pop("max_tokens", None)) is not None:
        name = "max_output_tokens" if dialect == "responses" else "max_tokens"
        if dialect == "chat" and "max_completion_tokens" in _decode(body):
            name = "max_completion_tokens"
        changes[name] = limit
    return set_fields(body, changes)


def request_token_ids(body: bytes, dialect: str) -> tuple[bytes, AddedFields]:
    """Request vLLM's token ids and logprobs, and set sampling settings that the agent left out to those of
    the full softmax. Return the changed body, and the response fields that the agent did not request."""
    fields = _decode(body)
    agent_fields = {name for name, value in fields.items() if bytes(value) != b"null"}
    wants_logprobs = "logprobs" in agent_fields and bytes(fields["logprobs"]) != b"false"
    wants_token_ids = bytes(fields.get("return_token_ids", _NULL)) == b"true"
    added = AddedFields(has_token_ids=not wants_token_ids, has_logprobs=not wants_logprobs)
    additions: dict[str, Any] = {
        name: FULL_SOFTMAX[name] for name in _SERVER_DEFAULTS if name not in agent_fields
    }
    additions["return_token_ids"] = True
    if not wants_logprobs:
        additions["logprobs"] = True if dialect == "chat" else 0
    return _merge(fields, additions), added


def strip_added_fields(body: bytes, added: AddedFields) -> bytes:
    """Remove the added fields from a response or one of its events. Added logprobs are set to null."""
    fields = _decode(body)
    if added.has_token_ids:
        fields.pop("prompt_token_ids", None)
    if "choices" in fields:
        choices = _decode_choices(fields["choices"])
        for choice in choices:
            if added.has_token_ids:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
            if added.has_logprobs and "logprobs" in choice:
                choice["logprobs"] = _NULL
        fields["choices"] = msgspec.Raw(_encode(choices))
    return _encode(fields)
