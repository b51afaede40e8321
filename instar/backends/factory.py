"""From a run's config to its backend, with everything it cannot honour refused at start."""

from __future__ import annotations

from typing import cast

from instar.backends.base import DEFAULT_CLIP, Backend, BackendCapabilities
from instar.config import LossConfig, RunConfig
from instar.errors import ConfigError
from instar.registry import variant


def create_backend(config: RunConfig) -> Backend:
    """Loads the model: takes a while."""
    made = variant("backends", config.backend)(config.model, config.backend, seed=config.seed)
    backend = cast(Backend, made)
    check_capabilities(backend.capabilities, config.trainer.loss)
    return backend


def check_capabilities(capabilities: BackendCapabilities, loss: LossConfig) -> None:
    if loss.name not in capabilities.losses:
        raise ConfigError(
            f"trainer.loss.name: {loss.name!r} is not computed by this backend; "
            f"supported: {', '.join(sorted(capabilities.losses))}"
        )
    for setting in ("clip_low", "clip_high"):
        if getattr(loss, setting) is not None and loss.name not in DEFAULT_CLIP:
            raise ConfigError(
                f"trainer.loss.{setting}: {loss.name!r} does not clip; leave it out, or use "
                f"{' or '.join(sorted(DEFAULT_CLIP))}"
            )
