"""Resolves `backend: auto` to the service in the settings, else the service in the environment, else `local`.
Two services at once are an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from instar.backends.packages import inspect_packages_of
from instar.clouds.base import SERVICES, CloudService, configured_key
from instar.config import AutoBackendConfig, BackendConfig
from instar.errors import ConfigError

ENVIRONMENT_ORDER = ("weaver", "mint", "tinker")
Evidence = dict[str, list[str]]
"""The reasons to choose each service, by the service's name."""


@dataclass(frozen=True, slots=True)
class BackendDetection:
    name: str
    """The value of `backend.type`."""
    reason: str


def detect_backend(
    section: BackendConfig,
    env: Mapping[str, str],
    installed: Callable[[], Collection[str]] | None = None,
) -> BackendDetection:
    """Return the backend and the reason for it. ``installed`` returns the services whose SDK is installed, by
    default in the backend's environment. It is called only if nothing else decides."""
    if not isinstance(section, AutoBackendConfig):
        return BackendDetection(section.type, "backend.type names it")
    for evidence in (_find_services_in_settings(section, env), find_services_in_environment(env)):
        if detection := _choose(evidence):
            return detection
    settings = [name for name in ("base_url", "api_key", "api_key_env") if getattr(section, name) is not None]
    if not settings:
        return BackendDetection("local", "no setting and no variable names a service")
    services = installed() if installed else _installed_services(section.python)
    if len(services) == 1:
        return BackendDetection(next(iter(services)), "the only service whose package is installed")
    raise ConfigError(
        f"backend.{settings[0]}: it does not tell which service it belongs to; "
        f"set backend.type to one of {', '.join(SERVICES)}"
    )


def find_services_in_environment(env: Mapping[str, str]) -> Evidence:
    """Return the services whose environment variables are set."""
    evidence: Evidence = {}
    for name in ENVIRONMENT_ORDER:
        service = SERVICES[name]
        variables = [variable for variable in (service.key_env, service.url_env) if env.get(variable)]
        if variables and not (name == "tinker" and _are_copied_from_mint(env)):
            evidence[name] = [f"{' and '.join(variables)} in the environment"]
    return evidence


def _are_copied_from_mint(env: Mapping[str, str]) -> bool:
    """Return True if Tinker's variables are copies that MinT's package made of its own variables."""
    mint, tinker = SERVICES["mint"], SERVICES["tinker"]
    pairs = ((tinker.key_env, mint.key_env), (tinker.url_env, mint.url_env))
    return all(env.get(copy) in (None, "", env.get(original)) for copy, original in pairs)


def _find_services_in_settings(section: AutoBackendConfig, env: Mapping[str, str]) -> Evidence:
    evidence: Evidence = {}
    if section.base_url is not None:
        for service in _named_by_url(section.base_url):
            evidence.setdefault(service.name, []).append("backend.base_url names it")
    if key := configured_key(section, env):
        for service in SERVICES.values():
            if key.startswith(service.key_prefixes):
                evidence.setdefault(service.name, []).append("the key is one of its keys")
    for service in SERVICES.values():
        if section.api_key_env == service.key_env:
            evidence.setdefault(service.name, []).append("backend.api_key_env names its variable")
    return evidence


def _named_by_url(url: str) -> list[CloudService]:
    """Return the services whose words occur in the URL's host, else those whose words occur in its path. A
    service may serve another service's protocol under a path with that service's name."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    for text in (parts.hostname or "", parts.path):
        words = set(re.split(r"[^a-z0-9]+", text.lower()))
        if services := [service for service in SERVICES.values() if words & set(service.url_words)]:
            return services
    return []


def _choose(evidence: Evidence) -> BackendDetection | None:
    if len(evidence) > 1:
        services = "; ".join(f"{name} ({', '.join(reasons)})" for name, reasons in evidence.items())
        raise ConfigError(
            f"backend: {len(evidence)} services are configured at once: {services}. "
            f"Keep one, or choose: backend.type: {' or '.join(evidence)}"
        )
    for name, reasons in evidence.items():
        return BackendDetection(name, ", ".join(reasons))
    return None


def _installed_services(python: str | None) -> list[str]:
    packages = inspect_packages_of(python)
    return [name for name in SERVICES if packages[name].problem is None]
