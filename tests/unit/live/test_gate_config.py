"""Tests of the configs that the gate accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from instar.cluster.run import train
from instar.config import RunConfig
from instar.errors import ConfigError
from tests.tiny import make_tiny_model

LIVE = {"data": "live", "agents": {"a": {"mode": "learn"}}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": {"type": "vllm", "policy": "merged"}}, "engine.policy: 'merged' serves only one version"),
        ({"backend": {"type": "local", "lora": None}}, "backend.lora: null trains all weights"),
    ],
)
async def test_training_is_refused_if_engines_cannot_serve_two_versions(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    model = {"name": str(make_tiny_model(tmp_path / "model")), "device": "cpu"}
    config = RunConfig.model_validate({**LIVE, "dir": tmp_path / "run", "model": model, **settings})
    with pytest.raises(ConfigError, match=f"{message}.*use adapters"):
        await train(config)
    assert not (tmp_path / "run").exists()


def test_only_runs_on_live_data_with_a_mode_have_a_gate() -> None:
    assert RunConfig.model_validate(LIVE).has_gate
    assert not RunConfig.model_validate({**LIVE, "live": {"gate": {"mode": "off"}}}).has_gate
    assert not RunConfig().has_gate


def test_max_items_below_min_prompts_is_rejected() -> None:
    with pytest.raises(ValidationError, match=r"max_items: must be at least min_prompts \(30\), got 10"):
        RunConfig.model_validate({**LIVE, "live": {"gate": {"max_items": 10}}})
