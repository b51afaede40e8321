"""What is known of each training service before its SDK is imported, and how to get at it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from instar.backends.base import BackendCapabilities
from instar.config import CloudConfig, CloudSection, ModelConfig
from instar.errors import ConfigError

MAX_SESSION_STARTS = 5
"""Times that a session which the service loses before it has begun is begun again."""


@dataclass(frozen=True, slots=True)
class CloudService:
    name: str
    package: str
    """Its distribution on PyPI."""
    module: str
    extra: str
    """Of ours, that installs it."""
    key_env: str
    url_env: str
    key_prefixes: tuple[str, ...]
    """What its keys begin with, where that tells it from others."""
    url_words: tuple[str, ...]
    """What its addresses contain, in the host or the path."""
    capabilities: BackendCapabilities

    @property
    def install(self) -> str:
        return f"pip install 'instar[{self.extra}]'"


SERVICES: dict[str, CloudService] = {
    service.name: service
    for service in (
        CloudService(
            name="tinker",
            package="tinker",
            module="tinker",
            extra="tinker",
            key_env="TINKER_API_KEY",
            url_env="TINKER_BASE_URL",
            key_prefixes=("tml-",),
            url_words=("tinker", "thinkingmachines"),
            capabilities=BackendCapabilities(
                losses=frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}),
                artifacts=frozenset({"remote"}),
                reference=True,
            ),
        ),
        CloudService(
            name="mint",
            package="mindlab-toolkit",
            module="mint",
            extra="mint",
            key_env="MINT_API_KEY",
            url_env="MINT_BASE_URL",
            key_prefixes=("sk-mint-",),
            url_words=("mint", "macaron"),
            capabilities=BackendCapabilities(
                losses=frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}),
                artifacts=frozenset({"remote"}),
                reference=True,
            ),
        ),
        CloudService(
            name="weaver",
            package="nex-weaver",
            module="weaver",
            extra="weaver",
            key_env="WEAVER_API_KEY",
            url_env="WEAVER_BASE_URL",
            key_prefixes=(),
            url_words=("weaver",),
            capabilities=BackendCapabilities(
                losses=frozenset({"cross_entropy", "importance_sampling"}),
                artifacts=frozenset({"remote"}),
                reference=True,
            ),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class CloudAccess:
    """What an SDK's client is made with."""

    base_url: str | None
    """None: the SDK's own."""
    api_key: str = field(repr=False)
    base_model: str = ""
    deadline: float = 600.0


def resolve_access(
    section: CloudConfig, model: ModelConfig, env: Mapping[str, str] = os.environ
) -> CloudAccess:
    """The settings first, then the service's own environment variables. Raises ConfigError without a key."""
    service = SERVICES[section.type]
    key = configured_key(section, env) or env.get(service.key_env)
    if not key:
        raise ConfigError(
            f"backend.api_key: {service.name} needs a key; set {service.key_env} in the environment"
        )
    return CloudAccess(
        base_url=section.base_url or env.get(service.url_env) or None,
        api_key=key,
        base_model=section.base_model or model.name,
        deadline=section.deadline,
    )


def configured_key(section: CloudSection, env: Mapping[str, str] = os.environ) -> str | None:
    """The key that the settings give or point at; None where they do not."""
    if section.api_key is not None:
        return section.api_key.get_secret_value()
    if section.api_key_env is None:
        return None
    if not (key := env.get(section.api_key_env)):
        raise ConfigError(f"backend.api_key_env: {section.api_key_env} is not set in the environment")
    return key
