"""What a run on Ray needs, as far as it needs no cluster: places, variables, metrics, addresses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from instar.cluster.ray.connect import connect
from instar.cluster.ray.environment import forwarded_env
from instar.cluster.ray.host import RoleSpec
from instar.cluster.ray.metrics import MetricsMirror
from instar.cluster.ray.placement import ClusterNode, check_capacity, parse_nodes, plan_placement
from instar.config import PlacementConfig, RunConfig
from instar.errors import ConfigError


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"cluster": {"type": "ray"}, **changes})


def node(**resources: float) -> ClusterNode:
    return ClusterNode("id", "10.0.0.1", resources)


def placed(role: str, run: RunConfig, *nodes: ClusterNode) -> tuple[float, float]:
    found = plan_placement(role, run, nodes)
    return found.cpus, found.gpus


def test_dead_nodes_do_not_count() -> None:
    told = [
        {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 4.0}},
        {"NodeID": "b", "NodeManagerAddress": "10.0.0.2", "Alive": False, "Resources": {}},
    ]
    assert parse_nodes(told) == [ClusterNode("a", "10.0.0.1", {"CPU": 4.0})]


def test_a_role_gets_what_the_config_says() -> None:
    placement = {"engine": {"cpus": 3, "gpus": 2, "resources": {"big": 1}}}
    run = config(cluster={"type": "ray", "placement": placement})
    assert plan_placement("engine", run, [node(CPU=64, GPU=8)]).resources == {"big": 1}
    assert placed("engine", run, node(CPU=64, GPU=8)) == (3, 2)


def test_a_role_gets_a_core_and_a_gpu_where_there_are_enough() -> None:
    run = config(engine={"type": "local", "count": 2})
    roomy = [node(CPU=32, GPU=2), node(CPU=32, GPU=2)]
    assert placed("engine", run, *roomy) == (1, 1)
    assert placed("trainer", run, *roomy) == (1, 1)
    assert placed("gateway", run, *roomy) == (1, 0)


def test_roles_share_what_is_scarce() -> None:
    run = config(engine={"type": "vllm", "count": 1})
    assert placed("engine", run, node(CPU=2, GPU=1)) == (0.25, 0.5)
    assert placed("trainer", run, node(CPU=2, GPU=1)) == (0.25, 0.5)
    assert placed("engine", run, node(CPU=2)) == (0.25, 0)
    wide = config(engine={"type": "vllm", "tensor_parallel": 4})
    assert placed("engine", wide, node(CPU=64, GPU=8)) == (1, 4)


def test_what_no_node_has_is_refused_by_its_path() -> None:
    wanted = PlacementConfig(cpus=1, resources={"fast": 1})
    check_capacity("engine", wanted, [node(CPU=1), node(CPU=1, fast=1)])
    with pytest.raises(ConfigError, match=r"cluster\.placement\.engine: no node .* has \{CPU: 1, fast: 1\}"):
        check_capacity("engine", wanted, [node(CPU=1), node(CPU=0.5, fast=1)])


def test_roles_elsewhere_get_what_the_config_names_and_no_more() -> None:
    run = config(
        cluster={"type": "ray", "env": ["MINE"]},
        store={"type": "postgres", "password_env": "PG_PASSWORD"},
        upstreams={"other": {"base_url": "http://x", "api_key_env": "OTHER_KEY"}},
    )
    names = ("PYTHONPATH", "CUDA_HOME", "MINE", "PG_PASSWORD", "OTHER_KEY", "HOME", "AWS_SECRET_ACCESS_KEY")
    here = {name: f"value of {name}" for name in names}
    passed = forwarded_env(run, here, frozenset({"OTHER_KEY"}))
    assert passed == {name: here[name] for name in sorted(names[:4])}


def test_roles_elsewhere_get_the_password_of_the_store() -> None:
    run = config(store={"type": "postgres", "url": "postgresql://u@h/db"})
    assert forwarded_env(run, {"PGPASSWORD": "x"}, frozenset()) == {"PGPASSWORD": "x"}


def test_an_order_does_not_print_its_keys() -> None:
    spec = RoleSpec(
        role="trainer", name="trainer", arguments=(), python=None, config="sk-1", folder=Path("/r"),
        driver_token="m", cwd=Path("/"), env={"K": "sk-2"}, exclude_env=frozenset(), listen=None,
        is_single_machine=False, driver_timeout=1,
    )  # fmt: skip
    assert "sk-" not in repr(spec)


async def test_metrics_of_other_nodes_are_brought_here_once(tmp_path: Path) -> None:
    there = {"b": b'{"n": 1}\n{"n": 2}\n{"n"', "c": b'{"m": 1}\n'}

    def reading(host: str) -> Any:
        async def read(offset: int) -> bytes:
            await asyncio.sleep(0)
            return there[host][offset:]

        return read

    async def both(copy: MetricsMirror) -> None:
        # Two roles of one node bring the same file.
        await asyncio.gather(*(copy.fetch(host, reading(host)) for host in ("b", "c", "b")))

    copy = MetricsMirror(tmp_path)
    await both(copy)
    there["b"] += b": 3}\n"
    await both(copy)
    await both(MetricsMirror(tmp_path))  # another driver, later
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert sorted(lines) == ['{"m": 1}', '{"n": 1}', '{"n": 2}', '{"n": 3}']


@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.0.1:1", "no Ray cluster answers"), ("ray://h:1", "a Ray client address")]
)
async def test_an_address_without_a_cluster_is_refused(address: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.address: .*{reason}"):
        await connect(address)
