"""Config sections of the placement of a run's roles, and of the transfer of weights to the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from instar.config.base import NonNegativeFloat, Positive, Seconds, Section, type_shorthand

RoleName = Literal["gateway", "engine", "teacher", "trainer", "rollout", "rewards"]


class LocalClusterConfig(Section):
    """Runs every role as a process on this machine."""

    type: Literal["local"] = "local"


class PlacementConfig(Section):
    """The resources that one process of a role gets."""

    cpus: NonNegativeFloat = 1.0
    """Number of CPU cores that Ray reserves."""
    gpus: NonNegativeFloat = 0.0
    """Number of GPUs that Ray reserves. Processes with a fraction below 1 share a GPU."""
    resources: dict[str, float] = {}
    """Custom Ray resources that the node must have, for example `{node-a: 0.01}`."""


class RayClusterConfig(Section):
    """Runs every role as an actor on a Ray cluster. Roles are placed by their resources and restarted on
    another node if their node is lost. Needs `instar[ray]`, and a PostgreSQL store if there are several
    nodes. Each node keeps logs in its own `dir`. The trainer keeps its checkpoints there, so it can move to
    another node only if `dir` is a shared folder."""

    type: Literal["ray"] = "ray"
    address: str | None = None
    """Address of the cluster as seen from one of its nodes: `host:6379` or `auto`. Default: `RAY_ADDRESS`, or
    a new cluster on this machine."""
    placement: dict[RoleName, PlacementConfig] = {}
    """Resources of a process, by role. Default: one core, and the GPUs that an engine, a teacher or the
    trainer can use. If the cluster has too few, each process gets a fraction."""
    env: list[str] = []
    """Names of additional environment variables to pass to the roles. `PYTHONPATH`, `CUDA_HOME`, `HF_HOME`,
    `HF_HUB_OFFLINE`, `OMP_NUM_THREADS` and variables in settings such as `api_key_env` are always passed."""
    node_timeout: Seconds = 30.0
    """Seconds that a node may be unreachable before its roles are started on other nodes. Roles that still
    run on the node then exit. Ray itself may declare the node dead sooner."""


ClusterConfig = Annotated[
    LocalClusterConfig | RayClusterConfig, Field(discriminator="type"), type_shorthand("local")
]

RouteName = Literal["auto", "files", "ipc", "nccl", "ray"]


class SyncConfig(Section):
    """The transfer of published weights to the engines."""

    route: RouteName = "auto"
    """Method of weight transfer. `files`: engines read the published files, or receive the files if they
    cannot read the folder. `ipc`: through a buffer in the memory of a shared GPU or of the machine. `nccl`:
    over NCCL, between GPUs. `ray`: through Ray's object store, to engines on nodes of the cluster. `auto`:
    `ipc` or `nccl` on GPUs if all weights are replaced, `ray` on a Ray cluster without GPUs if all weights
    are trained, else `files`. The trainer's log shows the choice."""
    chunk_mib: Positive = 256
    """Size of one chunk of weights with the route `ray`, in MiB. At most two chunks are in the object
    store at the same time."""
    deadline: Seconds = 120.0
    """Timeout for an engine to serve a new version, including all attempts, in seconds. After a timeout, the
    engine keeps its old version, and the trainer tries again while it waits for data."""
