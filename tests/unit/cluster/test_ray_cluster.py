"""Tests for roles on a Ray cluster that are lost, replaced or signalled, and for a failing shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from instar.cluster.ray.cluster import EXIT_LOST, RayCluster, RayRole
from instar.cluster.supervisor import LEASE_ENV
from instar.errors import InstarError
from tests.unit.cluster.ray_fake import FakeRay, FakeRayError, make_cluster


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


@pytest.fixture
async def cluster(ray: FakeRay, tmp_path: Path) -> AsyncIterator[RayCluster]:
    ray_cluster = make_cluster(ray, tmp_path)
    yield ray_cluster
    for name in ray_cluster.roles:
        ray_cluster.kill(name)
    await ray_cluster.close()


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


async def lose_role(ray: FakeRay, role: RayRole) -> None:
    """Kill the actor, and wait until the cluster has noticed the loss and is about to restart the role."""
    ray.actors[-1].alive = False
    await wait_until(lambda: role.actor is None)


async def test_lost_role_is_restarted_under_a_new_lease(ray: FakeRay, cluster: RayCluster) -> None:
    role = await cluster.start("rollout", env={LEASE_ENV: "1"})
    await lose_role(ray, role)
    await wait_until(lambda: len(ray.started) == 2)
    assert [spec.env[LEASE_ENV] for spec in ray.started] == ["1", "2"]
    assert not role.exit_code.done()


@pytest.mark.parametrize("terminate", [RayCluster.signal, RayCluster.kill])
async def test_lost_role_that_is_signalled_is_not_restarted(
    ray: FakeRay, cluster: RayCluster, terminate: Callable[[RayCluster, str], None]
) -> None:
    role = await cluster.start("rollout")
    await lose_role(ray, role)
    terminate(cluster, "rollout")
    async with asyncio.timeout(30):
        assert await role.exit_code == EXIT_LOST
    await asyncio.sleep(0.5)
    assert len(ray.started) == 1


@pytest.mark.parametrize("terminate", [RayCluster.signal, RayCluster.kill])
async def test_role_signalled_during_placement_exits(
    ray: FakeRay, cluster: RayCluster, terminate: Callable[[RayCluster, str], None]
) -> None:
    role = await cluster.start("rollout")

    async def terminate_during_start() -> None:
        terminate(cluster, "rollout")

    ray.on_start = terminate_during_start
    await lose_role(ray, role)
    async with asyncio.timeout(30):
        assert await role.exit_code == EXIT_LOST
    await wait_until(lambda: role.actor is None)
    assert not ray.actors[1].alive
    assert len(ray.started) == 2
    ray.on_start = lambda: asyncio.sleep(0)
    await cluster.restart("rollout")  # a user may request this
    assert len(ray.started) == 3
    assert ray.actors[2].alive
    assert not role.exit_code.done()


async def test_start_with_a_lost_response_takes_a_new_lease(ray: FakeRay, cluster: RayCluster) -> None:
    async def fail_first_start() -> None:
        if len(ray.started) == 1:
            raise FakeRayError("the node died")

    ray.on_start = fail_first_start
    await cluster.start("rollout", env={LEASE_ENV: "1"})
    assert [spec.env[LEASE_ENV] for spec in ray.started] == ["1", "2"]


async def test_replaced_role_is_not_a_failure(tmp_path: Path) -> None:
    """An evaluation's rollout ends while its watcher is still waiting to read the metrics."""
    ray = FakeRay(shares_folder=False)
    cluster = make_cluster(ray, tmp_path)
    await cluster.start("trainer")
    await cluster.start("rollout")
    for _ in range(30):
        cluster.roles["rollout"].exit_code.set_result(0)
        await cluster.start("rollout")
        await asyncio.sleep(0.037)
        cluster.raise_failure()
    for name in cluster.roles:
        cluster.kill(name)
    await cluster.close()


async def test_close_with_a_failing_shutdown_keeps_the_first_error(tmp_path: Path) -> None:
    def time_out() -> None:
        raise TimeoutError

    log: list[str] = []
    ray = FakeRay()
    ray.on_shutdown = time_out
    cluster = make_cluster(ray, tmp_path, log.append)

    async def fail_and_close() -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(cluster.close)
            raise InstarError("the first cause")

    with pytest.raises(InstarError, match="the first cause"):
        await fail_and_close()
    assert log == ["Ray did not shut down within 30 s"]
