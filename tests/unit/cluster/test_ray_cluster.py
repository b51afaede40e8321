"""What the driver of a Ray cluster does about roles that are lost, replaced or told to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from instar.cluster.ray.cluster import EXIT_LOST, RayCluster, RoleActor
from instar.cluster.supervisor import LEASE_ENV
from instar.errors import InstarError
from tests.unit.cluster.ray_fake import FakeRay, RayError, cluster_on


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


@pytest.fixture
async def cluster(ray: FakeRay, tmp_path: Path) -> AsyncIterator[RayCluster]:
    made = cluster_on(ray, tmp_path)
    yield made
    for name in made.roles:
        made.kill(name)
    await made.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.01)


async def lose(ray: FakeRay, role: RoleActor) -> None:
    """Until the cluster has noticed, and is about to start it elsewhere."""
    ray.actors[-1].alive = False
    await until(lambda: role.handle is None)


async def test_a_lost_role_is_started_again_under_a_new_lease(ray: FakeRay, cluster: RayCluster) -> None:
    role = await cluster.start("rollout", env={LEASE_ENV: "1"})
    await lose(ray, role)
    await until(lambda: len(ray.started) == 2)
    assert [order.env[LEASE_ENV] for order in ray.started] == ["1", "2"]
    assert not role.exit_code.done()


@pytest.mark.parametrize("end", [RayCluster.signal, RayCluster.kill])
async def test_a_lost_role_that_is_told_to_end_is_not_started_again(
    ray: FakeRay, cluster: RayCluster, end: Callable[[RayCluster, str], None]
) -> None:
    role = await cluster.start("rollout")
    await lose(ray, role)
    end(cluster, "rollout")
    async with asyncio.timeout(5):
        assert await role.exit_code == EXIT_LOST
    await asyncio.sleep(0.5)
    assert len(ray.started) == 1


@pytest.mark.parametrize("end", [RayCluster.signal, RayCluster.kill])
async def test_a_role_that_is_told_to_end_while_it_is_placed_has_ended(
    ray: FakeRay, cluster: RayCluster, end: Callable[[RayCluster, str], None]
) -> None:
    role = await cluster.start("rollout")

    async def told_meanwhile() -> None:
        end(cluster, "rollout")

    ray.on_start = told_meanwhile
    await lose(ray, role)
    async with asyncio.timeout(5):
        assert await role.exit_code == EXIT_LOST
    await until(lambda: role.handle is None)
    assert not ray.actors[1].alive
    assert len(ray.started) == 2
    ray.on_start = lambda: asyncio.sleep(0)
    await cluster.restart("rollout")  # at a person's word
    assert len(ray.started) == 3
    assert ray.actors[2].alive
    assert not role.exit_code.done()


async def test_a_start_whose_answer_is_lost_holds_no_lease(ray: FakeRay, cluster: RayCluster) -> None:
    async def lost_once() -> None:
        if len(ray.started) == 1:
            raise RayError("the node died")

    ray.on_start = lost_once
    await cluster.start("rollout", env={LEASE_ENV: "1"})
    assert [order.env[LEASE_ENV] for order in ray.started] == ["1", "2"]


async def test_a_role_that_is_replaced_is_no_failure(tmp_path: Path) -> None:
    """An evaluation's rollout has ended, while its watcher waits for its turn to read the metrics."""
    ray = FakeRay(shares_folder=False)
    cluster = cluster_on(ray, tmp_path)
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


async def test_a_ray_that_does_not_shut_down_hides_no_first_cause(tmp_path: Path) -> None:
    def too_slow() -> None:
        raise TimeoutError

    ray, said = FakeRay(), list[str]()
    ray.on_shutdown = too_slow
    cluster = cluster_on(ray, tmp_path, said.append)

    async def a_run_that_fails() -> None:
        async with AsyncExitStack() as leaving:
            leaving.push_async_callback(cluster.close)
            raise InstarError("the first cause")

    with pytest.raises(InstarError, match="the first cause"):
        await a_run_that_fails()
    assert said == ["Ray did not shut down in 30 s"]
