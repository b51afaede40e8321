"""Tests for `instar simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from instar.cli.main import app, main
from instar.cli.simulate import cluster_from_config
from instar.config import RunConfig
from instar.errors import ConfigError

ROOT = Path(__file__).parents[3]
RUN: dict[str, Any] = {
    "engine": {"type": "vllm", "count": 2},
    "trainer": {"groups_per_step": 2, "steps": 6},
    "rollout": {
        "tasks": {"type": "jsonl", "path": "tasks.jsonl"},
        "agent": {"type": "command", "command": ["agent"]},
        "group_size": 4,
        "concurrency": 16,
    },
}


def write_config(folder: Path, **overrides: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**RUN, **overrides}))
    return path


def simulate(path: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["simulate", str(path), "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_simulate_json_contains_the_result(tmp_path: Path) -> None:
    path = write_config(tmp_path, simulate={"tool_seconds": 1.0, "turns": [1, 2, 8]})
    output = simulate(path)
    assert (output["engines"], output["max_staleness"], output["steps"], output["samples"]) == (2, 1, 6, 48)
    assert 0 < output["samples_per_hour"] <= 1.02 * output["bound"]
    assert set(output["recommended"]) == {"engines", "max_staleness", "reason"}
    assert sum(output["staleness"].values()) == output["samples"]
    assert simulate(path, "--no-sweep", "--engines", "1", "--max-staleness", "3")["max_staleness"] == 3


def test_simulate_with_skipped_engine_updates_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"sync\.every: .* got 2; .*--set sync\.every=1"):
        cluster_from_config(make_config(sync={"every": 2}))


def test_simulate_replays_a_workload_file(tmp_path: Path) -> None:
    workload = tmp_path / "work.jsonl"
    workload.write_text('{"turns": [[10, 100, 2.0], [10, 100, 8.0]]}\n')
    config_path = write_config(
        tmp_path, simulate={"workload": "work.jsonl", "train_base": 0, "train_per_token": 0}
    )
    output = simulate(config_path, "--no-sweep")
    assert output["seconds"] > 3 * 10, "three waves of 16 sessions of at least 10 s each"
    assert output == simulate(config_path, "--no-sweep", "--workload", str(workload))


def test_simulate_prints_a_table(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", str(write_config(tmp_path, simulate={}))])
    assert result.exit_code == 0, result.output
    assert "samples per hour" in result.stdout
    assert "Recommended:" in result.stdout


@pytest.mark.parametrize("settings", [{"zero_signal": 1.0}, {"failures": 1.0}])
def test_simulate_reports_if_nothing_is_trained(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = write_config(tmp_path, simulate={**settings, "max_engines": 2, "max_staleness": 1})
    output = simulate(path)
    assert (output["samples"], output["bound"], output["fraction_of_bound"]) == (0, 0, None)
    assert "recommended" not in output
    result = CliRunner().invoke(app, ["simulate", str(path)])
    assert result.exit_code == 0, result.output
    assert "No sample would be trained on" in result.stdout
    assert "Recommended" not in result.stdout


def make_config(**overrides: Any) -> RunConfig:
    return RunConfig.model_validate({**RUN, **overrides})


def test_cluster_counts_the_live_groups_of_the_run() -> None:
    data = [{"source": "rollout", "share": 0.3}, {"source": "folder", "share": 0.7}]
    mixed = make_config(data=data)
    assert [cluster_from_config(mixed).count_rollout_groups(steps) for steps in range(7)] == [
        mixed.count_rollout_groups(steps) for steps in range(7)
    ]
    assert cluster_from_config(mixed).count_rollout_groups(5) == 3
    assert cluster_from_config(make_config()).count_rollout_groups(5) == 10


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"engine": {"type": "local"}}, True),
        ({"engine": {"type": "scripted"}}, True),
        ({"engine": {"type": "vllm", "policy": "merged"}}, True),
        ({"engine": {"type": "vllm", "policy": "adapter"}}, False),
        ({"engine": {"type": "vllm"}}, False),
        ({"engine": {"type": "vllm"}, "model": {"device": "cpu"}}, True),
        ({"engine": {"type": "vllm"}, "backend": {"type": "local", "lora": None}}, True),
        ({"engine": {"type": "mixed", "parts": [{"type": "local"}, {"type": "vllm"}]}}, False),
        ({"engine": {"type": "cloud"}, "backend": {"type": "tinker"}}, False),
        ({"engine": {"type": "local"}, "backend": {"type": "tinker"}}, False),
    ],
)
def test_versions_per_token_depends_on_the_engine(overrides: dict[str, Any], expected: bool) -> None:
    assert cluster_from_config(make_config(**overrides)).versions_per_token is expected


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ({"simulate": {}, "data": "folder"}, [], "data: the run has no rollouts to simulate"),
        ({}, [], "The simulation needs timings"),
        ({"simulate": {}, "rollout": None}, [], "rollout: this section is missing"),
        ({"simulate": {}, "trainer": {"mode": "sync"}}, ["--max-staleness", "2"], "--max-staleness: must be"),
        ({"simulate": {"tool_seconds": {"value": 1, "median": 2}}}, [], "one of value, median and values"),
        ({"simulate": {"crowding": 0.5}}, [], "'crowding' was renamed to 'latency_growth_per_call'"),
        ({"simulate": {"turns": {"median": 2, "most": 9}}}, [], "'most' was renamed to 'max'"),
    ],
)
def test_simulate_rejects_invalid_settings(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: dict[str, Any],
    options: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", str(write_config(tmp_path, **overrides)), *options])
    assert message in capsys.readouterr().err


def test_bench_workload_file_matches_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "workloads"))
    import generate_agents  # pyright: ignore[reportMissingImports]

    lines = (ROOT / "bench" / "workloads" / "agents.jsonl").read_text().splitlines()
    generated = json.loads(json.dumps(generate_agents.generate_sessions()))
    assert [json.loads(line)["turns"] for line in lines] == generated
