"""Tests for the config's defaults, rejected values, JSON round trip, documentation and registered types."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from instar import registry
from instar.cli.config_errors import find_section_classes, type_values
from instar.config import AdamConfig, RunConfig, TrainerConfig

ROLLOUT = {
    "tasks": {"type": "jsonl", "path": "tasks.jsonl"},
    "agent": {"type": "command", "command": ["agent"]},
}
EVAL = {"tasks": {"type": "reasoning_gym", "dataset": "basic_arithmetic"}}


def test_default_config_is_valid_and_listens_on_loopback() -> None:
    config = RunConfig()
    assert config.gateway.host == "127.0.0.1"
    assert (str(config.run_dir), str(config.store_path)) == ("runs/run", "runs/run/store.db")


def test_rollout_sampling_defaults_to_the_full_softmax() -> None:
    config = RunConfig.model_validate({"rollout": ROLLOUT})
    assert config.rollout is not None
    assert (config.rollout.sampling.temperature, config.rollout.sampling.top_p) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("trainer", "staleness"),
    [({}, 1), ({"max_staleness": 0}, 0), ({"max_staleness": 3}, 3), ({"mode": "sync"}, 0)],
)
def test_max_staleness_default_depends_on_the_mode(trainer: dict[str, Any], staleness: int) -> None:
    assert RunConfig.model_validate({"trainer": trainer}).max_staleness == staleness


def test_engines_must_be_updated_within_the_maximum_staleness() -> None:
    assert RunConfig.model_validate({"sync": {"every": 2}}).sync.every == 2
    with pytest.raises(ValidationError, match=r"sync\.every: must not exceed .* \(2\), got 3"):
        RunConfig.model_validate({"sync": {"every": 3}})
    with pytest.raises(ValidationError, match=r"sync\.every: must not exceed .* \(1\), got 2"):
        RunConfig.model_validate({"trainer": {"mode": "sync"}, "sync": {"every": 2}})
    tasks = {"type": "python", "function": "instar.demo.tasks:heldout_tasks"}
    with pytest.raises(ValidationError, match=r"eval\.every: got 4 with sync\.every 2,.* set"):
        RunConfig.model_validate({"sync": {"every": 2}, "eval": {"tasks": tasks, "every": 4}})


def test_groups_from_outside_are_accepted_without_a_rollout_only() -> None:
    assert not RunConfig().accepts_groups
    config = RunConfig.model_validate({"groups": {"group_policy": "drop", "failed_reward": -1}})
    assert config.accepts_groups
    assert config.trains_on_groups
    assert config.group_settings.failed_reward == -1
    tasks = {"type": "python", "function": "instar.demo.tasks:train_tasks"}
    rollout = {"tasks": tasks, "agent": {"type": "function", "function": "instar.demo.agent:solve"}}
    with pytest.raises(ValidationError, match="groups: cannot be combined with `rollout`"):
        RunConfig.model_validate({"groups": {}, "rollout": rollout})
    with pytest.raises(ValidationError, match="groups: cannot be used, because `data` does not list"):
        RunConfig.model_validate({"groups": {}, "data": "dataset:golden"})


def test_sync_mode_rejects_staleness_above_zero() -> None:
    with pytest.raises(ValidationError, match=r"trainer\.max_staleness: must be 0 .* got 2"):
        RunConfig.model_validate({"trainer": {"mode": "sync", "max_staleness": 2}})
    assert RunConfig.model_validate({"trainer": {"mode": "sync", "max_staleness": 0}}).max_staleness == 0


def test_combine_sum_without_weights_is_rejected() -> None:
    with pytest.raises(ValidationError, match="weights: required"):
        RunConfig.model_validate({"scoring": {"combine": {"how": "sum"}}})


@pytest.mark.parametrize(
    ("reward", "field"),
    [
        ({"type": "judge", "endpoint": "self", "timeout": 90}, "timeout"),
        ({"type": "tests", "sandbox": {"seconds": 90}}, r"sandbox\.seconds"),
    ],
)
def test_reward_timeout_above_the_scoring_deadline_is_rejected(reward: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError, match=rf"reward\.0\.{field}: must not exceed .*60 seconds\), got 90"):
        RunConfig.model_validate({"reward": reward})
    RunConfig.model_validate({"reward": reward, "scoring": {"deadline": 90}})


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_dumped_config_validates_to_the_same_config(mode: str) -> None:
    """Roles load the config that the supervisor dumped, so dumped defaults must be valid."""
    config = RunConfig.model_validate({"trainer": {"mode": mode}, "rollout": ROLLOUT, "eval": EVAL})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    "data",
    [
        {"trainer": {"adam": {"lr": float("inf")}}},
        {"trainer": {"adam": {"lr": float("nan")}}},
        {"trainer": {"adam": {"lr": 0}}},
        {"trainer": {"adam": {"lr": 11}}},
        {"trainer": {"adam": {"beta1": 1}}},
        {"trainer": {"adam": {"beta2": 1}}},
        {"trainer": {"adam": {"eps": 1e-46}}},
        {"trainer": {"adam": {"weight_decay": 1e9}}},
        {"trainer": {"seconds": float("inf")}},
        {"trainer": {"steps": 0}},
        {"gateway": {"port": 65536}},
        {"gateway": {"port": -1}},
        {"rollout": ROLLOUT | {"failed_reward": float("nan")}},
        {"rollout": ROLLOUT | {"sampling": {"top_p": 0}}},
        {"name": "../other"},
        {"name": ""},
    ],
)
def test_config_rejects_values_out_of_range(data: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RunConfig.model_validate(data)


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().seed = 3  # pyright: ignore[reportAttributeAccessIssue] # intended


def list_sections(section: type[BaseModel] = RunConfig) -> list[type[BaseModel]]:
    sections = [section]
    for field in section.model_fields.values():
        for inner in find_section_classes(field.annotation):
            sections += [nested for nested in list_sections(inner) if nested not in sections]
    return sections


def test_config_documents_every_setting() -> None:
    """A setting whose value is a section may be documented by the section's docstring instead."""
    undocumented = [
        f"{section.__name__}.{name}"
        for section in list_sections()
        for name, field in section.model_fields.items()
        if name != "type" and not field.description and not find_section_classes(field.annotation)
    ]
    assert undocumented == []
    assert all(section.__doc__ for section in list_sections())


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("store", "stores"),
        ("engine", "engines"),
        ("backend", "backends"),
        ("rollout.tasks", "tasks"),
        ("rollout.agent", "agents"),
        ("reward", "rewards"),
    ],
)
def test_config_types_match_the_registry(path: str, kind: str) -> None:
    sections = [RunConfig]
    for part in path.split("."):
        fields = [s.model_fields[part] for s in sections if part in s.model_fields]
        sections = [inner for field in fields for inner in find_section_classes(field.annotation)]
    types = {name for section in sections for name in type_values(section)}
    # These types have no class in the registry: the gateway forwards calls to an upstream, the cloud sampler
    # belongs to the backend, `mixed` starts engines of other types, and `auto` resolves to a different type.
    assert types - {"plugin", "upstream", "cloud", "mixed", "auto"} == set(registry.BUILTIN[kind])


def test_preset_sets_only_settings_that_are_not_given() -> None:
    careful = TrainerConfig.model_validate({"preset": "careful", "adam": {"beta1": 0.8}})
    assert (careful.adam.lr, careful.adam.beta1) == (1e-4, 0.8)
    assert TrainerConfig.model_validate(careful.model_dump()) == careful
    assert TrainerConfig(preset="careful", adam=AdamConfig(lr=1e-3)).adam.lr == 1e-3
    assert TrainerConfig(preset="careful", adam=AdamConfig(beta1=0.8)).adam.lr == 1e-4
    assert TrainerConfig(preset="fast").groups_per_step == 3
    assert TrainerConfig(preset="fast", groups_per_step=2).groups_per_step == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agents": {}}, "no agent has the mode learn.*use 'rollout' for the run's own rollouts"),
        (
            {"data": [{"source": "live", "share": 0.5}, {"source": "rollout", "share": 0.5}]},
            "cannot be mixed",
        ),
        ({"trainer": {"loss": {"name": "cross_entropy"}}}, "trainer.loss.name: cross_entropy cannot be used"),
        (
            {"trainer": {"on_collapse": "rewind"}},
            "trainer.on_collapse: rewind cannot be used",
        ),
        ({"sync": {"every": 2}}, "sync.every: 2 cannot be used with data 'live'"),
        (
            {"engine": {"type": "vllm", "policy": "merged"}},
            "engine.policy: merged cannot be used with data 'live'",
        ),
        (
            {"engine": {"type": "mixed", "parts": ["local", {"type": "vllm", "policy": "merged"}]}},
            "engine.policy: merged cannot be used with data 'live'",
        ),
        ({"live": {"canary": {"share": 0.2}}}, "less than or equal to 0.1"),
    ],
)
def test_live_data_with_settings_that_cannot_be_honoured_is_rejected(
    settings: dict[str, Any], message: str
) -> None:
    live = {"data": "live", "agents": {"support": {"mode": "learn"}}}
    assert RunConfig.model_validate(live).trains_on_live
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({**live, **settings})


def test_only_learning_agents_of_a_run_on_live_traffic_have_policies_of_their_own() -> None:
    agents = {"support": {"mode": "learn"}, "a/b": {"mode": "learn"}, "watched": {}}
    live = RunConfig.model_validate({"name": "run", "data": "live", "agents": agents})
    assert live.policy_ids == ["run/support", "run/a/b"]
    assert [live.get_policy_id(agent) for agent in ("a/b", "watched", "unknown")] == ["run/a/b", "run", "run"]
    assert live.get_policy_dir("run/support") == live.run_dir / "agents" / "support"
    assert live.get_policy_dir("run/a/b").parent == live.run_dir / "agents"
    assert live.get_policy_dir("run") == live.run_dir
    assert live.select_agent("a/b").policy_id == "run/a/b"
    with pytest.raises(ValueError, match="too many values"):
        _ = live.policy_id
    other = RunConfig.model_validate({"name": "run", "agents": agents})
    assert (other.policy_ids, other.get_policy_id("support")) == (["run"], "run")
