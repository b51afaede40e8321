"""Create a run's backend and reject settings that the backend does not support.

An unsupported loss or setting is an error, because a warning is easy to miss and the run would not train as
configured. To allow a different loss, set `trainer.loss_fallback`. It has a default only if no loss is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from instar.backends.base import (
    DEFAULT_CLIP,
    Backend,
    BackendCapabilities,
    make_cloud_capabilities,
    make_torch_capabilities,
)
from instar.backends.loss_values import get_clip_bounds
from instar.backends.resolve import check_backend_access, resolve_run
from instar.clouds.base import SERVICES
from instar.config import (
    AdamConfig,
    BackendConfig,
    BaseReferenceConfig,
    CloudEngineConfig,
    LocalBackendConfig,
    LossConfig,
    PreferencesConfig,
    RunConfig,
    TrainerConfig,
    VerlBackendConfig,
)
from instar.errors import ConfigError
from instar.registry import resolve_section

NEUTRAL_VALUES = {"weight_decay": 0.0, "grad_clip_norm": 0.0}
"""The values that turn an optimizer setting off. The neutral value of any other setting is its default."""


def create_backend(config: RunConfig) -> Backend:
    """Create the backend, which may load the model. Raises ConfigError if it does not support the config.
    To train with `trainer.loss_fallback`, use the config that `apply_capabilities` returns."""
    backend_class = resolve_section("backends", config.backend)
    backend = cast(Backend, backend_class(config.model, config.backend, seed=config.seed))
    apply_capabilities(config, backend.capabilities)  # called only to raise ConfigError
    return backend


def apply_capabilities(config: RunConfig, capabilities: BackendCapabilities) -> tuple[RunConfig, list[str]]:
    """Return the config to train with, and warnings if the loss was replaced with `trainer.loss_fallback`, or
    if the backend cannot train on preferences. Raises ConfigError for a setting that is invalid or that the
    backend does not support."""
    loss, warnings = _choose_loss(config.trainer, capabilities)
    _check_optimizer(config.trainer.adam, capabilities)
    reference = config.trainer.reference
    if isinstance(reference, BaseReferenceConfig) and reference.weight > 0 and not capabilities.has_reference:
        raise ConfigError(
            f"trainer.reference.weight: must be 0, got {reference.weight}; this backend does not compute the "
            "base model's logprobs. Set the weight to 0, or use a reference of type engine or completions"
        )
    if (weight := config.trainer.corrections.weight) > 0 and "cross_entropy" not in capabilities.losses:
        raise ConfigError(
            f"trainer.corrections.weight: must be 0, got {weight}; corrections need the cross_entropy loss, "
            "which this backend does not support"
        )
    if getattr(config.backend, "lora", ...) is None and not capabilities.supports_full_finetuning:
        raise ConfigError(
            "backend.lora: null trains all weights, which this backend does not support; set a LoRA rank"
        )
    check_adapter_source(config, capabilities)
    preferences, preference_warnings = _choose_preferences(config.trainer, capabilities)
    trainer = config.trainer.model_copy(update={"loss": loss, "preferences": preferences})
    warnings += preference_warnings
    changes: dict[str, Any] = {"trainer": trainer}
    if config.max_base_kl is not None and not capabilities.has_reference:
        problem = "this backend does not compute the base model's logprobs"
        if "max_base_kl" in config.live.replay.model_fields_set:
            raise ConfigError(f"live.replay.max_base_kl: must be null, got {config.max_base_kl}; {problem}")
        warnings.append(f"live.replay.max_base_kl: null is used instead of the default, because {problem}")
        replay = config.live.replay.model_copy(update={"max_base_kl": None})
        changes["live"] = config.live.model_copy(update={"replay": replay})
    return config.model_copy(update=changes), warnings


def _choose_preferences(
    trainer: TrainerConfig, capabilities: BackendCapabilities
) -> tuple[PreferencesConfig, list[str]]:
    """Return the settings for preferences, which are disabled if the backend cannot train on them. Raises
    ConfigError if their weight was set."""
    section = trainer.preferences
    if section.weight == 0 or (capabilities.has_reference and "cross_entropy" in capabilities.losses):
        return section, []
    problem = "preferences need the cross_entropy loss and the base model's logprobs from the backend"
    if "weight" in section.model_fields_set:
        raise ConfigError(f"trainer.preferences.weight: must be 0, got {section.weight}; {problem}")
    warning = f"trainer.preferences.weight: 0 is used instead of the default, because {problem}"
    return section.model_copy(update={"weight": 0.0}), [warning]


def check_adapter_source(config: RunConfig, capabilities: BackendCapabilities) -> None:
    """Raise ConfigError if the backend cannot start from `model.adapter`."""
    adapter, source = config.model.adapter, config.model.adapter_source
    if source is None:
        return
    if getattr(config.backend, "lora", ...) is None:
        raise ConfigError(
            f"model.adapter: got {adapter!r}, but backend.lora is null, which trains all weights; remove one "
            "of the two settings"
        )
    if source != "run" and source not in capabilities.adapter_sources:
        names = {"folder": "a PEFT folder", "tinker": "a tinker:// path", "weaver": "a weaver:// path"}
        supported = [name for kind, name in names.items() if kind in capabilities.adapter_sources]
        raise ConfigError(
            f"model.adapter: got {adapter!r}, but the {config.backend.type} backend can start only from "
            f"{' or '.join([*supported, 'run:NAME[@VERSION]'])}"
        )


def check_run(config: RunConfig, env: Mapping[str, str]) -> tuple[RunConfig, list[str]]:
    """Return the config with `auto` resolved, and notes for the user. Raises ConfigError for any problem
    that can be found before the run starts. Training settings are checked only if the run trains."""
    config, notes = resolve_run(config, env)
    if not config.trains:
        return config, notes
    check_backend_access(config, env)
    _check_sampling(config)
    capabilities = get_known_capabilities(config.backend)
    warnings = [] if capabilities is None else apply_capabilities(config, capabilities)[1]
    return config, [*notes, *(f"warning: {warning}" for warning in warnings)]


def get_known_capabilities(section: BackendConfig) -> BackendCapabilities | None:
    """Return the capabilities that are known before the backend is created, or None for a plugin."""
    if isinstance(section, LocalBackendConfig | VerlBackendConfig):
        has_reference = section.lora is not None or section.type == "local"
        return make_torch_capabilities(
            section.lora, has_reference=has_reference, loads_adapters=section.type == "local"
        )
    service = SERVICES.get(section.type)
    return make_cloud_capabilities(service.losses, service.path_scheme) if service else None


def _choose_loss(trainer: TrainerConfig, capabilities: BackendCapabilities) -> tuple[LossConfig, list[str]]:
    loss, fallback = trainer.loss, trainer.loss_fallback
    _check_loss_settings(loss)
    if loss.name in capabilities.losses:
        return loss, []
    supported = ", ".join(sorted(capabilities.losses))
    if fallback is None:
        raise ConfigError(
            f"trainer.loss.name: this backend does not support {loss.name!r}; supported: {supported}. "
            "Choose one of these losses, or set trainer.loss_fallback"
        )
    if fallback not in capabilities.losses:
        raise ConfigError(
            f"trainer.loss_fallback: this backend supports neither {loss.name!r} nor {fallback!r}; "
            f"supported: {supported}"
        )
    warning = (
        f"trainer.loss.name: this backend does not support {loss.name}; "
        f"training with {fallback} and its defaults instead (trainer.loss_fallback)"
    )
    return LossConfig(name=fallback), [warning]


def _check_loss_settings(loss: LossConfig) -> None:
    for setting in ("clip_low", "clip_high"):
        if getattr(loss, setting) is not None and loss.name not in DEFAULT_CLIP:
            raise ConfigError(
                f"trainer.loss.{setting}: the {loss.name!r} loss does not clip; remove the setting, or use "
                f"{' or '.join(sorted(DEFAULT_CLIP))}"
            )
    if loss.name in DEFAULT_CLIP:
        low, high = get_clip_bounds(loss)
        if not (0 <= low <= 1 <= high and low < high):
            raise ConfigError(
                "trainer.loss.clip_low, clip_high: must satisfy 0 <= clip_low <= 1 <= clip_high and "
                f"clip_low < clip_high, got {low:g} and {high:g}"
            )
    if loss.beta is not None and loss.name != "dro":
        raise ConfigError(
            f"trainer.loss.beta: the {loss.name!r} loss has no beta; remove the setting, or use dro"
        )


def _check_optimizer(adam: AdamConfig, capabilities: BackendCapabilities) -> None:
    for name, field in AdamConfig.model_fields.items():
        neutral = NEUTRAL_VALUES.get(name, field.default)
        if name not in capabilities.optimizer_settings and (value := getattr(adam, name)) != neutral:
            raise ConfigError(
                f"trainer.adam.{name}: must be {neutral}, got {value}; this backend supports only "
                f"{', '.join(sorted(capabilities.optimizer_settings))}"
            )


def _check_sampling(config: RunConfig) -> None:
    """Raise ConfigError if a service would sample neither greedily nor from the full softmax. Services
    return only logprobs of the full softmax, so tokens sampled in any other way cannot be trained on."""
    if not config.trains_on_groups or not isinstance(config.engine, CloudEngineConfig):
        return
    sampling, section = config.group_settings.sampling, "groups" if config.rollout is None else "rollout"
    if sampling.temperature == 0:
        return
    for name in ("temperature", "top_p"):
        if (value := getattr(sampling, name)) != 1.0:
            raise ConfigError(
                f"{section}.sampling.{name}: must be 1 with engine.type cloud, got {value}, because services "
                "return only logprobs of the full softmax. Set it to 1, or set temperature to 0"
            )
