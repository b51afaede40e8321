"""List the parts of a run that send what agents say to other machines."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec

from instar.clouds.base import SERVICES
from instar.config import (
    CloudConfig,
    CloudEngineConfig,
    CompletionsReferenceConfig,
    EngineConfig,
    EngineReferenceConfig,
    MixedEngineConfig,
    PostgresStoreConfig,
    RunConfig,
    UpstreamEngineConfig,
    VllmEngineConfig,
)
from instar.config.judge import JudgeRewardConfig
from instar.gateway.auth import is_loopback

NOTHING = "nothing leaves this machine"


class ExternalService(msgspec.Struct, frozen=True):
    setting: str
    """Path of the setting, such as ``engine``."""
    receives: str
    address: str

    def describe(self) -> str:
        return f"{self.receives} → {self.address} ({self.setting})"


def list_external_services(config: RunConfig) -> list[ExternalService]:
    """Return the other machines that receive prompts, replies or training data. The functions of plugins,
    rules and agents are not known to the settings, so what these send is not listed."""
    return [service for service in _list_services(config) if not _is_on_this_machine(service.address)]


def _list_services(config: RunConfig) -> Iterator[ExternalService]:
    yield from _list_engines(config.engine, "engine", config)
    for name, upstream in config.upstreams.items():
        yield ExternalService(f"upstreams.{name}", "the calls for its models", upstream.base_url)
    for index, reward in enumerate(config.reward):
        if isinstance(reward, JudgeRewardConfig) and reward.endpoint != "self":
            yield ExternalService(f"reward.{index}", "the sessions that it judges", reward.endpoint)
    if isinstance(config.backend, CloudConfig):
        address = _get_cloud_address(config.backend)
        yield ExternalService("backend", "training data, if the run trains", address)
    yield from _list_teachers(config)
    if isinstance(config.store, PostgresStoreConfig):
        yield ExternalService("store", "all recorded sessions", config.store.url)
    if config.cluster.type == "ray" and config.cluster.address is not None:
        yield ExternalService("cluster", "what its processes work on", config.cluster.address)


def _list_engines(engine: EngineConfig, path: str, config: RunConfig) -> Iterator[ExternalService]:
    match engine:
        case UpstreamEngineConfig():
            yield ExternalService(path, "all calls", engine.base_url)
        case CloudEngineConfig() if isinstance(config.backend, CloudConfig):
            yield ExternalService(path, "all calls", _get_cloud_address(config.backend))
        case VllmEngineConfig():
            for url in engine.servers:
                yield ExternalService(path, "its share of the calls", url)
        case MixedEngineConfig():
            for index, part in enumerate(engine.parts):
                yield from _list_engines(part, f"{path}.parts.{index}", config)
        case _:
            pass


def _list_teachers(config: RunConfig) -> Iterator[ExternalService]:
    reference, receives = config.trainer.reference, "what is trained on"
    if reference.weight == 0:
        return
    if isinstance(reference, CompletionsReferenceConfig):
        yield ExternalService("trainer.reference", receives, reference.base_url)
    if isinstance(reference, EngineReferenceConfig):
        for service in _list_engines(reference.engine, "trainer.reference.engine", config):
            yield ExternalService(service.setting, receives, service.address)


def _get_cloud_address(backend: CloudConfig) -> str:
    return backend.base_url or f"{backend.type} (its public URL, or {SERVICES[backend.type].url_env})"


def _is_on_this_machine(address: str) -> bool:
    """Return True if the address is a loopback URL, or a URL without a host, such as `postgresql:///name`."""
    host = urlsplit(address).hostname
    return "://" in address and (not host or is_loopback(host))
