"""Tests that a JavaScript agent forms groups over HTTP, and that a run without a rollout trains on them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.clients.javascript_packages import install_packages
from tests.integration.group_runs import ADMIN_KEY, GROUP_SIZE, GroupRun, make_group_config
from tests.tiny import make_tiny_model

STEPS = 3


@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed (Debian: npm)")
def test_run_without_rollout_trains_on_groups_of_a_javascript_agent(tmp_path: Path) -> None:
    folder = install_packages()
    model = make_tiny_model(tmp_path / "model", std=0.2)
    run = GroupRun(tmp_path, make_group_config(tmp_path, model, steps=STEPS))
    run.start_serving()
    result = subprocess.run(
        ["node", str(folder / "run_groups.mjs"), run.url, str(GROUP_SIZE)],
        env={"INSTAR_ADMIN_KEY": ADMIN_KEY, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr + run.collect_logs()
    run.finish()
    run.assert_consistent()
    assert int(result.stdout) >= STEPS * 2 * GROUP_SIZE
    ((trained, sessions),) = run.query(
        "SELECT COUNT(*), COUNT(DISTINCT session_id) FROM claims WHERE outcome = 'trained'"
    )
    assert trained == sessions > 0
    assert run.query("SELECT DISTINCT channel FROM sessions") == [("train",)]
