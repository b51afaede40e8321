"""Tests for runs with a reference model: distillation from a teacher process, and the KL metric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instar.trainer.monitor import read_steps
from tests.tiny import make_tiny_model, make_tiny_tokenizer
from tests.torture.run_process import RunProcess, make_config

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "student", hidden=32, context=2048)
    make_tiny_model(folder / "teacher", hidden=48, context=2048, seed=1)
    return folder


def make_distillation_config(folder: Path, models: Path, steps: int) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    reference = {
        "type": "engine",
        "model": {"name": str(models / "teacher"), "dtype": "fp32", "device": "cpu"},
        "engine": {"type": "local", "threads": 1},
        "weight": 0.1,
    }
    return make_config(
        folder, models / "student", steps=steps, reference=reference, advantage={"weight": 0.5}
    )


def test_distillation_with_killed_teacher_matches_undisturbed_run(models: Path, tmp_path: Path) -> None:
    undisturbed = RunProcess(
        tmp_path / "undisturbed", make_distillation_config(tmp_path / "undisturbed", models, 3)
    )
    undisturbed.start()
    undisturbed.finish()
    killed = RunProcess(tmp_path / "killed", make_distillation_config(tmp_path / "killed", models, 3))
    killed.start()
    assert killed.wait_until(lambda: killed.is_ready() and bool(killed.query("SELECT 1 FROM steps")))
    assert killed.kill_role("teacher")
    killed.finish()
    assert "teacher exited (signal SIGKILL); restarting it" in killed.output.read_text()
    assert killed.read_fingerprint() == undisturbed.read_fingerprint()
    steps = read_steps(undisturbed.run_dir)
    assert all(
        step["reference_kl"] == killed_step["reference_kl"]
        for step, killed_step in zip(steps, read_steps(killed.run_dir), strict=True)
    )
    assert len({step["reference_kl"] for step in steps}) == 3
    killed.assert_no_orphans()


def test_teacher_with_different_vocabulary_is_rejected_at_start(models: Path, tmp_path: Path) -> None:
    config = make_distillation_config(tmp_path, models, 3)
    teacher = make_tiny_model(tmp_path / "teacher", hidden=32)
    make_tiny_tokenizer(300).save_pretrained(teacher)
    config["trainer"]["reference"]["model"]["name"] = str(teacher)
    run = RunProcess(tmp_path, config)
    run.start()
    assert run.wait(90) == 1
    output = run.output.read_text()
    assert "trainer.reference.model.name" in output
    assert "differs from" in output
    assert "Traceback" not in output
    assert run.query("SELECT status FROM runs") == [("failed",)]
    assert run.query("SELECT COUNT(*) FROM sessions") == [(0,)], "the run must fail before any rollout"


def test_teacher_with_cloud_engine_is_rejected(models: Path, tmp_path: Path) -> None:
    config = make_distillation_config(tmp_path, models, 3)
    config["trainer"]["reference"]["engine"] = {"type": "cloud"}
    run = RunProcess(tmp_path, config)
    run.start()
    assert run.wait(90) != 0
    output = run.output.read_text()
    assert "trainer.reference.engine.type: cloud requires a training service as the backend" in output


def test_step_metrics_contain_reference_kl(models: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, models / "student", steps=1, reference={"type": "base", "weight": 0.1})
    run = RunProcess(tmp_path, config)
    run.start()
    run.finish()
    ((metrics,),) = run.query("SELECT metrics FROM steps")
    assert json.loads(metrics)["reference_kl"] != 0
