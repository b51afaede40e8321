"""Tests for rejecting unsupported settings by name before a run starts, and for loss fallbacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instar.backends.base import BackendCapabilities, make_cloud_capabilities
from instar.backends.factory import apply_capabilities, check_run, create_backend, get_known_capabilities
from instar.config import LossConfig, ModelConfig, RunConfig
from instar.errors import ConfigError

CAPABILITIES = BackendCapabilities(
    losses=frozenset({"ppo", "importance_sampling", "cross_entropy"}),
    artifacts=frozenset({"adapter"}),
    optimizer_settings=frozenset({"lr", "beta1", "eps", "grad_clip_norm"}),
)
ROLLOUT = {
    "tasks": {"type": "python", "function": "instar.demo.tasks:train_tasks"},
    "agent": {"type": "function", "function": "instar.demo.agent:solve"},
}
ENV = {"TINKER_API_KEY": "tml-x", "WEAVER_API_KEY": "x"}


def make_config(backend: Any = "local", rollout: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    settings = {"backend": backend, "rollout": ROLLOUT | (rollout or {}), "trainer": trainer}
    return RunConfig.model_validate(settings)


async def test_create_backend_has_known_capabilities(model_folder: Path) -> None:
    config = RunConfig(model=ModelConfig(name=str(model_folder), dtype="fp32"))
    backend = create_backend(config)
    assert backend.capabilities == get_known_capabilities(config.backend)
    await backend.close()


def test_create_backend_rejects_unsupported_loss_setting(model_folder: Path) -> None:
    settings = {"model": {"name": str(model_folder)}, "trainer": {"loss": {"name": "dro", "clip_low": 0.5}}}
    with pytest.raises(ConfigError, match="clip_low"):
        create_backend(RunConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"loss": {"name": "cispo"}},
            r"trainer\.loss\.name: .*'cispo'.*cross_entropy, importance_sampling, ppo",
        ),
        ({"loss": {"name": "dro", "clip_high": 2.0}}, r"trainer\.loss\.clip_high.*cispo or ppo"),
        (
            {"loss": {"name": "ppo", "beta": 0.1}},
            r"trainer\.loss\.beta: the 'ppo' loss has no beta.*dro",
        ),
        (
            {"adam": {"weight_decay": 0.1}},
            r"trainer\.adam\.weight_decay: must be 0\.0, got 0\.1.*grad_clip",
        ),
        ({"adam": {"beta2": 0.5}}, r"trainer\.adam\.beta2: must be 0\.95, got 0\.5"),
        ({"reference": {"weight": 0.1}}, r"reference\.weight: must be 0, got 0\.1.*engine or completions"),
        (
            {"loss": {"name": "dro"}, "loss_fallback": "cispo"},
            r"loss_fallback: this backend supports neither 'dro' nor 'cispo'.*ppo",
        ),
    ],
)
def test_apply_capabilities_rejects_unsupported_setting_by_name(
    trainer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_capabilities(make_config(**trainer), CAPABILITIES)


def test_apply_capabilities_rejects_unsupported_full_finetuning() -> None:
    with pytest.raises(ConfigError, match=r"backend\.lora: null"):
        apply_capabilities(make_config({"type": "local", "lora": None}), CAPABILITIES)


def test_apply_capabilities_keeps_supported_settings() -> None:
    config = make_config(
        loss={"name": "ppo", "clip_high": 1.5}, loss_fallback="cross_entropy", adam={"lr": 1e-3}
    )
    capabilities = replace(CAPABILITIES, has_reference=True)
    assert apply_capabilities(config, capabilities) == (config, [])


def test_loss_fallback_uses_own_defaults_and_warns() -> None:
    config = make_config(loss={"name": "cispo", "clip_high": 3.0}, loss_fallback="ppo")
    adjusted, (warning,) = apply_capabilities(config, replace(CAPABILITIES, has_reference=True))
    assert adjusted.trainer.loss == LossConfig(name="ppo")
    assert "does not support cispo" in warning
    assert "training with ppo" in warning


def test_default_loss_has_a_fallback_with_one_update() -> None:
    config = make_config("weaver")
    adjusted, (warning,) = apply_capabilities(
        config, make_cloud_capabilities(frozenset({"importance_sampling", "cross_entropy"}), "weaver")
    )
    assert (adjusted.trainer.loss.name, adjusted.trainer.update_count) == ("importance_sampling", 1)
    assert "does not support ppo" in warning
    assert RunConfig.model_validate(config.model_dump()) == config


# --- check_run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            make_config("weaver", loss={"name": "ppo"}),
            r"trainer\.loss\.name: .*'ppo'.*cross_entropy, importance_sampling",
        ),
        (
            make_config("tinker", {"sampling": {"temperature": 0.7}}),
            r"sampling\.temperature: must be 1 .*got 0\.7",
        ),
        (make_config("tinker", {"sampling": {"top_p": 0.9}}), r"sampling\.top_p: must be 1 .*got 0\.9"),
        (make_config("mint"), r"pip install 'instar\[mint\]'"),
        (make_config(loss={"name": "dro", "clip_low": 0.5}), r"trainer\.loss\.clip_low"),
        (
            make_config(loss={"name": "ppo", "clip_low": 0.2, "clip_high": 0.2}),
            r"clip_low < clip_high, got 0\.2 and 0\.2",
        ),
        (make_config(loss={"name": "cispo", "clip_high": 0.5}), r"clip_low < clip_high, got 0 and 0\.5"),
    ],
)
def test_check_run_rejects_invalid_run(config: RunConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(config, ENV)


@pytest.mark.parametrize("trainer", [{}, {"loss": {"name": "ppo"}, "loss_fallback": "importance_sampling"}])
def test_check_run_of_valid_run_returns_notes(trainer: dict[str, Any]) -> None:
    adjusted, notes = check_run(make_config("weaver", **trainer), ENV)
    assert adjusted.engine.type == "cloud"
    assert notes == [
        "warning: trainer.loss.name: this backend does not support ppo; training with importance_sampling "
        "and its defaults instead (trainer.loss_fallback)"
    ]


def test_check_run_accepts_top_p_with_greedy_sampling() -> None:
    check_run(make_config("tinker", {"sampling": {"temperature": 0, "top_p": 0.9}}), ENV)


def test_check_run_without_training_ignores_trainer_settings() -> None:
    config = RunConfig.model_validate(
        {"engine": "scripted", "trainer": {"loss": {"name": "dro", "clip_low": 0.5}}}
    )
    assert check_run(config, {}) == (config, [])
