"""Tests for the parts of Ray runs that need no cluster: placement, environment, metrics and addresses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from instar.cluster.ray.connect import connect
from instar.cluster.ray.host import MetricsMirror, RoleSpec, forwarded_env
from instar.cluster.ray.placement import ClusterNode, check_capacity, parse_nodes, plan_placement
from instar.config import PlacementConfig, RunConfig
from instar.errors import ConfigError


def make_config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"cluster": {"type": "ray"}, **sections})


def make_node(**resources: float) -> ClusterNode:
    return ClusterNode("id", "10.0.0.1", resources)


def plan_cpus_and_gpus(role: str, config: RunConfig, *nodes: ClusterNode) -> tuple[float, float]:
    placement = plan_placement(role, config, nodes)
    return placement.cpus, placement.gpus


def test_parse_nodes_skips_dead_nodes() -> None:
    nodes = [
        {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 4.0}},
        {"NodeID": "b", "NodeManagerAddress": "10.0.0.2", "Alive": False, "Resources": {}},
    ]
    assert parse_nodes(nodes) == [ClusterNode("a", "10.0.0.1", {"CPU": 4.0})]


def test_placement_follows_the_config() -> None:
    placement = {"engine": {"cpus": 3, "gpus": 2, "resources": {"big": 1}}}
    config = make_config(cluster={"type": "ray", "placement": placement})
    assert plan_placement("engine", config, [make_node(CPU=64, GPU=8)]).resources == {"big": 1}
    assert plan_cpus_and_gpus("engine", config, make_node(CPU=64, GPU=8)) == (3, 2)


def test_placement_with_enough_resources_gives_a_core_and_a_gpu() -> None:
    config = make_config(engine={"type": "local", "count": 2})
    large_nodes = [make_node(CPU=32, GPU=2), make_node(CPU=32, GPU=2)]
    assert plan_cpus_and_gpus("engine", config, *large_nodes) == (1, 1)
    assert plan_cpus_and_gpus("trainer", config, *large_nodes) == (1, 1)
    assert plan_cpus_and_gpus("gateway", config, *large_nodes) == (1, 0)


def test_placement_with_scarce_resources_shares_them() -> None:
    config = make_config(engine={"type": "vllm", "count": 1})
    assert plan_cpus_and_gpus("engine", config, make_node(CPU=2, GPU=1)) == (0.25, 0.5)
    assert plan_cpus_and_gpus("trainer", config, make_node(CPU=2, GPU=1)) == (0.25, 0.5)
    assert plan_cpus_and_gpus("engine", config, make_node(CPU=2)) == (0.25, 0)


def test_placement_with_tensor_parallel_gives_one_gpu_per_shard() -> None:
    config = make_config(engine={"type": "vllm", "tensor_parallel": 4})
    assert plan_cpus_and_gpus("engine", config, make_node(CPU=64, GPU=8)) == (1, 4)


def test_check_capacity_without_a_fitting_node_names_the_setting() -> None:
    placement = PlacementConfig(cpus=1, resources={"fast": 1})
    check_capacity("engine", placement, [make_node(CPU=1), make_node(CPU=1, fast=1)])
    with pytest.raises(ConfigError, match=r"cluster\.placement\.engine: no node has CPU: 1, fast: 1"):
        check_capacity("engine", placement, [make_node(CPU=1), make_node(CPU=0.5, fast=1)])


def test_forwarded_env_contains_only_configured_variables() -> None:
    config = make_config(
        cluster={"type": "ray", "env": ["MINE"]},
        store={"type": "postgres", "password_env": "PG_PASSWORD"},
        upstreams={"other": {"base_url": "http://x", "api_key_env": "OTHER_KEY"}},
    )
    names = ("PYTHONPATH", "CUDA_HOME", "MINE", "PG_PASSWORD", "OTHER_KEY", "HOME", "AWS_SECRET_ACCESS_KEY")
    environment = {name: f"value of {name}" for name in names}
    forwarded = forwarded_env(config, environment, frozenset({"OTHER_KEY"}))
    assert forwarded == {name: environment[name] for name in sorted(names[:4])}


def test_forwarded_env_contains_the_store_password() -> None:
    config = make_config(store={"type": "postgres", "url": "postgresql://u@h/db"})
    assert forwarded_env(config, {"PGPASSWORD": "x"}, frozenset()) == {"PGPASSWORD": "x"}


def test_role_spec_repr_hides_secrets() -> None:
    spec = RoleSpec(
        role="trainer", name="trainer", arguments=(), python=None, config="sk-1", folder=Path("/r"),
        driver_token="m", cwd=Path("/"), env={"K": "sk-2"}, exclude_env=frozenset(), listen=None,
        is_single_machine=False, driver_timeout=1,
    )  # fmt: skip
    assert "sk-" not in repr(spec)


async def test_metrics_mirror_copies_each_line_once(tmp_path: Path) -> None:
    remote_files = {"b": b'{"n": 1}\n{"n": 2}\n{"n"', "c": b'{"m": 1}\n'}

    def make_reader(host: str) -> Any:
        async def read(offset: int) -> bytes:
            await asyncio.sleep(0)
            return remote_files[host][offset:]

        return read

    async def fetch_all(mirror: MetricsMirror) -> None:
        # Two roles on one node write to the same file.
        await asyncio.gather(*(mirror.fetch(host, make_reader(host)) for host in ("b", "c", "b")))

    mirror = MetricsMirror(tmp_path)
    await fetch_all(mirror)
    remote_files["b"] += b": 3}\n"
    await fetch_all(mirror)
    await fetch_all(MetricsMirror(tmp_path))  # a restarted driver
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert sorted(lines) == ['{"m": 1}', '{"n": 1}', '{"n": 2}', '{"n": 3}']


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.1:1", "cannot reach a Ray cluster"), ("ray://h:1", "a Ray client address")],
)
async def test_connect_to_an_unusable_address_is_rejected(address: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.address: .*{reason}"):
        await connect(address)
