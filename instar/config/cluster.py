"""Where a run's roles are placed, and how weights get to the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from instar.config.base import Positive, Seconds, Section, type_shorthand

RoleName = Literal["gateway", "engine", "teacher", "trainer", "rollout", "rewards"]


class LocalClusterConfig(Section):
    """Every role is a process on this machine."""

    type: Literal["local"] = "local"


class PlacementConfig(Section):
    """The resources of one process of a role."""

    cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPU cores that Ray reserves."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves; fractions below 1 share a GPU."""
    resources: dict[str, float] = {}
    """Custom Ray resources that its node must have, for example `{node-a: 0.01}`."""


class RayClusterConfig(Section):
    """Every role is an actor on a Ray cluster, placed by its resources and restarted on another node if its
    node is lost. Needs `instar[ray]`, and a PostgreSQL store if there are several nodes. Each node keeps logs
    in its own `dir`. The trainer keeps its checkpoints there, so it can move to another node only if `dir` is
    a shared folder."""

    type: Literal["ray"] = "ray"
    address: str | None = None
    """Address of the cluster as seen from one of its nodes: `host:6379` or `auto`. Default: `RAY_ADDRESS`, or
    a new cluster on this machine."""
    placement: dict[RoleName, PlacementConfig] = {}
    """Resources of a process, by role. Default: one core, or less if the cluster has few, and a GPU for each
    engine and the trainer, shared if there are too few."""
    env: list[str] = []
    """Names of additional environment variables to pass to the roles. Variables that a setting names (such as
    `api_key_env`), `PYTHONPATH` and `CUDA_HOME` are always passed."""
    node_timeout: Seconds = 30.0
    """Seconds that a node may be unreachable before its roles are started on other nodes, and before roles
    that still run on it end. Ray itself may declare the node dead sooner."""


ClusterConfig = Annotated[
    LocalClusterConfig | RayClusterConfig, Field(discriminator="type"), type_shorthand("local")
]

RouteName = Literal["auto", "files", "ipc", "nccl", "ray"]


class SyncConfig(Section):
    """How published weights reach the engines."""

    route: RouteName = "auto"
    """`files`: engines read the published files, or receive them if they cannot see the folder. `ipc`:
    through a buffer in the memory of a shared GPU or of the machine. `nccl`: over NCCL, between GPUs. `ray`:
    through Ray's object store, to engines on nodes of the cluster. `auto`: `ipc` or `nccl` on GPUs if all
    weights are replaced, `ray` on a Ray cluster without GPUs if all weights are trained, else `files`; the
    trainer's log names the choice."""
    chunk_mib: Positive = 256
    """Size of one chunk of weights on the route `ray`, in MiB. At most two chunks are in the object store."""
    deadline: Seconds = 120.0
    """Seconds until an engine must serve a new version, with all attempts. After that it keeps its version,
    and the trainer tries again while it waits for data."""
