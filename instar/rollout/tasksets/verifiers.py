"""Tasks from `verifiers` environments. A task is a row of the environment's dataset, on which the agent
`instar.agents.verifiers:run` runs the environment."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import msgspec

from instar import registry
from instar.config import VerifiersTasksConfig
from instar.errors import ConfigError
from instar.rollout.tasks import TaskSet, import_package, to_json
from instar.types import Json, Task

REPLACED_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def verifiers_tasks(config: VerifiersTasksConfig) -> TaskSet:
    environment = load_environment(config.environment, config.args)
    limit = config.limit or -1
    try:
        load_dataset = environment.get_dataset if config.split == "train" else environment.get_eval_dataset
        rows: list[Json] = load_dataset(limit).to_list()
    except ValueError as error:
        raise ConfigError(
            f"tasks.split: cannot load the {config.split!r} split of {config.environment}: {error}"
        ) from error
    common: Json = {"environment": config.environment, "args": config.args}
    data = [{**common, "input": to_json(row)} for row in rows]
    return TaskSet([Task(f"{config.split}-{number}", record) for number, record in enumerate(data)])


def load_environment(name: str, args: Json) -> Any:
    """Return the shared environment. Raises ConfigError if it cannot be loaded or requires group rollouts."""
    return _load_cached(name, msgspec.json.encode(args))


@lru_cache
def _load_cached(name: str, args_json: bytes) -> Any:
    verifiers = import_package("verifiers", "verifiers")
    settings: Json = msgspec.json.decode(args_json)
    try:
        with _preserve_signal_handlers():
            if ":" in name:
                environment = registry.load_object(name)(**settings)
            else:
                environment = verifiers.load_environment(name, **settings)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"tasks.environment: cannot load {name!r}: {error}") from error
    if not isinstance(environment, verifiers.Environment):
        raise ConfigError(
            f"tasks.environment: {name} must return an environment, not {type(environment).__name__}"
        )
    if environment.requires_group_rollouts:
        raise ConfigError(
            f"tasks.environment: {name} requires group rollouts, which are not supported; choose an "
            "environment that scores each rollout separately"
        )
    return environment


@contextmanager
def _preserve_signal_handlers() -> Generator[None]:
    """Restore the run's signal handlers after the block, because loading an environment replaces them."""
    handlers = {signum: signal.getsignal(signum) for signum in REPLACED_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
