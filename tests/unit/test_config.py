"""The config: defaults that fit together, numbers that are refused, and what survives a round trip."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from instar import registry
from instar.cli.config_errors import kinds_of, sections_in
from instar.config import RunConfig

ROLLOUT = {
    "tasks": {"type": "jsonl", "path": "tasks.jsonl"},
    "agent": {"type": "command", "command": ["agent"]},
}


def test_an_empty_run_is_valid_and_listens_on_loopback_only() -> None:
    config = RunConfig()
    assert config.gateway.host == "127.0.0.1"
    assert (str(config.run_dir), str(config.store_path)) == ("runs/run", "runs/run/store.db")


def test_the_train_channel_samples_from_the_full_softmax_unless_told_otherwise() -> None:
    config = RunConfig.model_validate({"rollout": ROLLOUT})
    assert config.rollout is not None
    assert (config.rollout.sampling.temperature, config.rollout.sampling.top_p) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("trainer", "staleness"),
    [({}, 1), ({"max_staleness": 0}, 0), ({"max_staleness": 3}, 3), ({"mode": "sync"}, 0)],
)
def test_staleness_has_a_default_by_mode(trainer: dict[str, Any], staleness: int) -> None:
    assert RunConfig.model_validate({"trainer": trainer}).max_staleness == staleness


def test_sync_mode_refuses_staleness_and_takes_an_explicit_zero() -> None:
    with pytest.raises(ValidationError, match=r"trainer\.max_staleness: given 2"):
        RunConfig.model_validate({"trainer": {"mode": "sync", "max_staleness": 2}})
    assert RunConfig.model_validate({"trainer": {"mode": "sync", "max_staleness": 0}}).max_staleness == 0


def test_a_sum_needs_weights() -> None:
    with pytest.raises(ValidationError, match="weights: missing"):
        RunConfig.model_validate({"scoring": {"combine": {"how": "sum"}}})


@pytest.mark.parametrize(
    ("reward", "field"),
    [
        ({"type": "judge", "endpoint": "self", "timeout": 90}, "timeout"),
        ({"type": "tests", "sandbox": {"seconds": 90}}, r"sandbox\.seconds"),
    ],
)
def test_a_score_must_be_possible_within_its_deadline(reward: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError, match=rf"reward\.0\.{field}: given 90; .* 60 seconds"):
        RunConfig.model_validate({"reward": reward})
    RunConfig.model_validate({"reward": reward, "scoring": {"deadline": 90}})


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_dumped_config_reads_back_the_same(mode: str) -> None:
    """Roles read what the supervisor dumped, so a default must not turn into a setting that is refused."""
    config = RunConfig.model_validate({"trainer": {"mode": mode}, "rollout": ROLLOUT, "eval": ROLLOUT_EVAL})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


ROLLOUT_EVAL = {"tasks": {"type": "reasoning_gym", "dataset": "basic_arithmetic"}}


@pytest.mark.parametrize(
    "data",
    [
        {"trainer": {"adam": {"lr": float("inf")}}},
        {"trainer": {"adam": {"lr": float("nan")}}},
        {"trainer": {"adam": {"lr": 0}}},
        {"trainer": {"seconds": float("inf")}},
        {"trainer": {"steps": 0}},
        {"gateway": {"port": 65536}},
        {"gateway": {"port": -1}},
        {"rollout": ROLLOUT | {"failed_reward": float("nan")}},
        {"rollout": ROLLOUT | {"sampling": {"top_p": 0}}},
        {"name": "../elsewhere"},
        {"name": ""},
    ],
)
def test_values_out_of_range_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RunConfig.model_validate(data)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().seed = 3  # pyright: ignore[reportAttributeAccessIssue] # that is the point


def every_section(section: type[BaseModel] = RunConfig) -> list[type[BaseModel]]:
    found = [section]
    for field in section.model_fields.values():
        for inner in sections_in(field.annotation):
            found += [below for below in every_section(inner) if below not in found]
    return found


def test_every_setting_is_documented() -> None:
    """A section may speak for the setting that holds it."""
    undocumented = [
        f"{section.__name__}.{name}"
        for section in every_section()
        for name, field in section.model_fields.items()
        if name != "type" and not field.description and not sections_in(field.annotation)
    ]
    assert undocumented == []
    assert all(section.__doc__ for section in every_section())


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
def test_the_words_of_type_are_those_of_the_registry(path: str, kind: str) -> None:
    sections = [RunConfig]
    for part in path.split("."):
        fields = [s.model_fields[part] for s in sections if part in s.model_fields]
        sections = [inner for field in fields for inner in sections_in(field.annotation)]
    words = {word for section in sections for word in kinds_of(section)}
    # An upstream has no engine of ours: the gateway itself passes calls on. A cloud's sampler is the
    # backend's, every process of a mixed engine is of one of its parts, and `auto` becomes one of the others.
    assert words - {"plugin", "upstream", "cloud", "mixed", "auto"} == set(registry.BUILTIN[kind])
