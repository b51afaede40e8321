"""Checks that a teacher has the model's vocabulary."""

from __future__ import annotations

from instar.config import ModelConfig
from instar.errors import ConfigError
from instar.models import load_tokenizer, resolve_model


def require_same_vocabulary(model: ModelConfig, teacher: ModelConfig) -> None:
    """Raise ConfigError if one of the model's tokens is missing from the teacher or has a different id."""
    model_vocab: dict[str, int] = load_tokenizer(resolve_model(model.name)).get_vocab()
    teacher_vocab: dict[str, int] = load_tokenizer(resolve_model(teacher.name)).get_vocab()
    different = [(id_, token) for token, id_ in model_vocab.items() if teacher_vocab.get(token) != id_]
    if different:
        token_id, token = min(different)
        teacher_id = teacher_vocab.get(token, "missing")
        raise ConfigError(
            f"trainer.reference.model.name: the vocabulary of {teacher.name} differs from {model.name}: "
            f"the id of {token!r} is {token_id} in the model and {teacher_id} in the teacher; "
            "choose a teacher with the same vocabulary"
        )
