"""What `backend: auto` means: the service that the settings name, else the one that the environment does,
else `local`. Two services at once are an error, never a guess."""

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
"""Service → what speaks for it."""


@dataclass(frozen=True, slots=True)
class BackendDetection:
    name: str
    """What `backend.type` would be."""
    why: str


def detect_backend(
    section: BackendConfig,
    env: Mapping[str, str],
    installed: Callable[[], Collection[str]] | None = None,
) -> BackendDetection:
    """``installed`` names the services whose SDK is there. Default: the environment that the backend will run
    in is asked, when all else leaves it open."""
    if not isinstance(section, AutoBackendConfig):
        return BackendDetection(section.type, "backend.type names it")
    for clues in (_in_settings(section, env), find_services_in_environment(env)):
        if found := _only(clues):
            return found
    given = [name for name in ("base_url", "api_key", "api_key_env") if getattr(section, name) is not None]
    if not given:
        return BackendDetection("local", "no setting and no variable names a service")
    there = installed() if installed else _installed(section.python)
    if len(there) == 1:
        return BackendDetection(next(iter(there)), "the only service whose package is installed")
    raise ConfigError(
        f"backend.{given[0]}: it does not tell which service it is of; "
        f"name it as backend.type: {', '.join(SERVICES)}"
    )


def find_services_in_environment(env: Mapping[str, str]) -> Evidence:
    """The services whose variables are set."""
    clues: Evidence = {}
    for name in ENVIRONMENT_ORDER:
        service = SERVICES[name]
        variables = [variable for variable in (service.key_env, service.url_env) if env.get(variable)]
        if variables and not (name == "tinker" and _seeded_by_mint(env)):
            clues[name] = [f"{' and '.join(variables)} in the environment"]
    return clues


def _seeded_by_mint(env: Mapping[str, str]) -> bool:
    """MinT's package copies its own variables into tinker's: such ones say nothing of Tinker."""
    mint, tinker = SERVICES["mint"], SERVICES["tinker"]
    pairs = ((tinker.key_env, mint.key_env), (tinker.url_env, mint.url_env))
    return all(env.get(theirs) in (None, "", env.get(ours)) for theirs, ours in pairs)


def _in_settings(section: AutoBackendConfig, env: Mapping[str, str]) -> Evidence:
    clues: Evidence = {}
    if section.base_url is not None:
        for service in _named_by_url(section.base_url):
            clues.setdefault(service.name, []).append("backend.base_url names it")
    if key := configured_key(section, env):
        for service in SERVICES.values():
            if key.startswith(service.key_prefixes):
                clues.setdefault(service.name, []).append("the key is one of its keys")
    for service in SERVICES.values():
        if section.api_key_env == service.key_env:
            clues.setdefault(service.name, []).append("backend.api_key_env names its variable")
    return clues


def _named_by_url(url: str) -> list[CloudService]:
    """By the host, else by the path: a service may speak another one's protocol under a path of that name."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    for text in (parts.hostname or "", parts.path):
        words = set(re.split(r"[^a-z0-9]+", text.lower()))
        if found := [service for service in SERVICES.values() if words & set(service.url_words)]:
            return found
    return []


def _only(clues: Evidence) -> BackendDetection | None:
    if len(clues) > 1:
        said = "; ".join(f"{name} ({', '.join(reasons)})" for name, reasons in clues.items())
        raise ConfigError(
            f"backend: {len(clues)} services are configured at once: {said}. "
            f"Keep one, or choose: backend.type: {' or '.join(clues)}"
        )
    for name, reasons in clues.items():
        return BackendDetection(name, ", ".join(reasons))
    return None


def _installed(python: str | None) -> list[str]:
    found = inspect_packages_of(python)
    return [name for name in SERVICES if found[name].problem is None]
