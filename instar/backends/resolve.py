"""From the YAML's word to the backend and engine of a run, and its secrets out of the settings."""

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
"""Settings of a service that mean nothing where there is none, and change nothing either."""


def resolve_run(config: RunConfig, env: Mapping[str, str]) -> tuple[RunConfig, list[str]]:
    """The run with `auto` replaced and the engine that goes with its backend, and what a person should know
    of it. Once more changes nothing. Raises ConfigError for a pair that does not go together, and where the
    engine samples at a service, for a package or key that is missing."""
    backend, notes = _concrete(config.backend, env)
    if isinstance(backend, CloudConfig):
        _check_url(backend.base_url)
    engine = _engine(config, backend)
    config = config.model_copy(update={"backend": backend, "engine": engine})
    if isinstance(engine, CloudEngineConfig):
        check_reachable(config, env)
    return config, notes


def check_reachable(config: RunConfig, env: Mapping[str, str]) -> None:
    """Raises ConfigError when the backend's package is missing where it will run, or its service's key."""
    check_installed(config.backend)
    if isinstance(config.backend, CloudConfig):
        resolve_access(config.backend, config.model, env)


def _concrete(section: BackendConfig, env: Mapping[str, str]) -> tuple[BackendConfig, list[str]]:
    if not isinstance(section, AutoBackendConfig):
        return section, []
    found = detect_backend(section, env)
    given = {name: getattr(section, name) for name in section.model_fields_set - {"type"}}
    note = f"backend: {found.name} ({found.why})"
    if found.name != "local":
        return SECTIONS[found.name](**given), [note]
    return _local(given), [note]


def _local(given: dict[str, Any]) -> LocalBackendConfig:
    """What was said of a service, as far as it means something here."""
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name == "rank":
            settings["lora"] = LoraConfig(rank=value)
        elif name == "python":
            settings["python"] = value
        elif name not in UNUSED_LOCALLY and value != CloudSection.model_fields[name].default:
            raise ConfigError(
                f"backend.{name}: nothing names a service, so this run would train locally, which has no "
                f"such setting. Name the service: backend.type: {', '.join(SERVICES)}"
            )
    return LocalBackendConfig(**settings)


def _engine(config: RunConfig, backend: BackendConfig) -> Any:
    engine = config.engine
    service = isinstance(backend, CloudConfig)
    if isinstance(engine, CloudEngineConfig) and not service:
        raise ConfigError(
            f"engine.type: cloud samples at the service that trains, and backend.type is {backend.type!r}; "
            f"name one of {', '.join(SERVICES)} there, or use engine.type: local"
        )
    if service and isinstance(engine, LocalEngineConfig):
        if "engine" in config.model_fields_set:
            raise ConfigError(
                f"engine.type: local cannot sample what {backend.type} trains: the weights stay there. "
                "Leave engine out, or write engine.type: cloud"
            )
        engine = CloudEngineConfig()
    if isinstance(engine, CloudEngineConfig) and engine.python is None:
        engine = engine.model_copy(update={"python": backend.python})
    return engine


def _check_url(url: str | None) -> None:
    """Its text is not repeated: a key may stand in it."""
    if url is None:
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("backend.base_url: not an address; it begins with https:// or http://")
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            "backend.base_url: leave keys out of it: it is kept with the run. "
            "backend.api_key_env names the variable that holds one"
        )


# --- secrets --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunSecrets:
    """What the trainer and a service's sampler need, and no file and no agent may hold."""

    env: dict[str, str] = field(repr=False)
    """Key and URL, under the service's own variables' names."""
    withheld: frozenset[str]
    """Variables that roles do not inherit: those that hold a key, and those that could send the service's SDK
    to another address."""


def extract_secrets(config: RunConfig, env: Mapping[str, str]) -> tuple[RunConfig, RunSecrets]:
    """A resolved run without its keys, fit to be written down, and the keys."""
    passed: dict[str, str] = {}
    withheld: set[str] = set()
    backend = config.backend
    if isinstance(backend, CloudConfig):
        service = SERVICES[backend.type]
        key = configured_key(backend, env) or env.get(service.key_env)
        url = backend.base_url or env.get(service.url_env)
        passed |= {name: value for name, value in ((service.key_env, key), (service.url_env, url)) if value}
        withheld |= {name for known in SERVICES.values() for name in (known.key_env, known.url_env)}
        withheld |= {name for name, value in env.items() if key and key in value}
        bare = backend.model_copy(update={"api_key": None, "api_key_env": None})
        config = config.model_copy(update={"backend": bare})
    reference = config.trainer.reference
    if isinstance(reference, CompletionsReferenceConfig) and (name := reference.api_key_env):
        passed |= {name: env[name]} if name in env else {}
        withheld.add(name)
    return config, RunSecrets(passed, frozenset(withheld))


def without_api_key(config: RunConfig) -> RunConfig:
    """The settings to be shown."""
    if not isinstance(config.backend, CloudSection):
        return config
    return config.model_copy(update={"backend": config.backend.model_copy(update={"api_key": None})})
