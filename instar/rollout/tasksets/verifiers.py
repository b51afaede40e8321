"""Environments of `verifiers`: a task is a row of the environment's dataset, on which
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
from instar.rollout.tasks import TaskSet
from instar.rollout.tasksets.optional_packages import import_package
from instar.types import Json, Task

TAKEN = (signal.SIGINT, signal.SIGTERM)
"""Signals whose handlers an environment replaces by its own."""


def verifiers_tasks(config: VerifiersTasksConfig) -> TaskSet:
    environment = load_environment(config.environment, config.args)
    limit = config.limit or -1
    try:
        made = environment.get_dataset if config.split == "train" else environment.get_eval_dataset
        rows: list[Json] = made(limit).to_list()
    except ValueError as error:
        raise ConfigError(f"tasks.environment: {config.environment} has no dataset: {error}") from error
    named: Json = {"environment": config.environment, "args": config.args}
    return TaskSet(
        [Task(f"{config.split}-{number}", {**named, "input": _plain(row)}) for number, row in enumerate(rows)]
    )


def load_environment(name: str, args: Json) -> Any:
    """Made once for all sessions. Raises ConfigError where there is none, or one that cannot be run here."""
    return _load(name, msgspec.json.encode(args))


@lru_cache
def _load(name: str, args: bytes) -> Any:
    verifiers = import_package("verifiers", "verifiers")
    settings: Json = msgspec.json.decode(args)
    try:
        with _preserve_signal_handlers():
            if ":" in name:
                environment = registry.load_object(name)(**settings)
            else:
                environment = verifiers.load_environment(name, **settings)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"tasks.environment: cannot load {name!r}: {error}") from error
    if not isinstance(environment, verifiers.Environment):
        raise ConfigError(f"tasks.environment: {name} made {type(environment).__name__}, no environment")
    if environment.requires_group_rollouts:
        raise ConfigError(f"tasks.environment: {name} scores whole groups, and here a session is run alone")
    return environment


@contextmanager
def _preserve_signal_handlers() -> Generator[None]:
    """An environment takes over Ctrl-C and the end of the process; they stay the run's."""
    handlers = {number: signal.getsignal(number) for number in TAKEN}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _plain(row: Json) -> Json:
    return msgspec.json.decode(msgspec.json.encode(row, enc_hook=str))
