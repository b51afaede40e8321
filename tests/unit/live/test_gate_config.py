"""Tests of the configs that the gate accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from instar.cluster.run import train
from instar.config import RunConfig
from instar.errors import ConfigError
from tests.tiny import make_tiny_model

LIVE = {"data": "live", "agents": {"a": {"mode": "learn"}}}


def test_engine_with_merged_weights_is_rejected() -> None:
    with pytest.raises(ValidationError, match=r"engine\.policy: merged cannot be used with data 'live'"):
        RunConfig.model_validate({**LIVE, "engine": {"type": "vllm", "policy": "merged"}})


async def test_training_full_weights_is_rejected(tmp_path: Path) -> None:
    model = {"name": str(make_tiny_model(tmp_path / "model")), "device": "cpu"}
    settings = {**LIVE, "dir": tmp_path / "run", "model": model, "backend": {"type": "local", "lora": None}}
    with pytest.raises(ConfigError, match=r"backend\.lora: null trains all weights.*use adapters"):
        await train(RunConfig.model_validate(settings))
    assert not (tmp_path / "run").exists()


async def test_checkpoints_at_intervals_are_rejected_on_a_service(tmp_path: Path) -> None:
    model = {"name": str(make_tiny_model(tmp_path / "model")), "device": "cpu"}
    backend = {"type": "weaver", "api_key": "k", "base_url": "http://127.0.0.1:9"}
    settings = {**LIVE, "dir": tmp_path / "run", "model": model, "backend": backend}
    with pytest.raises(ConfigError, match=r"trainer\.checkpoint_every: must be 1 with data 'live' .* got 5"):
        await train(RunConfig.model_validate({**settings, "trainer": {"checkpoint_every": 5}}))
    assert not (tmp_path / "run").exists()


def test_only_runs_on_live_data_with_a_mode_have_a_gate() -> None:
    assert RunConfig.model_validate(LIVE).has_gate
    assert not RunConfig.model_validate({**LIVE, "live": {"gate": {"mode": "off"}}}).has_gate
    assert not RunConfig().has_gate


def test_max_items_below_min_prompts_is_rejected() -> None:
    with pytest.raises(ValidationError, match=r"max_items: must be at least min_prompts \(30\), got 10"):
        RunConfig.model_validate({**LIVE, "live": {"gate": {"max_items": 10}}})
