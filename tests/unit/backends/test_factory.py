"""What a backend cannot honour is refused at start, by name; a loss may have a substitute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instar.backends.base import BackendCapabilities
from instar.backends.factory import apply_capabilities, check_run, create_backend, known_capabilities
from instar.config import ModelConfig, RunConfig
from instar.errors import ConfigError

SOME = BackendCapabilities(
    losses=frozenset({"ppo", "importance_sampling", "cross_entropy"}),
    artifacts=frozenset({"adapter"}),
    optimizer=frozenset({"lr", "beta1", "eps", "grad_clip_norm"}),
)
ROLLOUT = {
    "tasks": {"type": "python", "function": "instar.demo.tasks:train_tasks"},
    "agent": {"type": "function", "function": "instar.demo.agent:solve"},
}
KEYS = {"TINKER_API_KEY": "tml-x", "WEAVER_API_KEY": "x"}


def run(backend: Any = "local", rollout: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    settings = {"backend": backend, "rollout": ROLLOUT | (rollout or {}), "trainer": trainer}
    return RunConfig.model_validate(settings)


async def test_creates_what_the_config_names_as_it_is_known_to_be(model_folder: Path) -> None:
    config = RunConfig(model=ModelConfig(name=str(model_folder), dtype="fp32"))
    backend = create_backend(config)
    assert backend.capabilities == known_capabilities(config.backend)
    await backend.close()


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (
            {"loss": {"name": "cispo"}},
            r"trainer\.loss\.name: 'cispo'.*cross_entropy, importance_sampling, ppo",
        ),
        ({"loss": {"clip_high": 2.0}}, r"trainer\.loss\.clip_high.*cispo or ppo"),
        ({"loss": {"name": "ppo", "beta": 0.1}}, r"trainer\.loss\.beta: 'ppo' has none.*dro"),
        (
            {"adam": {"weight_decay": 0.1}},
            r"trainer\.adam\.weight_decay: given 0\.1.*must be 0\.0.*grad_clip",
        ),
        ({"adam": {"beta2": 0.5}}, r"trainer\.adam\.beta2: given 0\.5.*must be 0\.95"),
        ({"reference": {"weight": 0.1}}, r"trainer\.reference\.weight: given 0\.1.*engine or completions"),
        (
            {"loss": {"name": "dro"}, "loss_fallback": "cispo"},
            r"loss_fallback: neither 'dro' nor 'cispo'.*ppo",
        ),
    ],
)
def test_what_the_backend_lacks_is_refused_by_name(trainer: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        apply_capabilities(run(**trainer), SOME)


def test_full_finetuning_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"backend\.lora: null"):
        apply_capabilities(run({"type": "local", "lora": None}), SOME)


def test_what_the_backend_does_is_left_as_it_is() -> None:
    config = run(loss={"name": "ppo", "clip_high": 1.5}, loss_fallback="cross_entropy", adam={"lr": 1e-3})
    assert apply_capabilities(config, SOME) == (config, [])


def test_a_substitute_is_taken_with_a_warning_and_its_own_defaults() -> None:
    config = run(loss={"name": "cispo", "clip_high": 3.0}, loss_fallback="ppo")
    settled, (warning,) = apply_capabilities(config, SOME)
    assert settled.trainer.loss.model_dump(exclude_defaults=True) == {"name": "ppo"}
    assert "cispo is not computed" in warning
    assert "training with ppo" in warning


# --- before anything starts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            run("weaver", loss={"name": "ppo"}),
            r"trainer\.loss\.name: 'ppo'.*cross_entropy, importance_sampling",
        ),
        (run("tinker", {"sampling": {"temperature": 0.7}}), r"rollout\.sampling\.temperature: given 0\.7"),
        (run("tinker", {"sampling": {"top_p": 0.9}}), r"rollout\.sampling\.top_p: given 0\.9"),
        (run("mint"), r"pip install 'instar\[mint\]'"),
        (run(loss={"clip_low": 0.5}), r"trainer\.loss\.clip_low"),
        (run(loss={"name": "ppo", "clip_low": 0.2, "clip_high": 0.2}), r"given 0\.2 and 0\.2; they bound"),
        (run(loss={"name": "cispo", "clip_high": 0.5}), r"given 0 and 0\.5; they bound"),
    ],
)
def test_a_run_is_refused_before_anything_starts(config: RunConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_run(config, KEYS)


def test_a_run_that_fits_says_what_it_will_do() -> None:
    settled, notes = check_run(run("weaver", loss={"name": "ppo"}, loss_fallback="importance_sampling"), KEYS)
    assert settled.engine.type == "cloud"
    check_run(run("tinker", {"sampling": {"temperature": 0, "top_p": 0.9}}), KEYS)
    assert notes == [
        "warning: trainer.loss.name: ppo is not computed by this backend; training with importance_sampling "
        "and its defaults instead (trainer.loss_fallback)"
    ]


def test_a_run_that_is_only_recorded_needs_nothing_of_training() -> None:
    config = RunConfig.model_validate({"engine": "scripted", "trainer": {"loss": {"clip_low": 0.5}}})
    assert check_run(config, {}) == (config, [])


def test_the_backend_itself_is_asked_too(model_folder: Path) -> None:
    settings = {"model": {"name": str(model_folder)}, "trainer": {"loss": {"clip_low": 0.5}}}
    with pytest.raises(ConfigError, match="clip_low"):
        create_backend(RunConfig.model_validate(settings))
