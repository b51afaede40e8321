"""Whether a teacher reads token ids as the model does."""

from __future__ import annotations

from instar.config import ModelConfig
from instar.errors import ConfigError
from instar.models import load_tokenizer, resolve_model


def require_same_vocabulary(model: ModelConfig, teacher: ModelConfig) -> None:
    """Raise ConfigError naming a token of the model's that the teacher does not have, or elsewhere. The
    teacher may have further ones."""
    ours: dict[str, int] = load_tokenizer(resolve_model(model.name)).get_vocab()
    theirs: dict[str, int] = load_tokenizer(resolve_model(teacher.name)).get_vocab()
    different = [(place, token) for token, place in ours.items() if theirs.get(token) != place]
    if not different:
        return
    place, token = min(different)
    there = f"token {theirs[token]} there" if token in theirs else "not there"
    raise ConfigError(
        f"trainer.reference.model.name: {teacher.name} has another vocabulary than {model.name}: "
        f"{token!r} is token {place} here and {there}, so its logprobs would be of other tokens"
    )
