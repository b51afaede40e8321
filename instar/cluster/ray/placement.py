"""The resources that Ray reserves for the actor of a role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from instar.cluster.layout import engine_names, teacher_config, teacher_names
from instar.config import (
    CloudConfig,
    CloudEngineConfig,
    EngineConfig,
    EngineReferenceConfig,
    PlacementConfig,
    RayClusterConfig,
    RunConfig,
    ScriptedEngineConfig,
    VllmEngineConfig,
)
from instar.errors import ConfigError

FINEST = 100
"""The number of parts of a core or GPU. Fractions are rounded down to hundredths."""


@dataclass(frozen=True)
class ClusterNode:
    node_id: str
    host: str
    resources: Mapping[str, float]
    """Total resources of the node, free or in use."""


def parse_nodes(nodes: Iterable[Mapping[str, Any]]) -> list[ClusterNode]:
    """Return the nodes in the result of `ray.nodes` that are alive."""
    return [
        ClusterNode(str(node["NodeID"]), str(node["NodeManagerAddress"]), dict(node.get("Resources") or {}))
        for node in nodes
        if node["Alive"]
    ]


def plan_placement(role: str, config: RunConfig, nodes: Iterable[ClusterNode]) -> PlacementConfig:
    """Return the configured placement. Default: a core and a GPU, or less if the cluster has few."""
    section = config.cluster
    assert isinstance(section, RayClusterConfig)
    if (configured := section.placement.get(role)) is not None:  # pyright: ignore[reportArgumentType] - any role
        return configured
    nodes = list(nodes)
    has_rewards_role = any(section.type != "agent" for section in config.reward)
    processes = len(engine_names(config)) + len(teacher_names(config)) + 3 + has_rewards_role
    cores = sum(node.resources.get("CPU", 0.0) for node in nodes)
    share = _gpus(role, config)
    gpus = sum(node.resources.get("GPU", 0.0) for node in nodes)
    requested = _all_gpus(config)
    if requested > gpus:
        share = _floor(share * gpus / requested)
    return PlacementConfig(cpus=min(1.0, _floor(cores / (2 * processes))), gpus=share)


def _all_gpus(config: RunConfig) -> float:
    engines, teachers = len(engine_names(config)), len(teacher_names(config))
    return engines * _gpus("engine", config) + teachers * _gpus("teacher", config) + _gpus("trainer", config)


def _gpus(role: str, config: RunConfig) -> float:
    """Return how many GPUs one process of the role can use."""
    if config.model.device == "cpu":
        return 0.0
    if role == "engine":
        return _gpus_of_engine(config.engine)
    if role == "teacher" and isinstance(config.trainer.reference, EngineReferenceConfig):
        return _gpus_of_engine(teacher_config(config).engine)
    return 1.0 if role == "trainer" and not isinstance(config.backend, CloudConfig) else 0.0


def _gpus_of_engine(engine: EngineConfig) -> float:
    if isinstance(engine, ScriptedEngineConfig | CloudEngineConfig):
        return 0.0
    return float(engine.tensor_parallel) if isinstance(engine, VllmEngineConfig) else 1.0


def _floor(share: float) -> float:
    """Return the share rounded down: to an integer if at least 1, as Ray requires, else to hundredths."""
    return float(int(share)) if share >= 1 else int(share * FINEST) / FINEST


def check_capacity(role: str, placement: PlacementConfig, nodes: Iterable[ClusterNode]) -> None:
    """Raise ConfigError if no node has the resources."""
    requested = requested_resources(placement)
    for node in nodes:
        if all(node.resources.get(name, 0.0) >= amount for name, amount in requested.items()):
            return
    listed = ", ".join(f"{name}: {amount:g}" for name, amount in requested.items())
    raise ConfigError(f"cluster.placement.{role}: no node of the cluster has {{{listed}}}; reduce it")


def requested_resources(placement: PlacementConfig) -> dict[str, float]:
    resources = {"CPU": placement.cpus, "GPU": placement.gpus, **placement.resources}
    return {name: amount for name, amount in resources.items() if amount}
