"""Checks a training run's config before anything is started. Each check raises ConfigError if it fails."""

from __future__ import annotations

from instar.cluster.layout import RunFolder, engine_names
from instar.config import (
    CloudConfig,
    CloudEngineConfig,
    EngineReferenceConfig,
    RunConfig,
    UpstreamEngineConfig,
)
from instar.errors import ConfigError


def check_trainable(config: RunConfig) -> None:
    """Raise ConfigError unless the run has data to train on and its own engine."""
    if config.rollout is None:
        if any(section.is_live for section in config.data):
            raise ConfigError(
                "rollout: needed to train; name the tasks and the agent, or train on exported data alone "
                "(data: dataset:NAME)"
            )
        if config.eval is not None:
            raise ConfigError("rollout: needed to evaluate; its agent runs on the held-out tasks")
    if not engine_names(config):
        raise ConfigError("engine.type: an upstream can be recorded but not trained; use local to train")


def check_teacher(config: RunConfig) -> None:
    section = config.trainer.reference
    if not isinstance(section, EngineReferenceConfig) or section.weight == 0:
        return
    if isinstance(section.engine, UpstreamEngineConfig):
        raise ConfigError(
            "trainer.reference.engine.type: an upstream does not return the logprobs of given tokens; use "
            "trainer.reference.type: completions if its API does"
        )
    if isinstance(section.engine, CloudEngineConfig) and not isinstance(config.backend, CloudConfig):
        raise ConfigError(
            "trainer.reference.engine.type: cloud needs a backend that is a training service, but "
            f"backend.type is {config.backend.type!r}; use local"
        )


def check_same_backend(config: RunConfig) -> None:
    """Raise ConfigError unless a resumed run has the backend that saved its state, because no other backend
    can load it. `auto` may resolve to a different backend from the one at the start."""
    folder = RunFolder(config.run_dir.resolve())
    if not folder.config_file.is_file():
        return
    if (previous := folder.read_config().backend.type) != config.backend.type:
        raise ConfigError(
            f"backend.type: this run was trained by {previous}, and now it would be {config.backend.type}; "
            f"set backend.type to {previous}, or give the run another name"
        )
