from __future__ import annotations

import json
from pathlib import Path

from instar.trainer.monitor import MetricsReader, Monitor, read_steps, read_warnings


def test_monitor_writes_nan_as_null(tmp_path: Path) -> None:
    """NaN is not valid JSON."""
    monitor = Monitor(tmp_path, tensorboard=False)
    monitor.record("train", 1, {"grad_norm": float("nan"), "loss": 0.5})
    monitor.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["grad_norm"] is None
    assert read_steps(tmp_path)[0]["loss"] == 0.5


def test_text_with_a_unicode_line_separator_is_read(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path)
    text = "first\u2028second\x85third"
    monitor.record("warning", 1, {"text": text})
    monitor.close()
    assert read_warnings(tmp_path) == [text]
    assert [record["text"] for record in MetricsReader(tmp_path).read_new()] == [text]


def test_metrics_reader_returns_each_record_once(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path)
    assert reader.read_new() == []
    monitor = Monitor(tmp_path)
    monitor.record("train", 1, {"loss": 0.5})
    monitor.record("train", 2, {"loss": 0.25})
    assert [record["step"] for record in reader.read_new()] == [1, 2]
    assert reader.read_new() == []
    monitor.record("eval", 2, {"mode": "greedy"})
    assert [record["kind"] for record in reader.read_new()] == ["eval"]
    monitor.close()


def test_metrics_reader_reads_an_incomplete_line_when_it_is_complete(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path)
    with (tmp_path / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(b'{"step": 1}\n{"step"')
        assert reader.read_new() == [{"step": 1}]
        file.write(b": 2")
        assert reader.read_new() == []
        file.write(b"}\n")
    assert reader.read_new() == [{"step": 2}]
