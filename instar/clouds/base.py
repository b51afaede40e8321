"""The known training services, and their addresses and keys. Does not import any SDK."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from instar.config import CloudConfig, CloudSection, ModelConfig
from instar.errors import ConfigError

MAX_SESSION_STARTS = 5
"""The number of attempts to start a session that the service loses before its first call."""


@dataclass(frozen=True, slots=True)
class CloudService:
    name: str
    package: str
    """The package's name on PyPI."""
    module: str
    extra: str
    """The optional dependency of Instar that installs the package."""
    key_env: str
    url_env: str
    key_prefixes: tuple[str, ...]
    """Prefixes that only this service's keys have."""
    url_words: tuple[str, ...]
    """Words that occur in the host or the path of the service's addresses."""
    losses: frozenset[str]

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
            losses=frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}),
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
            losses=frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}),
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
            losses=frozenset({"cross_entropy", "importance_sampling"}),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class CloudAccess:
    """The address, key and model that a client of the SDK is created with."""

    base_url: str | None
    """None for the SDK's default."""
    api_key: str = field(repr=False)
    base_model: str = ""
    deadline: float = 600.0


def resolve_access(
    section: CloudConfig, model: ModelConfig, env: Mapping[str, str] = os.environ
) -> CloudAccess:
    """Return the access to a service, from the settings or else from the service's environment variables.
    Raises ConfigError if there is no key."""
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
    """Return the key from the settings, or from the variable that the settings refer to; None if there is
    neither."""
    if section.api_key is not None:
        return section.api_key.get_secret_value()
    if section.api_key_env is None:
        return None
    if not (key := env.get(section.api_key_env)):
        raise ConfigError(f"backend.api_key_env: {section.api_key_env} is not set in the environment")
    return key
