"""Changes to bodies on their way through: the top of the JSON is taken apart, all below stays as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

Fields = dict[str, msgspec.Raw]

_decode = msgspec.json.Decoder(Fields).decode
_decode_choices = msgspec.json.Decoder(list[Fields]).decode
_encode = msgspec.json.encode
_NULL = msgspec.Raw(b"null")

LIMIT_NAMES = {"responses": "max_output_tokens"}

# What vLLM samples with, unless asked otherwise, is up to the model's generation config. A call to be
# trained on is sampled as its record says: where the agent is silent, from the whole softmax.
_PLAIN_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True, slots=True)
class AddedFields:
    """What was asked for beyond the agent's own wishes, to be taken out of its answer again."""

    token_ids: bool
    logprobs: bool

    def __bool__(self) -> bool:
        return self.token_ids or self.logprobs


def set_fields(body: bytes, changes: Mapping[str, Any]) -> bytes:
    fields = _decode(body)
    for name, value in changes.items():
        fields[name] = msgspec.Raw(_encode(value))
    return _encode(fields)


def override_sampling(body: bytes, dialect: str, settings: Mapping[str, Any]) -> bytes:
    """Sampling settings, under the names that the dialect has for them."""
    changes = dict(settings)
    if (limit := changes.pop("max_tokens", None)) is not None:
        name = LIMIT_NAMES.get(dialect, "max_tokens")
        if dialect == "chat" and "max_completion_tokens" in _decode(body):
            name = "max_completion_tokens"
        changes[name] = limit
    return set_fields(body, changes)


def request_token_ids(body: bytes, dialect: str) -> tuple[bytes, AddedFields]:
    """Add what makes vLLM return token ids and logprobs, in a chat or a completion."""
    fields = _decode(body)
    given = {name for name, value in fields.items() if bytes(value) != b"null"}
    wants_logprobs = "logprobs" in given and bytes(fields["logprobs"]) != b"false"
    unasked = AddedFields(
        token_ids=bytes(fields.get("return_token_ids", _NULL)) != b"true", logprobs=not wants_logprobs
    )
    additions: dict[str, Any] = {name: value for name, value in _PLAIN_SAMPLING.items() if name not in given}
    additions["return_token_ids"] = True
    if not wants_logprobs:
        additions["logprobs"] = True if dialect == "chat" else 0
    for name, value in additions.items():
        fields[name] = msgspec.Raw(_encode(value))
    return _encode(fields), unasked


def strip_added_fields(answer: bytes, unasked: AddedFields) -> bytes:
    """An answer, or an event of one, without what the agent had not asked for."""
    fields = _decode(answer)
    if unasked.token_ids:
        fields.pop("prompt_token_ids", None)
    if "choices" in fields:
        choices = _decode_choices(fields["choices"])
        for choice in choices:
            _take_out(choice, unasked)
        fields["choices"] = msgspec.Raw(_encode(choices))
    return _encode(fields)


def _take_out(choice: Fields, unasked: AddedFields) -> None:
    if unasked.token_ids:
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)
    if unasked.logprobs and "logprobs" in choice:
        choice["logprobs"] = _NULL
