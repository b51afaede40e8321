"""Creates the cluster that a run's config selects."""

from __future__ import annotations

from collections.abc import Callable

from instar.cluster.base import Cluster
from instar.cluster.endpoints import EndpointDirectory
from instar.cluster.layout import RunFolder
from instar.cluster.supervisor import Supervisor
from instar.config import RunConfig


async def create_cluster(
    config: RunConfig, folder: RunFolder, directory: EndpointDirectory, *, log: Callable[[str], None]
) -> Cluster:
    if config.cluster.type == "ray":
        from instar.cluster.ray.cluster import RayCluster

        return await RayCluster.connect(config, folder, directory, log=log)
    return Supervisor(folder, log=log)
