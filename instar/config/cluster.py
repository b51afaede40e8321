"""Where a run's roles live, and how weights get from one to another."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from instar.config.base import Positive, Seconds, Section, type_shorthand

RoleName = Literal["gateway", "engine", "teacher", "trainer", "rollout", "rewards"]


class LocalClusterConfig(Section):
    """Every role is a process on this machine."""

    type: Literal["local"] = "local"


class PlacementConfig(Section):
    """What one process of a role is given."""

    cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPU cores that Ray counts for it."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs; a share of one may be given."""
    resources: dict[str, float] = {}
    """Resources of your own naming that its node must have, `{node-a: 0.01}` for instance."""


class RayClusterConfig(Section):
    """Every role is an actor on a Ray cluster, placed by its resources and started again elsewhere when its
    node is lost. Needs `instar[ray]`, and a PostgreSQL store once there are several nodes. Each node keeps
    logs in its own `dir`; the trainer keeps its checkpoints there, so it stays on its node, and goes on on
    another one only where `dir` is a folder that they share."""

    type: Literal["ray"] = "ray"
    address: str | None = None
    """Of the cluster, `host:6379` or `auto`, from one of its nodes. Default: `RAY_ADDRESS`, else one is
    started on this machine."""
    placement: dict[RoleName, PlacementConfig] = {}
    """What a process of each role is given. Default: one core, less where the cluster has few, and a GPU for
    each engine and the trainer; they share where there are fewer."""
    env: list[str] = []
    """Names of further environment variables to hand on to the roles. Those that any setting names
    (`api_key_env`, say), `PYTHONPATH` and `CUDA_HOME` are handed on anyway."""
    node_timeout: Seconds = 30.0
    """Seconds that a node may be out of reach before its roles are started elsewhere, and those it still runs
    end. Ray itself may count it as dead sooner."""


ClusterConfig = Annotated[
    LocalClusterConfig | RayClusterConfig, Field(discriminator="type"), type_shorthand("local")
]

RouteName = Literal["auto", "files", "ipc", "nccl", "ray"]


class SyncConfig(Section):
    """How published weights reach the engines."""

    route: RouteName = "auto"
    """`files`: the engines read what was published, or are sent it where they cannot see the folder. `ipc`:
    out of a buffer of the trainer's, in the memory of the GPU that they share, or of the machine. `nccl`:
    over NCCL, between GPUs. `ray`: through Ray's object store, to engines on nodes of the cluster. `auto`:
    `ipc` or `nccl` on GPUs where all weights are replaced, `ray` on a Ray cluster without GPUs where all
    weights are trained, else `files`; the trainer's log says which."""
    chunk_mib: Positive = 256
    """Weights in one chunk of the route `ray`, in MiB; two are in its object store at most."""
    deadline: Seconds = 120.0
    """For one engine to serve a version, with all attempts. Then it stays on what it serves, and is tried
    again while the trainer waits for data."""
