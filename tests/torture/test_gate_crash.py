"""Tests that a gate that is killed with SIGKILL in any stage never serves a version that did not pass.

`INSTAR_KILLS=10 pytest tests/torture/test_gate_crash.py` kills 200 gates.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from instar.record.render import load_renderer
from tests.tiny import make_tiny_model
from tests.torture import gate_run
from tests.torture.gate_run import STATES, GateTorture
from tests.unit.live.harness import make_config

KILL_COUNT = 20 * int(os.environ.get("INSTAR_KILLS", "1"))


@pytest.mark.timeout(1800)
def test_gate_killed_in_every_stage_serves_only_versions_that_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the tokenizer is used after a fork
    model = make_tiny_model(tmp_path / "model", hidden=32)
    config = make_config(model, min_prompts=20)
    engine = config.engine.model_copy(update={"function": f"{gate_run.__name__}:reply"})
    config = config.model_copy(update={"engine": engine})
    torture = GateTorture(tmp_path, config, load_renderer(model, config.model), KILL_COUNT, seed=1)
    torture.run()
    assert set(torture.kills) == set(STATES), f"a state was never hit: {torture.kills}"
