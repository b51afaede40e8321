from __future__ import annotations

from pathlib import Path

import pytest

from instar.backends.base import BackendCapabilities
from instar.backends.factory import check_capabilities, create_backend
from instar.config import LossConfig, ModelConfig, RunConfig, TrainerConfig
from instar.errors import ConfigError

ALL = BackendCapabilities(
    losses=frozenset({"ppo", "importance_sampling", "cross_entropy"}), artifacts=frozenset({"adapter"})
)


async def test_creates_what_the_config_names(model_folder: Path) -> None:
    backend = create_backend(RunConfig(model=ModelConfig(name=str(model_folder), dtype="fp32")))
    assert backend.capabilities.artifacts == {"adapter"}
    await backend.close()


def test_a_loss_the_backend_lacks_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.loss\.name.*cispo.*cross_entropy, importance_sampling, ppo"
    ):
        check_capabilities(ALL, LossConfig(name="cispo"))


def test_clipping_a_loss_that_does_not_clip_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.loss\.clip_high.*cispo or ppo"):
        check_capabilities(ALL, LossConfig(clip_high=2.0))
    check_capabilities(ALL, LossConfig(name="ppo", clip_high=2.0))
    config = RunConfig(
        model=ModelConfig(name=str(model_folder)), trainer=TrainerConfig(loss=LossConfig(clip_low=0.5))
    )
    with pytest.raises(ConfigError, match="clip_low"):
        create_backend(config)
