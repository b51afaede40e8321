from __future__ import annotations

import json
from pathlib import Path

from instar.trainer.monitor import Monitor, read_steps


def test_monitor_writes_nan_as_null(tmp_path: Path) -> None:
    """NaN is not valid JSON."""
    monitor = Monitor(tmp_path, tensorboard=False)
    monitor.record("train", 1, {"grad_norm": float("nan"), "loss": 0.5})
    monitor.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: name)["grad_norm"] is None
    assert read_steps(tmp_path)[0]["loss"] == 0.5
