"""References that use the backend or an engine, and the factory and checks for a run's reference penalty."""

from __future__ import annotations

import os
from collections.abc import Sequence

from instar.backends.base import Backend
from instar.config import CompletionsReferenceConfig, EngineReferenceConfig, ModelConfig, RunConfig
from instar.engines.base import Engine
from instar.errors import ConfigError, EngineUnavailable
from instar.http.retry import RetryPolicy
from instar.models import load_tokenizer, resolve_model
from instar.reference.base import PerSequenceReference, Reference
from instar.reference.penalty import ReferencePenalty
from instar.types import Floats, Ids, Sample

MAX_IN_FLIGHT = 16
UNAVAILABLE_TIMEOUT_SECONDS = 300.0
"""How long to wait for an unreachable engine, which may be restarting and loading its model."""
RETRY_POLICY = RetryPolicy(first_delay=0.1, max_delay=5.0, jitter=(1.0, 1.0))


class BackendReference(Reference):
    """Uses the base model as the reference. The training backend computes its logprobs."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._backend.reference_logprobs(samples)

    async def close(self) -> None:
        """Do nothing. The trainer closes the backend."""


class EngineReference(PerSequenceReference):
    """A teacher that runs in an engine."""

    def __init__(self, engine: Engine, max_in_flight: int) -> None:
        super().__init__(max_in_flight)
        self._engine = engine

    async def score(self, token_ids: Ids) -> Floats:
        return await RETRY_POLICY.run(
            lambda: self._engine.logprobs(token_ids),
            retry_on=EngineUnavailable,
            seconds=UNAVAILABLE_TIMEOUT_SECONDS,
        )

    async def close(self) -> None:
        await self._engine.close()


def create_penalty(config: RunConfig, backend: Backend, teacher: Engine | None) -> ReferencePenalty | None:
    """Create the penalty, or return None if the reference's weight is 0. ``teacher`` is only used for an
    engine reference. Raises ConfigError if the environment variable with the API key is not set."""
    section = config.trainer.reference
    if section.weight == 0:
        return None
    reference: Reference
    if isinstance(section, EngineReferenceConfig):
        assert teacher is not None, "the trainer role connects to the teacher"
        # Batching changes the last bits of logprobs, and a run in sync mode must be reproducible bit for bit.
        reference = EngineReference(teacher, 1 if config.trainer.mode == "sync" else MAX_IN_FLIGHT)
    elif isinstance(section, CompletionsReferenceConfig):
        from instar.reference.completions import CompletionsReference

        key = None if section.api_key_env is None else os.environ.get(section.api_key_env)
        if section.api_key_env is not None and not key:
            raise ConfigError(
                f"trainer.reference.api_key_env: the environment variable {section.api_key_env} is not set"
            )
        reference = CompletionsReference(section, config.model, key)
    else:
        reference = BackendReference(backend)
    return ReferencePenalty(reference, section.weight)


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
