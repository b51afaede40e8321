"""Resolve the backend and engine of a run, and remove the secrets from its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from instar.backends.detect import detect_backend
from instar.backends.packages import check_installed
from instar.clouds.base import SERVICES, configured_key, resolve_access
from instar.config import (
    AutoBackendConfig,
    BackendConfig,
    CloudConfig,
    CloudEngineConfig,
    CloudSection,
    CompletionsReferenceConfig,
    LocalBackendConfig,
    LocalEngineConfig,
    LoraConfig,
    MintBackendConfig,
    RunConfig,
    TinkerBackendConfig,
    WeaverBackendConfig,
)
from instar.errors import ConfigError

SECTIONS: dict[str, type[CloudConfig]] = {
    "tinker": TinkerBackendConfig,
    "mint": MintBackendConfig,
    "weaver": WeaverBackendConfig,
}
UNUSED_LOCALLY = frozenset({"deadline", "sampler_ttl"})
"""Settings of a service that do not affect the local backend."""


def resolve_run(config: RunConfig, env: Mapping[str, str]) -> tuple[RunConfig, list[str]]:
    """Return the config with `auto` resolved and an engine that fits the backend, and notes for the user.
    Raises ConfigError if the engine does not fit the backend, or if the engine samples from a service whose
    package or key is missing. Resolving the returned config again does not change it."""
    backend, notes = _resolve_backend(config.backend, env)
    if isinstance(backend, CloudConfig):
        _check_url(backend.base_url)
    engine = _resolve_engine(config, backend)
    config = config.model_copy(update={"backend": backend, "engine": engine})
    if isinstance(engine, CloudEngineConfig):
        check_reachable(config, env)
    return config, notes


def check_reachable(config: RunConfig, env: Mapping[str, str]) -> None:
    """Raise ConfigError if the backend's package or its service's key is missing."""
    check_installed(config.backend)
    if isinstance(config.backend, CloudConfig):
        resolve_access(config.backend, config.model, env)


def _resolve_backend(section: BackendConfig, env: Mapping[str, str]) -> tuple[BackendConfig, list[str]]:
    if not isinstance(section, AutoBackendConfig):
        return section, []
    detection = detect_backend(section, env)
    settings = {name: getattr(section, name) for name in section.model_fields_set - {"type"}}
    note = f"backend: {detection.name} ({detection.reason})"
    if detection.name != "local":
        return SECTIONS[detection.name](**settings), [note]
    return _local_backend(settings), [note]


def _local_backend(settings: dict[str, Any]) -> LocalBackendConfig:
    """Return the local backend's settings for the settings of a service. Raises ConfigError for settings that
    have no local equivalent."""
    local: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "rank":
            local["lora"] = LoraConfig(rank=value)
        elif name == "python":
            local["python"] = value
        elif name not in UNUSED_LOCALLY and value != CloudSection.model_fields[name].default:
            raise ConfigError(
                f"backend.{name}: given {value!r}, but no service is configured and the local backend has no "
                f"such setting. Set backend.type to one of {', '.join(SERVICES)}"
            )
    return LocalBackendConfig(**local)


def _resolve_engine(config: RunConfig, backend: BackendConfig) -> Any:
    engine = config.engine
    is_service = isinstance(backend, CloudConfig)
    if isinstance(engine, CloudEngineConfig) and not is_service:
        raise ConfigError(
            f"engine.type: cloud samples from the service that trains, but backend.type is {backend.type!r}; "
            f"set backend.type to one of {', '.join(SERVICES)}, or use engine.type: local"
        )
    if is_service and isinstance(engine, LocalEngineConfig):
        if "engine" in config.model_fields_set:
            raise ConfigError(
                f"engine.type: local cannot load the weights that {backend.type} trains, because they stay "
                "on the service. Remove engine, or set engine.type to cloud"
            )
        engine = CloudEngineConfig()
    if isinstance(engine, CloudEngineConfig) and engine.python is None:
        engine = engine.model_copy(update={"python": backend.python})
    return engine


def _check_url(url: str | None) -> None:
    if url is None:
        return
    # The errors do not contain the URL, because the URL may contain a key.
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("backend.base_url: must be a URL that begins with https:// or http://")
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            "backend.base_url: must not contain a key or a query, because it is stored with the run. "
            "Put the key into an environment variable and name the variable in backend.api_key_env"
        )


# --- secrets --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunSecrets:
    """The secrets of the trainer and the sampler, which must not be written to files or visible to agents."""

    env: dict[str, str] = field(repr=False)
    """The service's key and URL, under the names of the service's own variables."""
    withheld: frozenset[str]
    """The variables that other roles do not inherit, because they contain a key or could redirect the
    service's SDK to another address."""


def extract_secrets(config: RunConfig, env: Mapping[str, str]) -> tuple[RunConfig, RunSecrets]:
    """Return the resolved config without its keys, so that it may be stored, and the keys."""
    secret_env: dict[str, str] = {}
    withheld: set[str] = set()
    backend = config.backend
    if isinstance(backend, CloudConfig):
        service = SERVICES[backend.type]
        key = configured_key(backend, env) or env.get(service.key_env)
        url = backend.base_url or env.get(service.url_env)
        secret_env |= {
            name: value for name, value in ((service.key_env, key), (service.url_env, url)) if value
        }
        withheld |= {name for known in SERVICES.values() for name in (known.key_env, known.url_env)}
        withheld |= {name for name, value in env.items() if key and key in value}
        without_keys = backend.model_copy(update={"api_key": None, "api_key_env": None})
        config = config.model_copy(update={"backend": without_keys})
    reference = config.trainer.reference
    if isinstance(reference, CompletionsReferenceConfig) and (name := reference.api_key_env):
        secret_env |= {name: env[name]} if name in env else {}
        withheld.add(name)
    return config, RunSecrets(secret_env, frozenset(withheld))


def without_api_key(config: RunConfig) -> RunConfig:
    """Return the config without its API key, for display."""
    if not isinstance(config.backend, CloudSection):
        return config
    return config.model_copy(update={"backend": config.backend.model_copy(update={"api_key": None})})
