"""`instar train` through each service's SDK, at a server of its protocol: a whole run as users start it, with
gateway, cloud engine, trainer and rollout in processes of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.integration.backends.command import INSTAR, PROTOCOLS, serving, train
from tests.integration.backends.environments import ROOT, interpreter
from tests.tiny import make_tiny_model
from tests.torture import run_process
from tests.unit.test_learns import LEARNED, run_config

RANK = 8
STEPS = 40
FOLLOWED = 6
"""Steps over which the losses are compared."""


@pytest.fixture(params=[*PROTOCOLS])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.timeout(1200)
def test_random_model_learns_through_the_backend(name: str, tmp_path: Path) -> None:
    """The task and the model of tests/unit/test_learns.py, and what it asks of them."""
    model = make_tiny_model(tmp_path / "model", seed=0, std=0.2)
    settings = run_config(tmp_path, seed=0).model_dump(mode="json", exclude={"engine", "backend", "dir"})
    settings["trainer"]["steps"] = STEPS
    with serving(name, str(model), tmp_path, "--dtype", "fp32", "--threads", "1") as service:
        steps = train({**settings, "backend": service.backend(RANK)}, tmp_path / "run", service)
    rewards = [step["reward_mean"] for step in steps]
    assert len(rewards) == STEPS
    assert rewards[0] < 0.2
    assert mean(rewards[-3:]) > LEARNED, [round(reward, 2) for reward in rewards]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=2048)


def same_batches(model: Path, folder: Path, backend: dict[str, Any]) -> dict[str, Any]:
    """A run whose replies are scripted, so that every backend is given the same."""
    return {**run_process.make_config(folder, model, steps=FOLLOWED), "backend": backend}


@pytest.fixture(scope="module")
def local(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("local")
    backend = {"type": "local", "threads": 1, "lora": {"rank": RANK, "alpha": 32}}
    return train(same_batches(model, folder, backend), folder)


@pytest.mark.timeout(1200)
def test_mint_losses_match_the_local_backend(
    name: str, model: Path, local: list[dict[str, Any]], tmp_path: Path
) -> None:
    with serving(name, str(model), tmp_path, "--dtype", "fp32", "--threads", "1") as service:
        steps = train(same_batches(model, tmp_path, service.backend(RANK)), tmp_path, service)
    assert [step["sequence_tokens"] for step in steps] == [step["sequence_tokens"] for step in local]
    expected = [step["loss"] for step in local]
    assert len(expected) == FOLLOWED
    assert max(expected) - min(expected) > 0.01, "training changes the loss by more than is tolerated"
    assert [step["loss"] for step in steps] == pytest.approx(expected, abs=1e-4, rel=0)


def test_recipe_runs_in_the_mint_environment() -> None:
    """tests/unit/cli/test_recipes.py has the others."""
    python = f"backend.python={interpreter('mint')}"
    command = [*INSTAR, "config", "check", str(ROOT / "recipes" / "mint.yaml"), "--set", python]
    env = {**os.environ, "MINT_API_KEY": "sk-mint-a-key-of-the-tests"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
