"""Resolve `backend: auto` to the service in the settings, else the service in the environment, else
`local`."""

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
"""The reasons to choose each service, by the name of the service."""


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
    """Return the backend and the reason for choosing it. ``installed`` returns the services whose SDK is
    installed. It is called only if no setting and no variable decides; the default inspects the backend's
    environment."""
    if not isinstance(section, AutoBackendConfig):
        return BackendDetection(section.type, "backend.type names it")
    for evidence in (_find_services_in_settings(section, env), find_services_in_environment(env)):
        if detection := _choose(evidence):
            return detection
    settings = [name for name in ("base_url", "api_key", "api_key_env") if getattr(section, name) is not None]
    if not settings:
        return BackendDetection("local", "no setting and no variable names a service")
    if installed is not None:
        services = installed()
    else:
        packages = inspect_packages_of(section.python)
        services = [name for name in SERVICES if packages[name].problem is None]
    if len(services) == 1:
        return BackendDetection(next(iter(services)), "the only service whose package is installed")
    raise ConfigError(
        f"backend.{settings[0]}: cannot tell which service this setting belongs to; "
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
    """Return True if Tinker's variables are copies of MinT's variables, which MinT's package makes."""
    mint, tinker = SERVICES["mint"], SERVICES["tinker"]
    pairs = ((tinker.key_env, mint.key_env), (tinker.url_env, mint.url_env))
    return all(env.get(copy) in (None, "", env.get(original)) for copy, original in pairs)


def _find_services_in_settings(section: AutoBackendConfig, env: Mapping[str, str]) -> Evidence:
    evidence: Evidence = {}
    if section.base_url is not None:
        for service in _find_services_in_url(section.base_url):
            evidence.setdefault(service.name, []).append("backend.base_url names it")
    if key := configured_key(section, env):
        for service in SERVICES.values():
            if key.startswith(service.key_prefixes):
                evidence.setdefault(service.name, []).append("the key is one of its keys")
    for service in SERVICES.values():
        if section.api_key_env == service.key_env:
            evidence.setdefault(service.name, []).append("backend.api_key_env names its variable")
    return evidence


def _find_services_in_url(url: str) -> list[CloudService]:
    """Return the services whose words occur in the host of the URL, else those whose words occur in its path.
    The host comes first, because a service may serve another service's protocol under a path of that name."""
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
            f"backend: {len(evidence)} services are configured, and a run can use only one: {services}. "
            f"Remove the others, or set backend.type to {' or '.join(evidence)}"
        )
    for name, reasons in evidence.items():
        return BackendDetection(name, ", ".join(reasons))
    return None
