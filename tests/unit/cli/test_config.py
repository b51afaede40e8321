"""Tests for `instar config check` and `show`, overrides, relative paths and the reference page."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from instar.cli.config_file import load_config
from instar.cli.reference import render_settings
from tests.unit.cli.conftest import Instar


def write_config(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


AGENT = "{type: command, command: [sh]}"
INVALID_CONFIGS = {
    "unknown section": (
        "trainr: {}",
        "trainr: unknown setting (did you mean 'trainer'?). Available: agent_id, agents, backend, cluster, "
        "data, dir, engine, eval, gateway, groups, live, model, models, name, reward, rollout, scoring, "
        "seed, simulate, store, sync, trainer, upstreams",
    ),
    "unknown key": (
        "trainer: {adam: {learning_rate: 1}}",
        "trainer.adam.learning_rate: unknown setting. "
        "Available: beta1, beta2, eps, grad_clip_norm, lr, weight_decay",
    ),
    "unknown key of an engine type": (
        "engine: {type: scripted, replys: [a]}",
        "engine.replys: unknown setting (did you mean 'replies'?). "
        "Available: count, delay, function, max_adapters, python, replies, type",
    ),
    "unknown key in a nested section": (
        f"rollout: {{agent: {AGENT}, tasks: {{type: jsonl, path: x, lmit: 3}}}}",
        "rollout.tasks.lmit: unknown setting (did you mean 'limit'?). Available: id_field, limit, path, type",
    ),
    "unknown key of a named mode": (
        "eval: {tasks: {type: jsonl, path: x}, modes: {greedy: {temprature: 0}}}",
        "eval.modes.greedy.temprature: unknown setting (did you mean 'temperature'?). "
        "Available: agent_args, temperature, top_p",
    ),
    "unknown value": (
        "trainer: {mode: asynch}",
        "trainer.mode: must be async or sync, got 'asynch' (did you mean 'async'?)",
    ),
    "unknown mode of a live agent": (
        "agents: {support: {mode: lern}}",
        "agents.support.mode: must be observe or learn, got 'lern' (did you mean 'learn'?)",
    ),
    "wrong type": (
        "trainer: {steps: many}",
        "trainer.steps: must be a valid integer, got 'many'",
    ),
    "invalid API key": (
        "backend: {type: tinker, api_key: 12345}",
        "backend.api_key: must be a valid string, got '…'",
    ),
    "unsupported loss": (
        f"""
        backend: {{type: weaver, api_key: wv-secret}}
        trainer: {{loss: {{name: cispo}}}}
        rollout: {{agent: {AGENT}, tasks: {{type: python, function: "instar.demo.tasks:train_tasks"}}}}
        """,
        "trainer.loss.name: this backend does not support 'cispo'; supported: cross_entropy, "
        "importance_sampling. Choose one of these losses, or set trainer.loss_fallback",
    ),
    "fraction instead of an integer": (
        "trainer: {steps: 1.5}",
        "trainer.steps: must be a valid integer, got 1.5",
    ),
    "value of neither allowed type": (
        "backend: {lora: {targets: 5}}",
        "backend.lora.targets: must be a valid list or all-linear, got 5",
    ),
    "missing setting": (
        "rollout: {agent: {type: command}, tasks: {type: jsonl, path: x}}",
        "rollout.agent.command: required setting is missing",
    ),
    "missing section": (f"rollout: {{agent: {AGENT}}}", "rollout.tasks: required setting is missing"),
    "unknown engine type": (
        "engine: {type: sglang}",
        "engine.type: must be local, scripted, upstream, cloud, vllm, mixed or plugin, got 'sglang'",
    ),
    "misspelled store type": (
        "store: {type: sqlte}",
        "store.type: must be sqlite or postgres, got 'sqlte' (did you mean 'sqlite'?)",
    ),
    "missing task set type": (
        f"rollout: {{agent: {AGENT}, tasks: {{path: x}}}}",
        "rollout.tasks.type: required setting is missing; "
        "must be jsonl, python, reasoning_gym, gsm8k, textarena, verifiers, humaneval, bfcl or plugin",
    ),
    "groups of one": (
        f"rollout: {{agent: {AGENT}, tasks: {{type: jsonl, path: x}}, group_size: 1}}",
        "rollout.group_size: must be at least 2, got 1, because trainer.advantage.estimator 'grpo' compares "
        "the sessions of a group. For groups of one, use the estimator 'running' or 'reward'",
    ),
    "too small": ("trainer: {steps: 0}", "trainer.steps: must be greater than or equal to 1, got 0"),
    "too large": (
        "gateway: {port: 70000}",
        "gateway.port: must be less than or equal to 65535, got 70000",
    ),
    "not finite": ("trainer: {seconds: .inf}", "trainer.seconds: must be a finite number, got inf"),
    "value instead of a section": (
        "trainer: 5",
        "trainer: must be a section with `setting: value` lines, got 5",
    ),
    "empty section": (
        "trainer:",
        "trainer: must be a section with `setting: value` lines, got None",
    ),
    "mutually exclusive settings": (
        "trainer: {mode: sync, max_staleness: 2}",
        "trainer.max_staleness: must be 0 or unset if trainer.mode is sync, got 2",
    ),
    "unknown key of a single reward": (
        "reward: {type: rule, functon: x}",
        "reward.functon: unknown setting (did you mean 'function'?). "
        "Available: args, function, name, thread, type",
    ),
    "unknown key of one of several rewards": (
        "reward: [{type: agent}, {type: rule, functon: x}]",
        "reward.1.functon: unknown setting (did you mean 'function'?). "
        "Available: args, function, name, thread, type",
    ),
    "adapter with an unknown scheme": (
        "model: {adapter: 's3://bucket/adapter'}",
        "model.adapter: must be a folder, run:NAME[@VERSION], tinker://PATH or weaver://PATH, "
        "got 's3://bucket/adapter'",
    ),
    "adapter of a teacher": (
        "trainer: {reference: {type: engine, model: {adapter: a}}}",
        "trainer.reference.model: adapter: a teacher is served without an adapter, got 'a'; "
        "merge it into the teacher's weights",
    ),
    "adapter for another backend": (
        "model: {adapter: 'weaver://model/checkpoints/a'}",
        "model.adapter: got 'weaver://model/checkpoints/a', but the local backend can start only from a PEFT "
        "folder or run:NAME[@VERSION]",
    ),
    "adapter of a missing run": (
        "dir: /missing/b\nmodel: {adapter: 'run:/missing/a'}",
        "model.adapter: there is no run in /missing/a or /missing; runs: none",
    ),
    "function in a missing module": (
        "reward: {type: rule, function: 'missing:score'}",
        "reward.function: cannot import 'missing' (from 'missing:score'): "
        "ModuleNotFoundError: No module named 'missing'",
    ),
}


@pytest.mark.parametrize(("text", "expected"), INVALID_CONFIGS.values(), ids=INVALID_CONFIGS.keys())
def test_config_check_explains_an_error(instar: Instar, tmp_path: Path, text: str, expected: str) -> None:
    path = write_config(tmp_path, text)
    result = instar("config", "check", path)
    lines = [line.strip() for line in result.err.splitlines()]
    assert (result.code, result.out, lines[0]) == (1, "", f"{path}: {len(lines) - 1} error")
    assert expected in lines[1:]
    json_result = instar("config", "check", path, "--json")
    assert json_result.code == 1
    assert json_result.json == {"ok": False, "mistakes": lines[1:]}


def test_config_check_lists_all_errors(instar: Instar, tmp_path: Path) -> None:
    path = write_config(tmp_path, "name: a b\ntrainer: {steps: 0, mode: x}\nengine: {type: y}")
    result = instar("config", "check", path)
    assert result.err.startswith(f"{path}: 4 errors\n")
    assert len(result.err.splitlines()) == 5


INVALID_FILES = {
    "not YAML": ("a: [", "is not valid YAML"),
    "not a mapping": ("- a\n- b", "expected a mapping of sections, not a list"),
    "duplicate key": ("seed: 1\nname: x\nseed: 2", "line 3: duplicate key 'seed'"),
    "duplicate nested key": ("trainer:\n  steps: 1\n  steps: 2", "line 3: duplicate key 'steps'"),
}


@pytest.mark.parametrize(("text", "expected"), INVALID_FILES.values(), ids=INVALID_FILES.keys())
def test_config_check_rejects_invalid_files(instar: Instar, tmp_path: Path, text: str, expected: str) -> None:
    result = instar("config", "check", write_config(tmp_path, text))
    assert result.code == 1
    assert expected in result.err
    assert len(result.err.splitlines()) == 1


def test_config_check_rejects_missing_and_binary_files(instar: Instar, tmp_path: Path) -> None:
    assert (
        instar("config", "check", tmp_path / "missing.yaml").err
        == f"{tmp_path / 'missing.yaml'}: the file does not exist\n"
    )
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "binary"):
        result = instar("config", "check", path)
        assert (result.code, len(result.err.splitlines())) == (1, 1)
        assert "Cannot read" in result.err


def test_config_check_reports_missing_files_and_programs(instar: Instar, tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        "rollout: {tasks: {type: jsonl, path: missing.jsonl}, "
        "agent: {type: command, command: [missing-program]}}",
    )
    result = instar("config", "check", path, "--json")
    assert result.json["mistakes"] == [
        f"rollout.tasks.path: the file '{tmp_path / 'missing.jsonl'}' does not exist",
        "rollout.agent.command: the program 'missing-program' does not exist",
    ]


def test_config_check_accepts_a_valid_file(instar: Instar, tmp_path: Path) -> None:
    path = write_config(tmp_path, "name: fine")
    assert instar("config", "check", path).out == f"{path}: ok\n"
    report = {"ok": True, "mistakes": [], "name": "fine", "notes": []}
    assert instar("config", "check", path, "--json").json == report


# --- overrides ------------------------------------------------------------------------------------


def test_override_changes_a_setting_at_any_depth(instar: Instar, tmp_path: Path) -> None:
    path = write_config(tmp_path, "trainer:\nname: x")
    config = instar(
        "config", "show", path, "--json",
        "--set", "trainer.adam.lr=1e-3",
        "--set", "engine={type: scripted, replies: [a, b]}",
        "--set", "backend.lora=null",
    ).json  # fmt: skip
    assert config["trainer"]["adam"]["lr"] == 1e-3
    assert config["engine"]["replies"] == ["a", "b"]
    assert config["backend"]["lora"] is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.steps", "must have the form PATH=VALUE"),
        ("=5", "must have the form PATH=VALUE"),
        ("trainer..steps=5", "must have the form PATH=VALUE"),
        ("name.x=5", "name is not a mapping"),
        ("seed=[", "the value is not valid YAML"),
        ("trainer.stepz=5", "trainer.stepz: unknown setting"),
    ],
)
def test_invalid_override_is_explained(instar: Instar, tmp_path: Path, override: str, expected: str) -> None:
    path = write_config(tmp_path, "name: x")
    result = instar("config", "check", path, "--set", override)
    assert result.code == 1
    assert expected in result.err


# --- paths ----------------------------------------------------------------------------------------


def test_relative_paths_in_a_file_are_relative_to_the_file(instar: Instar, tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        "dir: out\nstore: {path: a/b.db}\nmodel: {name: ./model}\n"
        "rollout: {tasks: {type: jsonl, path: t.jsonl}, agent: {type: command, command: [sh]}}\n"
        "eval: {tasks: {type: jsonl, path: /absolute.jsonl}}",
    )
    config = load_config(path)
    assert config.run_dir == tmp_path / "out"
    assert config.store_path == tmp_path / "a" / "b.db"
    assert config.model.name == str(tmp_path / "model")
    assert config.rollout is not None
    assert config.rollout.model_dump()["tasks"]["path"] == tmp_path / "t.jsonl"
    assert config.rollout.model_dump()["agent"]["cwd"] == tmp_path
    assert config.eval is not None
    assert config.eval.model_dump()["tasks"]["path"] == Path("/absolute.jsonl")
    # Overrides are relative to the working directory, because a shell completes paths from there.
    assert load_config(path, ["dir=other"]).run_dir == Path("other")


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        ("adapter", "{folder}/adapter"),
        ("../adapter", "{folder}/../adapter"),
        ("/absolute", "/absolute"),
        ("run:first@3", "run:first@3"),
        ("run:./first@3", "run:{folder}/first@3"),
        ("run:/runs/first", "run:/runs/first"),
        ("tinker://model/weights/name", "tinker://model/weights/name"),
    ],
)
def test_relative_adapter_is_relative_to_the_file(tmp_path: Path, adapter: str, expected: str) -> None:
    path = write_config(tmp_path, f"model: {{adapter: '{adapter}'}}")
    assert load_config(path).model.adapter == expected.format(folder=tmp_path)


def test_relative_paths_in_lists_are_relative_to_the_file(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        "reward:\n"
        "  - {type: agent}\n"
        "  - {type: command, command: [sh], files: [a.sh], sandbox: {read: [b, /c]}}",
    )
    config = load_config(path)
    section = config.reward[1].model_dump()
    assert section["files"] == [tmp_path / "a.sh"]
    assert section["sandbox"]["read"] == [tmp_path / "b", Path("/c")]


def test_run_without_dir_is_in_the_working_directory(instar: Instar, tmp_path: Path) -> None:
    assert load_config(write_config(tmp_path, "name: x")).run_dir == Path("runs/x")


# --- `config show` and the reference page -----------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_config_show_output_is_a_valid_config(instar: Instar, tmp_path: Path, mode: str) -> None:
    settings = ("--set", f"trainer.mode={mode}", "--set", "trainer.max_staleness=null")
    result = instar("config", "show", *settings)
    assert result.code == 0
    path = write_config(tmp_path, result.out)
    assert instar("config", "check", path).code == 0
    assert instar("config", "show", path).out == result.out
    assert instar("config", "show", path, "--json").json == yaml.safe_load(result.out)


def test_reference_has_a_table_for_each_type_and_section() -> None:
    page = render_settings()
    for heading in ("`rollout.tasks` with `type: jsonl`", "`engine` with `type: scripted`", "`trainer.adam`"):
        assert f"\n## {heading}\n" in page
    assert "| `lr` | float | `0.0003` |" in page
    assert "| `tasks` | section | required |" in page
