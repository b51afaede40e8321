"""The supported training services, their URLs and keys, and errors from calls to them."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from instar.config import CloudConfig, CloudSection, ModelConfig
from instar.errors import (
    BackendError,
    BackendLost,
    BackendUnavailable,
    ConfigError,
    EngineError,
    EngineUnavailable,
    InstarError,
)

MAX_CONCURRENT_SCORE_REQUESTS = 16
MAX_SESSION_STARTS = 5
"""The maximum number of attempts to start a session. A service may lose a session before its first call."""
CloudErrorKind = Literal["refused", "unavailable", "lost", "settings", "broken"]
"""``refused``: the service rejected the call, which had no effect. ``unavailable``: the service did not
respond, or only with transient errors, and the effect of the call is unknown. ``lost``: the session no longer
exists, or its state is unknown. ``settings``: the service rejected the key. ``broken``: the service does not
support the request, or the response is malformed."""
_BACKEND_ERRORS: Mapping[CloudErrorKind, type[InstarError]] = {
    "unavailable": BackendUnavailable,
    "lost": BackendLost,
    "settings": ConfigError,
}


class CloudError(Exception):
    """An error from a call to a service, independent of the SDK that the service uses."""

    def __init__(self, kind: CloudErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: CloudErrorKind = kind

    def to_backend_error(self) -> InstarError:
        return _BACKEND_ERRORS.get(self.kind, BackendError)(str(self))

    def to_engine_error(self) -> InstarError:
        # A lost sampler can be opened again, so the error allows a retry.
        error_class = EngineUnavailable if self.kind in ("unavailable", "lost") else EngineError
        return error_class(str(self))


def find_installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def redact_key(text: str, key: str) -> str:
    """Replace the key in the text with ***. A service may quote the key in its response."""
    return text.replace(key, "***") if key else text


@dataclass(frozen=True, slots=True)
class CloudService:
    name: str
    package: str
    """The SDK's package on PyPI. The SDK's module and Instar's extra have the service's name."""
    key_prefixes: tuple[str, ...]
    """Prefixes that occur only in this service's keys."""
    url_words: tuple[str, ...]
    """Words that occur in the host or the path of the service's URLs."""
    losses: frozenset[str]
    path_scheme: Literal["tinker", "weaver"]
    """The scheme of the service's paths of saved states."""

    @property
    def key_env(self) -> str:
        return f"{self.name.upper()}_API_KEY"

    @property
    def url_env(self) -> str:
        return f"{self.name.upper()}_BASE_URL"

    @property
    def install_command(self) -> str:
        return f"pip install 'instar[{self.name}]'"


_WEAVER_LOSSES = frozenset({"cross_entropy", "importance_sampling"})
_TINKER_LOSSES = _WEAVER_LOSSES | {"ppo", "cispo", "dro"}
SERVICES: dict[str, CloudService] = {
    service.name: service
    for service in (
        CloudService("tinker", "tinker", ("tml-",), ("tinker", "thinkingmachines"), _TINKER_LOSSES, "tinker"),
        CloudService("mint", "mindlab-toolkit", ("sk-mint-",), ("mint", "macaron"), _TINKER_LOSSES, "tinker"),
        CloudService("weaver", "nex-weaver", (), ("weaver",), _WEAVER_LOSSES, "weaver"),
    )
}


@dataclass(frozen=True, slots=True)
class CloudAccess:
    base_url: str | None
    """The service's URL, or None for the SDK's default."""
    api_key: str = field(repr=False)
    base_model: str = ""
    call_timeout: float = 600.0
    """The maximum duration of a call in seconds, including retries."""


def resolve_access(
    section: CloudConfig, model: ModelConfig, env: Mapping[str, str] = os.environ
) -> CloudAccess:
    """Return a service's URL, key and base model. The URL and key come from the config, or else from the
    service's environment variables. Raises ConfigError if there is no key."""
    service = SERVICES[section.type]
    key = get_configured_key(section, env) or env.get(service.key_env)
    if not key:
        raise ConfigError(f"backend.api_key is missing; set it or the environment variable {service.key_env}")
    return CloudAccess(
        base_url=section.base_url or env.get(service.url_env) or None,
        api_key=key,
        base_model=section.base_model or model.name,
        call_timeout=section.deadline,
    )


def get_configured_key(section: CloudSection, env: Mapping[str, str] = os.environ) -> str | None:
    """Return the key from the config or from the environment variable that the config names, or None if the
    config sets neither. Raises ConfigError if the variable is not set."""
    if section.api_key is not None:
        return section.api_key.get_secret_value()
    if section.api_key_env is None:
        return None
    if not (key := env.get(section.api_key_env)):
        raise ConfigError(
            f"backend.api_key_env: the variable {section.api_key_env} is not set; set it or backend.api_key"
        )
    return key
