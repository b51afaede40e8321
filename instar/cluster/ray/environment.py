"""The environment variables of the driver that roles on other nodes need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from instar.config import PostgresStoreConfig, RayClusterConfig, RunConfig

ALWAYS = ("PYTHONPATH", "CUDA_HOME", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE")


def forwarded_env(
    config: RunConfig, environment: Mapping[str, str], exclude: frozenset[str]
) -> dict[str, str]:
    """Return the variables that any role may need, that a setting refers to, or that `cluster.env` lists."""
    assert isinstance(config.cluster, RayClusterConfig)
    names = {*ALWAYS, *_variable_names(config.model_dump(mode="json")), *config.cluster.env}
    if isinstance(config.store, PostgresStoreConfig) and (
        password := config.store.password_env_name(environment)
    ):
        names.add(password)
    return {name: environment[name] for name in sorted(names - exclude) if name in environment}


def _variable_names(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of variables in settings such as `api_key_env`."""
    for key, value in settings.items():
        if key.endswith("_env") and isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _variable_names(cast(Mapping[str, Any], value))
        elif isinstance(value, list):
            for item in cast(list[Any], value):
                if isinstance(item, Mapping):
                    yield from _variable_names(cast(Mapping[str, Any], item))
