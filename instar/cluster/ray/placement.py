"""Compute the resources that Ray reserves for the actor of each role."""

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

RESOURCE_PRECISION = 100
"""Fractions of a core or a GPU are rounded down to a multiple of 1 / RESOURCE_PRECISION."""


@dataclass(frozen=True)
class ClusterNode:
    node_id: str
    host: str
    resources: Mapping[str, float]
    """The node's resources, including those in use."""


def parse_nodes(nodes: Iterable[Mapping[str, Any]]) -> list[ClusterNode]:
    return [
        ClusterNode(str(node["NodeID"]), str(node["NodeManagerAddress"]), dict(node.get("Resources") or {}))
        for node in nodes
        if node["Alive"]
    ]


def plan_placement(role: str, config: RunConfig, nodes: Iterable[ClusterNode]) -> PlacementConfig:
    """Return the configured placement of the role. By default, a process gets one core and the GPUs that it
    can use, or a fraction of either if the cluster has too few cores or GPUs."""
    section = config.cluster
    assert isinstance(section, RayClusterConfig)
    if (configured := section.placement.get(role)) is not None:  # pyright: ignore[reportArgumentType] - any role
        return configured
    nodes = list(nodes)
    has_rewards_role = any(section.type != "agent" for section in config.reward)
    engine_count, teacher_count = len(engine_names(config)), len(teacher_names(config))
    # 3: gateway, trainer and rollout
    process_count = engine_count + teacher_count + 3 + has_rewards_role + config.has_gate
    total_cores = sum(node.resources.get("CPU", 0.0) for node in nodes)
    gpus = _count_gpus(role, config)
    total_gpus = sum(node.resources.get("GPU", 0.0) for node in nodes)
    requested_gpus = engine_count * _count_gpus("engine", config)
    requested_gpus += teacher_count * _count_gpus("teacher", config) + _count_gpus("trainer", config)
    if requested_gpus > total_gpus:
        gpus = _round_down(gpus * total_gpus / requested_gpus)
    return PlacementConfig(cpus=min(1.0, _round_down(total_cores / (2 * process_count))), gpus=gpus)


def _count_gpus(role: str, config: RunConfig) -> float:
    """Return the number of GPUs that one process of the role can use."""
    if config.model.device == "cpu":
        return 0.0
    if role == "engine":
        return _count_engine_gpus(config.engine)
    if role == "teacher" and isinstance(config.trainer.reference, EngineReferenceConfig):
        return _count_engine_gpus(teacher_config(config).engine)
    return 1.0 if role == "trainer" and not isinstance(config.backend, CloudConfig) else 0.0


def _count_engine_gpus(engine: EngineConfig) -> float:
    if isinstance(engine, ScriptedEngineConfig | CloudEngineConfig):
        return 0.0
    return float(engine.tensor_parallel) if isinstance(engine, VllmEngineConfig) else 1.0


def _round_down(amount: float) -> float:
    """Round down; an amount of at least 1 becomes an integer, as Ray requires."""
    return float(int(amount)) if amount >= 1 else int(amount * RESOURCE_PRECISION) / RESOURCE_PRECISION


def check_capacity(role: str, placement: PlacementConfig, nodes: Iterable[ClusterNode]) -> None:
    requested = _requested_resources(placement).items()
    if not any(all(node.resources.get(name, 0.0) >= amount for name, amount in requested) for node in nodes):
        needed = format_resources(placement)
        raise ConfigError(f"cluster.placement.{role}: no node has {needed}; request fewer resources")


def _requested_resources(placement: PlacementConfig) -> dict[str, float]:
    resources = {"CPU": placement.cpus, "GPU": placement.gpus, **placement.resources}
    return {name: amount for name, amount in resources.items() if amount}


def format_resources(placement: PlacementConfig) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in _requested_resources(placement).items())
