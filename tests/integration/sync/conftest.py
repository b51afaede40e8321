"""A Ray cluster for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Start a local Ray cluster and yield its address.

    Ray stores its token settings in this process's environment, so processes started later inherit them.
    """
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=128 * 2**20,
        logging_level="error",
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
