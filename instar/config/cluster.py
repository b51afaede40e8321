"""Config sections for placing a run's roles, and for transferring weights to the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from instar.config.base import NonNegativeFloat, PositiveInt, Seconds, Section, type_shorthand

RoleName = Literal["gateway", "engine", "teacher", "trainer", "rollout", "rewards", "gate"]


class LocalClusterConfig(Section):
    """Runs every role as a process on this machine."""

    type: Literal["local"] = "local"


class PlacementConfig(Section):
    """Resources for each process of a role."""

    cpus: NonNegativeFloat = 1.0
    """Number of CPU cores that Ray reserves."""
    gpus: NonNegativeFloat = 0.0
    """Number of GPUs that Ray reserves. Processes with a fraction below 1 share a GPU."""
    resources: dict[str, float] = {}
    """Custom Ray resources that the node must have, for example `{node-a: 0.01}`."""


class RayClusterConfig(Section):
    """Runs every role as an actor on a Ray cluster. Roles are placed by their resources and restarted on
    another node if their node is lost. Needs `instar[ray]`, and a PostgreSQL store if there are several
    nodes. Each node writes logs to its own `dir`. The trainer saves its checkpoints there, so it can move to
    another node only if `dir` is a shared folder."""

    type: Literal["ray"] = "ray"
    address: str | None = None
    """Address of the cluster as seen from one of its nodes: `host:6379` or `auto`. Default: `RAY_ADDRESS`, or
    a new cluster on this machine."""
    placement: dict[RoleName, PlacementConfig] = {}
    """Resources for each process, by role. Default: one core, plus the GPUs that an engine, a teacher or the
    trainer can use. If the cluster has too few GPUs, each process gets a fraction."""
    env: list[str] = []
    """Names of additional environment variables to pass to the roles. `PYTHONPATH`, `CUDA_HOME`, `HF_HOME`,
    `HF_HUB_OFFLINE`, `OMP_NUM_THREADS` and variables in settings such as `api_key_env` are always passed."""
    node_timeout: Seconds = 30.0
    """Seconds that a node may be unreachable before its roles are started on other nodes. Roles still running
    on the node then exit. Ray itself may declare the node dead sooner."""


ClusterConfig = Annotated[
    LocalClusterConfig | RayClusterConfig, Field(discriminator="type"), type_shorthand("local")
]

RouteName = Literal["auto", "files", "ipc", "nccl", "ray"]


class SyncConfig(Section):
    """Settings for transferring published weights to the engines."""

    route: RouteName = "auto"
    """How weights are transferred. `files`: engines read the published files, which are uploaded to engines
    that cannot read the folder. `ipc`: through a buffer in GPU or host memory, shared with engines on the
    same machine. `nccl`: over NCCL, between GPUs. `ray`: through Ray's object store, to engines on the
    cluster's nodes. `auto`: the first route that works, in this order: `ipc` and `nccl` (if the trainer uses
    a GPU), `ray` (on a Ray cluster, if all weights are trained), `files`. The trainer logs the choice."""
    every: PositiveInt = 1
    """Number of training steps between two transfers. Between them, every step still publishes a version, and
    the engines serve an older one. `trainer.max_staleness` must be at least `every` - 1."""
    chunk_mib: PositiveInt = 256
    """Size of one chunk of weights for the `ray` route, in MiB. At most two chunks are stored at a time."""
    deadline: Seconds = 120.0
    """Timeout for updating the engines to a new version, including retries, in seconds. After a timeout, an
    engine keeps its old version (with `nccl`, it serves nothing) until the trainer tries again."""
