from __future__ import annotations

import os
from pathlib import Path

import pytest

from instar.cluster.layout import RunFolder
from instar.cluster.run import train
from instar.config import RunConfig
from instar.errors import ConfigError, InstarError


def make_config(folder: Path) -> RunConfig:
    rollout = {
        "tasks": {"type": "python", "function": "instar.demo.tasks:train_tasks"},
        "agent": {"type": "function", "function": "instar.demo.agent:solve"},
    }
    return RunConfig.model_validate({"name": "run", "dir": folder, "rollout": rollout})


def test_lock_for_a_running_role_raises(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lock = folder.lock("trainer")
    with pytest.raises(InstarError, match=r"the trainer of .* is already running"):
        folder.lock("trainer", timeout=0.1)
    os.close(lock)
    os.close(folder.lock("trainer", timeout=0.1))


def test_folder_of_an_earlier_run_is_made_private(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(make_config(tmp_path / "run"))
    folder.path.chmod(0o755)
    assert "made" in folder.make_private()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.make_private() == ""


def test_readable_folder_without_a_run_is_reported_and_not_changed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert f"chmod 700 {tmp_path}" in RunFolder(tmp_path).make_private()
    assert tmp_path.stat().st_mode & 0o777 == 0o755


async def test_train_in_an_existing_run_folder_is_rejected(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run")
    RunFolder(tmp_path / "run").create(config)
    with pytest.raises(
        ConfigError,
        match=r"exists\. Continue the run with --resume, or start a new run under a different `name`",
    ):
        await train(config)
    assert not config.store_path.exists()


async def test_resume_of_a_live_run_without_live_data_is_rejected(tmp_path: Path) -> None:
    """Otherwise, the next version would serve weights that nobody promoted."""
    config = make_config(tmp_path / "run")
    live = {"data": "live", "agents": {"support": {"mode": "learn"}}}
    RunFolder(tmp_path / "run").create(RunConfig.model_validate({**config.model_dump(), **live}))
    with pytest.raises(ConfigError, match="may be those of a candidate that"):
        await train(config, resume=True)


async def test_resume_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--resume: there is no run in"):
        await train(make_config(tmp_path / "run"), resume=True)
    assert not (tmp_path / "run").exists()


async def test_resume_of_a_running_run_is_rejected_and_keeps_its_config(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    folder.create(config)
    original = folder.config_file.read_bytes()
    lock = folder.lock("supervisor")
    with pytest.raises(InstarError, match=r"the supervisor of .* is already running"):
        await train(config.model_copy(update={"seed": 7}), resume=True)
    assert folder.config_file.read_bytes() == original, "the config of the running run is kept"
    os.close(lock)
