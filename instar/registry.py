"""Maps the names of engines, backends and other components to classes and functions, and imports them on use.

Other packages add components with an entry point in the group ``instar.<kind>`` (``instar.engines``,
``instar.backends``, ...); a config selects them with ``type: plugin``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from instar.config import PluginConfig, Section
from instar.errors import ConfigError

BUILTIN: dict[str, dict[str, str]] = {
    "stores": {
        "sqlite": "instar.store.sqlite:SqliteStore",
        "postgres": "instar.store.postgres:PostgresStore",
    },
    "engines": {
        "local": "instar.engines.local.engine:LocalEngine",
        "scripted": "instar.engines.scripted:ScriptedEngine",
        "vllm": "instar.engines.vllm.engine:VllmEngine",
    },
    "backends": {
        "local": "instar.backends.local.backend:LocalBackend",
        "tinker": "instar.backends.tinker:TinkerBackend",
        "mint": "instar.backends.tinker:MintBackend",
        "weaver": "instar.backends.weaver:WeaverBackend",
        "verl": "instar.backends.verl.backend:VerlBackend",
    },
    "samplers": {
        "tinker": "instar.engines.cloud.tinker:TinkerSampler",
        "mint": "instar.engines.cloud.tinker:MintSampler",
        "weaver": "instar.engines.cloud.weaver:WeaverSampler",
    },
    "tasks": {
        "jsonl": "instar.rollout.tasks:jsonl_tasks",
        "python": "instar.rollout.tasks:python_tasks",
        "reasoning_gym": "instar.rollout.tasksets.reasoning_gym:reasoning_gym_tasks",
        "gsm8k": "instar.rollout.tasksets.gsm8k:gsm8k_tasks",
        "textarena": "instar.rollout.tasksets.textarena:textarena_tasks",
        "verifiers": "instar.rollout.tasksets.verifiers:verifiers_tasks",
        "humaneval": "instar.rollout.tasksets.humaneval:humaneval_tasks",
        "bfcl": "instar.rollout.tasksets.bfcl:bfcl_tasks",
    },
    "agents": {
        "function": "instar.rollout.agents:FunctionAgent",
        "command": "instar.rollout.agents:CommandAgent",
    },
    "rewards": {
        "agent": "instar.rewards.user_scorers:AgentReward",
        "rule": "instar.rewards.user_scorers:RuleReward",
        "judge": "instar.rewards.judge.judges:create_judge",
        "exact": "instar.rewards.rules.answer_rules:ExactReward",
        "numeric": "instar.rewards.rules.answer_rules:NumericReward",
        "math": "instar.rewards.rules.answer_rules:MathReward",
        "json_schema": "instar.rewards.rules.answer_rules:JsonSchemaReward",
        "regex": "instar.rewards.rules.answer_rules:RegexReward",
        "command": "instar.rewards.rules.sandbox_rules:CommandReward",
        "tests": "instar.rewards.rules.sandbox_rules:TestsReward",
    },
    "dialects": {
        "chat": "instar.gateway.dialects.chat:ChatDialect",
        "completions": "instar.gateway.dialects.completions:CompletionsDialect",
        "messages": "instar.gateway.dialects.messages:MessagesDialect",
        "responses": "instar.gateway.dialects.responses:ResponsesDialect",
        "tokens": "instar.gateway.dialects.tokens:TokensDialect",
    },
}


def list_names(kind: str) -> list[str]:
    """Return the names of all components of a kind, including those from other packages."""
    return sorted({*BUILTIN[kind], *(e.name for e in entry_points(group=f"instar.{kind}"))})


def resolve(kind: str, name: str) -> Any:
    """Import and return a component's class or function. Raise ConfigError if the name is unknown."""
    if target := BUILTIN[kind].get(name):
        return load_object(target)
    for entry in entry_points(group=f"instar.{kind}", name=name):
        return entry.load()
    raise ConfigError(f"unknown {kind.removesuffix('s')} {name!r}; available: {', '.join(list_names(kind))}")


def resolve_section(kind: str, section: Section) -> Any:
    """Return the class or function for a config section: by ``name`` for plugins, otherwise by ``type``."""
    if not isinstance(section, PluginConfig):
        return resolve(kind, getattr(section, "type"))  # noqa: B009 - every such section has a type
    return load_object(section.name) if ":" in section.name else resolve(kind, section.name)


def load_object(path: str) -> Any:
    """Import and return the object at ``package.module:attribute``. Raise ConfigError if this fails."""
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise ConfigError(f"{path!r} is not of the form 'package.module:attribute'")
    try:
        value: Any = import_module(module_name)
    except Exception as error:  # the imported module may raise anything
        raise ConfigError(
            f"cannot import {module_name!r} (from {path!r}): {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{module_name!r} has no attribute {attribute!r} (from {path!r})")
        value = getattr(value, part)
    return value
