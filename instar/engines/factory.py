"""Create a run's engine, and clients for engines in other processes."""

from __future__ import annotations

from collections.abc import Sequence

from instar.config import (
    CloudEngineConfig,
    LocalClusterConfig,
    LocalEngineConfig,
    RunConfig,
    VllmEngineConfig,
)
from instar.engines.base import Engine
from instar.engines.pool import EnginePool, PolicySource
from instar.engines.remote import RemoteEngine
from instar.registry import resolve_section
from instar.types import Json


def create_engine(config: RunConfig) -> Engine:
    """Create the engine. The caller must call ``start``."""
    if isinstance(config.engine, CloudEngineConfig):
        return resolve_section("samplers", config.backend)(config.model, config.backend, config.engine)
    section = config.engine
    if isinstance(section, VllmEngineConfig):
        section = resolve_vllm_config(section, config)
    elif isinstance(section, LocalEngineConfig) and section.deterministic is None:
        from instar.engines.local.determinism import is_supported  # imports transformers

        is_deterministic = config.trainer.mode == "sync" and is_supported(config.model)
        section = section.model_copy(update={"deterministic": is_deterministic})
    return resolve_section("engines", section)(config.model, section)


def resolve_vllm_config(section: VllmEngineConfig, config: RunConfig) -> VllmEngineConfig:
    """Fill in unset and `auto` settings that follow from the rest of the run's config."""
    changes: Json = {}
    lora = getattr(config.backend, "lora", None)
    if section.policy == "auto" and config.trains_on_live:
        changes["policy"] = "adapter"
    elif section.policy == "auto" and (lora is None or config.sync.route not in ("auto", "files")):
        changes["policy"] = "merged"
    if section.lora_rank is None and lora is not None:
        changes["lora_rank"] = lora.rank
    if section.gpu_memory is None:
        is_trainer_local = isinstance(config.cluster, LocalClusterConfig) and config.trains
        changes["gpu_memory"] = 0.4 if is_trainer_local else 0.9
    return section.model_copy(update=changes)


async def connect_engines(
    urls: Sequence[str],
    token: str | None = None,
    *,
    timeout: float = 60.0,
    newest_policy: PolicySource | None = None,
) -> Engine:
    """Wait until an engine responds, and return an engine that distributes requests over all of them.
    Raises EngineUnavailable after ``timeout`` seconds, and ConfigError if the engines serve different models.
    ``newest_policy`` is passed to `EnginePool`, and is not used if there is only one engine."""
    if len(urls) == 1:
        return await RemoteEngine.connect(urls[0], token, timeout)
    pool = EnginePool([RemoteEngine(url, token) for url in urls], newest_policy=newest_policy)
    try:
        await pool.connect(timeout)
    except BaseException:  # including cancellation: no one else can close the pool
        await pool.close()
        raise
    return pool
