from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A Ray cluster of its own on this machine; its address. Ray notes in the environment that it asks for a
    token, and processes that start from now on are to know it."""
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
