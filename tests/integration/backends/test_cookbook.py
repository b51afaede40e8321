"""Test that the unmodified RL recipe of tinker-cookbook trains on Instar's Tinker server."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from safetensors.numpy import load_file

from instar.models import DEFAULT_MODEL, resolve_model
from tests.integration.backends.command import RunningService, run_server
from tests.integration.backends.environments import get_interpreter

RECIPE = "tinker_cookbook.recipes.math_rl.train"
RECIPE_TIMEOUT_SECONDS = 600
REWARD_METRIC = "env/all/reward/total"


def run_recipe(
    service: RunningService, model: str, log_folder: Path, **settings: object
) -> list[dict[str, Any]]:
    """Train on addition problems with short replies, and return the metrics logged for each step."""
    settings = {
        "env": "arithmetic",
        "model_name": model,
        "renderer_name": "qwen3_instruct",
        "lora_rank": 8,
        "learning_rate": 3e-4,
        "groups_per_batch": 6,
        "group_size": 8,
        "max_tokens": 8,
        "log_path": log_folder,
        "behavior_if_log_dir_exists": "resume",
        **settings,
    }
    command = [str(get_interpreter("cookbook")), "-m", RECIPE]
    command += [f"{name}={value}" for name, value in settings.items()]
    # The test must fail rather than wait for a download.
    env = {**os.environ, **service.environment, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    completed = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=RECIPE_TIMEOUT_SECONDS,
        env=env,
        cwd=log_folder.parent,
    )
    assert completed.returncode == 0, (completed.stdout + completed.stderr)[-4000:]
    return [json.loads(line) for line in (log_folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1500)
def test_cookbook_rl_loop_trains_and_resumes(tmp_path: Path) -> None:
    model = str(resolve_model(DEFAULT_MODEL))
    log_folder = tmp_path / "log"
    with run_server("tinker", model, tmp_path, "--dtype", "fp32", "--context", "512") as service:
        first_metrics = run_recipe(service, model, log_folder, max_steps=3, save_every=2)
        # The recipe resumes from its last checkpoint with the optimizer state. The second part also uses
        # a different loss and several steps per batch.
        metrics = run_recipe(
            service, model, log_folder, max_steps=6, save_every=2, loss_fn="ppo", num_substeps=2
        )
    assert metrics[:3] == first_metrics
    assert [step["progress/batch"] for step in metrics] == list(range(6))
    assert all(math.isfinite(step["grad_norm"]) for step in metrics)
    assert first_metrics[0]["grad_norm"] > 0
    # The KL is this small only if the replies are sampled from the policy that is trained.
    assert all(abs(step["optim/kl_sample_train_v2"]) < 1e-5 for step in first_metrics)
    assert mean(step[REWARD_METRIC] for step in metrics[-2:]) > metrics[0][REWARD_METRIC] + 0.01
    checkpoints = [json.loads(line) for line in (log_folder / "checkpoints.jsonl").read_text().splitlines()]
    assert [(checkpoint["name"], checkpoint["batch"]) for checkpoint in checkpoints] == [
        ("000002", 2),
        ("final", 3),
        ("000004", 4),
        ("000006", 6),
        ("final", 6),
    ]
    adapter_folder = (
        tmp_path / "served" / checkpoints[-1]["sampler_path"].removeprefix("tinker://") / "adapter"
    )
    nonzero = [
        value.any()
        for name, value in load_file(adapter_folder / "adapter_model.safetensors").items()
        if ".lora_B." in name
    ]
    assert len(nonzero) > 100
    assert all(nonzero), "lora_B starts at zero, so training must have changed it"
