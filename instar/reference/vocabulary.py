"""Checks that a teacher has the model's vocabulary."""

from __future__ import annotations

from instar.config import ModelConfig
from instar.errors import ConfigError
from instar.models import load_tokenizer, resolve_model


def require_same_vocabulary(model: ModelConfig, teacher: ModelConfig) -> None:
    """Raise ConfigError if the teacher lacks a token of the model or has it under a different id. The teacher
    may have additional tokens."""
    ours: dict[str, int] = load_tokenizer(resolve_model(model.name)).get_vocab()
    theirs: dict[str, int] = load_tokenizer(resolve_model(teacher.name)).get_vocab()
    different = [(token_id, token) for token, token_id in ours.items() if theirs.get(token) != token_id]
    if not different:
        return
    token_id, token = min(different)
    difference = f"token {theirs[token]} in the teacher" if token in theirs else "missing in the teacher"
    raise ConfigError(
        f"trainer.reference.model.name: {teacher.name} has another vocabulary than {model.name}: "
        f"{token!r} is token {token_id} in the model and {difference}"
    )
