"""`backend: verl` in its own environment: two ranks under FSDP on the CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.integration.backends.environments import ROOT, interpreter
from tests.tiny import make_tiny_model
from tests.torture.run_process import RunProcess, make_config

CHECK = Path(__file__).with_name("verl_check.py")
STEPS = 4


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter("verl")


@pytest.mark.timeout(1500)  # the environment is made once, and takes minutes
def test_two_ranks_follow_the_local_backend(python: Path) -> None:
    done = subprocess.run([python, CHECK], cwd=ROOT, timeout=540)
    assert done.returncode == 0, "what failed is in the output"


@pytest.mark.timeout(600)
def test_run_continues_after_the_trainer_is_killed(python: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32, context=2048)
    local = start(tmp_path / "local", model, {"type": "local", "threads": 1, "lora": {"rank": 4}})
    local.finish()
    verl = start(tmp_path / "verl", model, {"type": "verl", "lora": {"rank": 4}, "python": str(python)})
    assert verl.wait_until(
        lambda: verl.is_ready() and bool(verl.query("SELECT 1 FROM steps WHERE state = 'committed'")),
        timeout=200,
    )
    ranks = ranks_now()
    assert len(ranks) == 2
    assert verl.kill_role("trainer")
    verl.finish(300)
    verl.assert_consistent()
    assert trained(verl) == trained(local)
    expected, actual = weights(local), weights(verl)
    assert expected.keys() == actual.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, atol=1e-4 * max(np.abs(values).max(), 1e-3))
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()], "ranks outlived their trainer"


def start(folder: Path, model: Path, backend: dict[str, Any]) -> RunProcess:
    folder.mkdir()
    run = RunProcess(folder, make_config(folder, model, steps=STEPS) | {"backend": backend})
    run.start()
    return run


def ranks_now() -> list[int]:
    """Ray names an actor's process after its class."""
    actual: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            title = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and title.startswith(b"ray::InstarWorker"):
            actual.append(int(entry.name))
    return actual


def trained(run: RunProcess) -> list[Any]:
    return run.query(
        "SELECT step, sample_key, reward, advantage FROM claims WHERE outcome = 'trained' ORDER BY 1, 2"
    )


def weights(run: RunProcess) -> dict[str, np.ndarray]:
    """Of the last policy that was published."""
    (path,) = run.query("SELECT artifact_path FROM policies WHERE state = 'published' ORDER BY version DESC")[
        0
    ]
    return load_file(Path(path) / "adapter_model.safetensors")
