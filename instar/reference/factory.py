"""Creates the reference that a run's config describes."""

from __future__ import annotations

import os

from instar.backends.base import Backend
from instar.config import CompletionsReferenceConfig, EngineReferenceConfig, RunConfig
from instar.engines.base import Engine
from instar.errors import ConfigError
from instar.reference.backend import BackendReference
from instar.reference.base import Reference
from instar.reference.penalty import ReferencePenalty


def create_penalty(config: RunConfig, backend: Backend, teacher: Engine | None) -> ReferencePenalty | None:
    """Return the penalty, or None if the reference's weight is 0. ``teacher`` is the engine of an engine
    reference."""
    section = config.trainer.reference
    if section.weight == 0:
        return None
    reference: Reference
    if isinstance(section, EngineReferenceConfig):
        from instar.reference.engine import MAX_IN_FLIGHT, EngineReference

        assert teacher is not None, "the composer starts the teacher"
        # Batching changes the last bits, and a run in sync mode must be reproducible bit for bit.
        reference = EngineReference(
            teacher, max_in_flight=1 if config.trainer.mode == "sync" else MAX_IN_FLIGHT
        )
    elif isinstance(section, CompletionsReferenceConfig):
        from instar.reference.completions import CompletionsReference

        reference = CompletionsReference(section, config.model, _read_key(section))
    else:
        reference = BackendReference(backend)
    return ReferencePenalty(reference, section.weight)


def _read_key(section: CompletionsReferenceConfig) -> str | None:
    if section.api_key_env is None:
        return None
    if not (key := os.environ.get(section.api_key_env)):
        raise ConfigError(
            f"trainer.reference.api_key_env: the environment variable {section.api_key_env} is not set"
        )
    return key
