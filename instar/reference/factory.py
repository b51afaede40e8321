"""The reference that a run's config names."""

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
    """None where the reference's weight is 0: then nothing is asked or loaded. ``teacher`` is the engine of a
    reference that has one."""
    section = config.trainer.reference
    if section.weight == 0:
        return None
    reference: Reference
    if isinstance(section, EngineReferenceConfig):
        from instar.reference.engine import MAX_IN_FLIGHT, EngineReference

        assert teacher is not None, "the composer starts the teacher"
        # What is computed together changes the last bits; a run in sync mode repeats to the bit.
        reference = EngineReference(
            teacher, max_in_flight=1 if config.trainer.mode == "sync" else MAX_IN_FLIGHT
        )
    elif isinstance(section, CompletionsReferenceConfig):
        from instar.reference.completions import CompletionsReference

        reference = CompletionsReference(section, config.model, _key(section))
    else:
        reference = BackendReference(backend)
    return ReferencePenalty(reference, section.weight)


def _key(section: CompletionsReferenceConfig) -> str | None:
    if section.api_key_env is None:
        return None
    if not (key := os.environ.get(section.api_key_env)):
        raise ConfigError(
            f"trainer.reference.api_key_env: the environment variable {section.api_key_env} is not set"
        )
    return key
