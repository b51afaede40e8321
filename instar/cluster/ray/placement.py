"""What Ray is to give the actor of a role."""

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
"""Ray counts parts of a core or GPU; hundredths are enough."""


@dataclass(frozen=True)
class ClusterNode:
    node_id: str
    host: str
    resources: Mapping[str, float]
    """In all, used or not."""


def parse_nodes(told: Iterable[Mapping[str, Any]]) -> list[ClusterNode]:
    """The nodes that are alive, from what `ray.nodes` tells."""
    return [
        ClusterNode(str(node["NodeID"]), str(node["NodeManagerAddress"]), dict(node.get("Resources") or {}))
        for node in told
        if node["Alive"]
    ]


def plan_placement(role: str, config: RunConfig, nodes: Iterable[ClusterNode]) -> PlacementConfig:
    """As configured; else a core, or less where the cluster has few, and a GPU or a part of one."""
    section = config.cluster
    assert isinstance(section, RayClusterConfig)
    if (given := section.placement.get(role)) is not None:  # pyright: ignore[reportArgumentType] - any word
        return given
    nodes = list(nodes)
    scored = any(section.type != "agent" for section in config.reward)
    processes = len(engine_names(config)) + len(teacher_names(config)) + 3 + scored
    cores = sum(node.resources.get("CPU", 0.0) for node in nodes)
    wanted = _gpus(role, config)
    gpus = sum(node.resources.get("GPU", 0.0) for node in nodes)
    everyone = _all_gpus(config)
    if everyone > gpus:
        wanted = _floor(wanted * gpus / everyone)
    return PlacementConfig(cpus=min(1.0, _floor(cores / (2 * processes))), gpus=wanted)


def _all_gpus(config: RunConfig) -> float:
    engines, teachers = len(engine_names(config)), len(teacher_names(config))
    return engines * _gpus("engine", config) + teachers * _gpus("teacher", config) + _gpus("trainer", config)


def _gpus(role: str, config: RunConfig) -> float:
    """How many it could make use of."""
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
    """Whole numbers stay; Ray refuses 1.5 GPUs."""
    return float(int(share)) if share >= 1 else int(share * FINEST) / FINEST


def check_capacity(role: str, placement: PlacementConfig, nodes: Iterable[ClusterNode]) -> None:
    """Raises ConfigError where no node could ever hold it."""
    wanted = requested_resources(placement)
    for node in nodes:
        if all(node.resources.get(name, 0.0) >= amount for name, amount in wanted.items()):
            return
    told = ", ".join(f"{name}: {amount:g}" for name, amount in wanted.items())
    raise ConfigError(f"cluster.placement.{role}: given {{{told}}}, which no node of the cluster has")


def requested_resources(placement: PlacementConfig) -> dict[str, float]:
    wanted = {"CPU": placement.cpus, "GPU": placement.gpus, **placement.resources}
    return {name: amount for name, amount in wanted.items() if amount}
