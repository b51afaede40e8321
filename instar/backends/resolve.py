"""Resolve a run's backend and engine, and remove the secrets from its config.

`backend: auto` selects the service that the settings identify, or else the one that the environment
identifies. If a URL or key is set but does not identify a service, exactly one service's SDK must be
installed, and that service is selected. Without a URL or key, `local` is selected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from instar.backends.packages import check_installed, inspect_packages
from instar.clouds.base import SERVICES, CloudService, get_configured_key, resolve_access
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

CLOUD_CONFIG_CLASSES: dict[str, type[CloudConfig]] = {
    "tinker": TinkerBackendConfig,
    "mint": MintBackendConfig,
    "weaver": WeaverBackendConfig,
}
UNUSED_LOCALLY = frozenset({"deadline", "sampler_ttl"})
"""Service settings that are ignored if `auto` selects `local`."""
ENVIRONMENT_ORDER = ("weaver", "mint", "tinker")
Evidence = dict[str, list[str]]
"""The reasons for choosing each service, by service name."""


def resolve_run(config: RunConfig, env: Mapping[str, str]) -> tuple[RunConfig, list[str]]:
    """Return the config with `auto` resolved and a compatible engine, and notes for the user. Idempotent.
    Raises ConfigError if the backend is ambiguous, its URL is invalid, the engine is incompatible with it, or
    the engine samples from a service whose package or key is missing."""
    backend, notes = config.backend, list[str]()
    if isinstance(backend, AutoBackendConfig):
        detection = detect_backend(backend, env)
        settings = {name: getattr(backend, name) for name in backend.model_fields_set - {"type"}}
        config_class = CLOUD_CONFIG_CLASSES.get(detection.name)
        backend = config_class(**settings) if config_class else _make_local_backend(settings)
        notes = [f"backend: {detection.name} ({detection.reason})"]
    if isinstance(backend, CloudConfig):
        _check_url(backend.base_url)
    engine = _resolve_engine(config, backend)
    config = config.model_copy(update={"backend": backend, "engine": engine})
    if isinstance(engine, CloudEngineConfig):
        check_backend_access(config, env)
    return config, notes


def check_backend_access(config: RunConfig, env: Mapping[str, str]) -> None:
    check_installed(config.backend)
    if isinstance(config.backend, CloudConfig):
        resolve_access(config.backend, config.model, env)


def _make_local_backend(settings: dict[str, Any]) -> LocalBackendConfig:
    """Convert service settings to local backend settings. Raises ConfigError if a setting without a local
    equivalent differs from its default."""
    local_settings: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "rank":
            local_settings["lora"] = LoraConfig(rank=value)
        elif name == "python":
            local_settings["python"] = value
        elif name not in UNUSED_LOCALLY and value != CloudSection.model_fields[name].default:
            raise ConfigError(
                f"backend.{name}: no service is configured, and the local backend does not have this "
                f"setting. Remove it, or set backend.type to one of {', '.join(SERVICES)}"
            )
    return LocalBackendConfig(**local_settings)


def _resolve_engine(config: RunConfig, backend: BackendConfig) -> Any:
    engine = config.engine
    trains_on_service = isinstance(backend, CloudConfig)
    if isinstance(engine, CloudEngineConfig) and not trains_on_service:
        raise ConfigError(
            f"engine.type: cloud samples from the service that trains, but backend.type is {backend.type!r}; "
            f"set backend.type to one of {', '.join(SERVICES)}, or use engine.type: local"
        )
    if trains_on_service and isinstance(engine, LocalEngineConfig):
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
        raise ConfigError("backend.base_url: the value is not an HTTP URL; use https://HOST or http://HOST")
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            "backend.base_url: the URL contains a user name, a password or a query, which would be "
            "stored with the run. Put the key in an environment variable and name it in backend.api_key_env"
        )


# --- detecting the service ---


@dataclass(frozen=True, slots=True)
class BackendDetection:
    name: str
    reason: str


def detect_backend(
    section: BackendConfig,
    env: Mapping[str, str],
    list_installed: Callable[[], Collection[str]] | None = None,
) -> BackendDetection:
    """Choose the backend and give the reason. Raises ConfigError if the choice is ambiguous.
    ``list_installed`` returns the services whose SDK is installed; by default, the backend's environment is
    inspected. It is called only if there is a URL or key, but nothing identifies its service."""
    if not isinstance(section, AutoBackendConfig):
        return BackendDetection(section.type, "set in backend.type")
    for evidence in (_find_services_in_settings(section, env), find_services_in_environment(env)):
        if detection := _choose_service(evidence):
            return detection
    settings = [name for name in ("base_url", "api_key", "api_key_env") if getattr(section, name) is not None]
    if not settings:
        return BackendDetection("local", "no service is configured")
    if list_installed is not None:
        services = list_installed()
    else:
        packages = inspect_packages(section.python)
        services = [name for name in SERVICES if packages[name].problem is None]
    if len(services) == 1:
        return BackendDetection(next(iter(services)), "the only service whose package is installed")
    raise ConfigError(
        f"backend.{settings[0]}: cannot tell which service this setting belongs to; "
        f"set backend.type to one of {', '.join(SERVICES)}"
    )


def find_services_in_environment(env: Mapping[str, str]) -> Evidence:
    evidence: Evidence = {}
    for name in ENVIRONMENT_ORDER:
        service = SERVICES[name]
        variables = [variable for variable in (service.key_env, service.url_env) if env.get(variable)]
        if variables and not (name == "tinker" and _are_tinker_variables_from_mint(env)):
            evidence[name] = [f"{' and '.join(variables)} in the environment"]
    return evidence


def _are_tinker_variables_from_mint(env: Mapping[str, str]) -> bool:
    """Return True if Tinker's variables are unset or equal MinT's, which MinT's package copies to them."""
    mint, tinker = SERVICES["mint"], SERVICES["tinker"]
    pairs = ((tinker.key_env, mint.key_env), (tinker.url_env, mint.url_env))
    return all(env.get(copy) in (None, "", env.get(original)) for copy, original in pairs)


def _find_services_in_settings(section: AutoBackendConfig, env: Mapping[str, str]) -> Evidence:
    services_in_url = _find_services_in_url(section.base_url or "")
    key = get_configured_key(section, env) or ""
    evidence: Evidence = {}
    for name, service in SERVICES.items():
        reasons = {
            "identified by backend.base_url": service in services_in_url,
            "identified by the key's prefix": key.startswith(service.key_prefixes),
            "identified by backend.api_key_env": section.api_key_env == service.key_env,
        }
        if any(reasons.values()):
            evidence[name] = [reason for reason, applies in reasons.items() if applies]
    return evidence


def _find_services_in_url(url: str) -> list[CloudService]:
    """Return the services named in the URL's host or, if there are none, in its path. The host takes
    precedence, because a service may serve another service's protocol under a path with that name."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    for text in (parts.hostname or "", parts.path):
        words = set(re.split(r"[^a-z0-9]+", text.lower()))
        if services := [service for service in SERVICES.values() if words & set(service.url_words)]:
            return services
    return []


def _choose_service(evidence: Evidence) -> BackendDetection | None:
    if len(evidence) > 1:
        services = "; ".join(f"{name} ({', '.join(reasons)})" for name, reasons in evidence.items())
        raise ConfigError(
            f"backend: {len(evidence)} services are configured, and a run can use only one: {services}. "
            f"Remove the others, or set backend.type to {' or '.join(evidence)}"
        )
    for name, reasons in evidence.items():
        return BackendDetection(name, ", ".join(reasons))
    return None


# --- secrets ---


@dataclass(frozen=True, slots=True)
class RunSecrets:
    """The secrets of the trainer and the sampler. They are never stored or exposed to agents."""

    env: dict[str, str] = field(repr=False)
    """The service's key and URL, under its SDK's variable names, and the key of a completions reference."""
    withheld_variables: frozenset[str]
    """Variables with a key or an address of a service's SDK, which other roles must not inherit."""


def extract_secrets(config: RunConfig, env: Mapping[str, str]) -> tuple[RunConfig, RunSecrets]:
    """Return the config without keys, and the secrets from the config and the environment."""
    secret_env: dict[str, str] = {}
    withheld: set[str] = set()
    backend = config.backend
    if isinstance(backend, CloudConfig):
        service = SERVICES[backend.type]
        key = get_configured_key(backend, env) or env.get(service.key_env)
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


def remove_api_key(config: RunConfig) -> RunConfig:
    if not isinstance(config.backend, CloudSection):
        return config
    return config.model_copy(update={"backend": config.backend.model_copy(update={"api_key": None})})
