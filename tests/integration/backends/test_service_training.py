"""Tests for complete runs of `instar train` with each service's SDK and a local server for its protocol, and
for the MinT recipe."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.integration.backends.command import INSTAR, PROTOCOLS, run_server, run_training
from tests.integration.backends.environments import ROOT, get_interpreter
from tests.tiny import make_tiny_model
from tests.torture import run_process
from tests.unit.test_learning import MIN_FINAL_REWARD, make_config

RANK = 8
STEPS = 60
COMPARED_STEPS = 6
"""The number of steps whose losses are compared."""


@pytest.fixture(params=[*PROTOCOLS])
def service_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.timeout(1200)
def test_random_model_learns_through_the_service(service_name: str, tmp_path: Path) -> None:
    """Uses the task, model and expected reward of tests/unit/test_learning.py."""
    model = make_tiny_model(tmp_path / "model", seed=0, std=0.2)
    settings = make_config(tmp_path, seed=0).model_dump(mode="json", exclude={"engine", "backend", "dir"})
    settings["trainer"]["steps"] = STEPS
    with run_server(service_name, str(model), tmp_path, "--dtype", "fp32", "--threads", "1") as service:
        steps = run_training(
            {**settings, "backend": service.make_backend_section(RANK)}, tmp_path / "run", service
        )
    rewards = [step["reward_mean"] for step in steps]
    assert len(rewards) == STEPS
    assert rewards[0] < 0.2
    assert mean(rewards[-3:]) > MIN_FINAL_REWARD, [round(reward, 2) for reward in rewards]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=2048)


def make_scripted_config(model: Path, folder: Path, backend: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a run with scripted replies, so that every backend trains on the same data."""
    return {**run_process.make_config(folder, model, steps=COMPARED_STEPS), "backend": backend}


@pytest.fixture(scope="module")
def local_steps(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("local")
    backend = {"type": "local", "threads": 1, "lora": {"rank": RANK, "alpha": 32}}
    return run_training(make_scripted_config(model, folder, backend), folder)


@pytest.mark.timeout(1200)
def test_losses_through_the_service_match_the_local_backend(
    service_name: str, model: Path, local_steps: list[dict[str, Any]], tmp_path: Path
) -> None:
    with run_server(service_name, str(model), tmp_path, "--dtype", "fp32", "--threads", "1") as service:
        steps = run_training(
            make_scripted_config(model, tmp_path, service.make_backend_section(RANK)), tmp_path, service
        )
    assert [step["sequence_tokens"] for step in steps] == [step["sequence_tokens"] for step in local_steps]
    expected = [step["loss"] for step in local_steps]
    assert len(expected) == COMPARED_STEPS
    assert max(expected) - min(expected) > 0.01, "training must change the loss by more than the tolerance"
    assert [step["loss"] for step in steps] == pytest.approx(expected, abs=1e-4, rel=0)


def test_mint_recipe_passes_config_check_in_the_mint_environment() -> None:
    """The other recipes are checked in tests/unit/cli/test_recipes.py."""
    python_setting = f"backend.python={get_interpreter('mint')}"
    command = [*INSTAR, "config", "check", str(ROOT / "recipes" / "mint.yaml"), "--set", python_setting]
    env = {**os.environ, "MINT_API_KEY": "sk-mint-test-key"}
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert completed.returncode == 0, completed.stderr
