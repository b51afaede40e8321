"""Tests for the verl backend in its own environment, with two FSDP ranks on the CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.integration.backends.environments import ROOT, get_interpreter
from tests.tiny import make_tiny_model
from tests.torture.run_process import RunProcess, make_config

CHECK_SCRIPT = Path(__file__).with_name("verl_check.py")
STEPS = 4


@pytest.fixture(scope="module")
def python() -> Path:
    return get_interpreter("verl")


@pytest.mark.timeout(1500)  # the first run creates the environment, which takes minutes
def test_two_ranks_match_the_local_backend(python: Path) -> None:
    completed = subprocess.run([python, CHECK_SCRIPT], cwd=ROOT, timeout=540)
    assert completed.returncode == 0, "verl_check.py failed; see its output"


@pytest.mark.timeout(600)
def test_run_continues_after_the_trainer_is_killed(python: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32, context=2048)
    local = start_run(tmp_path / "local", model, {"type": "local", "threads": 1, "lora": {"rank": 4}})
    local.finish()
    verl = start_run(tmp_path / "verl", model, {"type": "verl", "lora": {"rank": 4}, "python": str(python)})
    assert verl.wait_until(
        lambda: verl.is_ready() and bool(verl.query("SELECT 1 FROM steps WHERE state = 'committed'")),
        200,
    )
    rank_pids = list_rank_pids()
    assert len(rank_pids) == 2
    assert verl.kill_role("trainer")
    verl.finish(300)
    verl.assert_consistent()
    assert read_trained_claims(verl) == read_trained_claims(local)
    expected, actual = load_published_weights(local), load_published_weights(verl)
    assert expected.keys() == actual.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, atol=1e-4 * max(np.abs(values).max(), 1e-3))
    assert not [pid for pid in rank_pids if Path(f"/proc/{pid}").exists()], "ranks outlived their trainer"


def start_run(folder: Path, model: Path, backend: dict[str, Any]) -> RunProcess:
    folder.mkdir()
    run = RunProcess(folder, make_config(folder, model, steps=STEPS) | {"backend": backend})
    run.start()
    return run


def list_rank_pids() -> list[int]:
    """Return the process ids of the ranks. Ray names an actor's process after its class."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            title = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and title.startswith(b"ray::InstarWorker"):
            pids.append(int(entry.name))
    return pids


def read_trained_claims(run: RunProcess) -> list[Any]:
    return run.query(
        "SELECT step, sample_key, reward, advantage FROM claims WHERE outcome = 'trained' ORDER BY 1, 2"
    )


def load_published_weights(run: RunProcess) -> dict[str, np.ndarray]:
    """Return the weights of the last published policy."""
    query = "SELECT artifact_path FROM policies WHERE state = 'published' ORDER BY version DESC"
    (path,) = run.query(query)[0]
    return load_file(Path(path) / "adapter_model.safetensors")
