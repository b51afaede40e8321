"""Find the adapter in `model.adapter`, and copy it into the run's folder.

With the copy, the run does not depend on later changes to the source, such as another run that removes its
old checkpoints. A state on a training service stays there, and an engine exports a sampler from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from instar.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter_settings
from instar.backends.factory import check_adapter_source, get_known_capabilities
from instar.backends.folders import write_folder
from instar.cluster.layout import RunFolder
from instar.config import BackendConfig, CloudSection, PluginConfig, RunConfig, UpstreamEngineConfig
from instar.config.base import Section
from instar.config.model import RUN_PREFIX
from instar.errors import ConfigError
from instar.models import is_local, resolve_model
from instar.store.factory import open_store
from instar.trainer.checkpoint import (
    ADAPTER_FOLDER,
    BACKEND_FOLDER,
    checkpoint_path,
    initial_path,
    policy_path,
)
from instar.types import Artifact, Json, Policy, PolicyStage, PolicyState, StepState

S = TypeVar("S", bound=Section)

SETTINGS_FILE = "backend_settings.json"
"""The settings of the backend that fit the adapter, in the folder `initial_path`."""
CLOUD_SETTINGS = frozenset({"rank", "train_attn", "train_mlp", "train_unembed"})


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    source: str
    """The source of the adapter, for messages."""
    adapter: Path | None = None
    """The PEFT folder, or None if the weights are on a training service."""
    state: Path | None = None
    """The saved state of the backend, with the optimizer state, or None if there is none."""
    settings: Json = field(default_factory=dict[str, Any])
    """The settings of the backend that fit the adapter."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version of another run whose files still exist."""

    version: int
    is_default: bool
    """True if the version is committed and served, so that it is not a candidate, rejected or replaced."""
    adapter: Path | None
    state: Path | None


async def prepare_adapter(
    config: RunConfig, folder: RunFolder, *, resume: bool, log: Callable[[str], None]
) -> RunConfig:
    """Copy the adapter in `model.adapter`, if any, into the folder of a new run. Return the config with the
    settings of the backend that fit the adapter. Raises ConfigError if the adapter does not exist, does not
    fit the config, or is not the one that a resumed run started from."""
    config = _make_folder_absolute(config)
    adapter = config.model.adapter
    if resume and (previous := folder.read_config().model.adapter) != adapter:
        raise ConfigError(
            f"model.adapter: got {adapter!r}, but this run started from {previous!r}; restore the setting, "
            "or start a new run under a different `name`"
        )
    if adapter is None:
        return config
    _check_supported(config)
    target = initial_path(folder.path)
    if resume:
        return _apply_adapter(config, msgspec.json.decode((target / SETTINGS_FILE).read_bytes()))
    files = await _find_files(config)
    config = _apply_adapter(config, files.settings)
    _copy(files, target)
    optimizer = "with" if files.state is not None else "without"
    suffix = f", {optimizer} its optimizer state" if files.adapter or files.state else ""
    log(f"starting from the adapter {files.source}{suffix}")
    return config


async def check_adapter(config: RunConfig) -> None:
    """Raise ConfigError if the adapter in `model.adapter`, if any, does not exist or does not fit the config.
    A state on a training service is not checked."""
    if config.model.adapter is not None:
        _check_supported(config)
        files = await _find_files(config)
        _apply_adapter(config, files.settings)


def make_initial_policy(config: RunConfig) -> Policy | None:
    """Return version 0 of the policy if the run's folder contains its adapter, else None."""
    folder = initial_path(config.run_dir) / ADAPTER_FOLDER
    if config.model.adapter is None or not folder.is_dir():
        return None
    return Policy(config.name, 0, Artifact("adapter", str(folder.resolve())))


def _make_folder_absolute(config: RunConfig) -> RunConfig:
    if config.model.adapter is None or config.model.adapter_source != "folder":
        return config
    folder = str(Path(config.model.adapter).expanduser().absolute())
    return config.model_copy(update={"model": config.model.model_copy(update={"adapter": folder})})


def _check_supported(config: RunConfig) -> None:
    if isinstance(config.engine, UpstreamEngineConfig):
        raise ConfigError(
            f"model.adapter: got {config.model.adapter!r}, but a provider serves the model (engine.type: "
            "upstream); remove the setting, or use a different engine"
        )
    # The capabilities of a plugin are checked when it is created.
    if capabilities := get_known_capabilities(config.backend):
        check_adapter_source(config, capabilities)


async def _find_files(config: RunConfig) -> AdapterFiles:
    adapter = cast(str, config.model.adapter)
    if config.model.adapter_source == "folder":
        return AdapterFiles(adapter, Path(adapter), settings=_read_settings(Path(adapter), config))
    if config.model.adapter_source != "run":
        return AdapterFiles(adapter)
    files = await _find_version(config, adapter.removeprefix(RUN_PREFIX))
    capabilities = get_known_capabilities(config.backend)
    if files.state is None and capabilities and "folder" not in capabilities.adapter_sources:
        raise ConfigError(
            f"model.adapter: {files.source} has no training state of the {config.backend.type} backend, "
            "which cannot start from an adapter alone; use a version with such a state, or `local`"
        )
    return files


def _copy(files: AdapterFiles, target: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / SETTINGS_FILE).write_bytes(msgspec.json.encode(files.settings))
        if files.adapter is not None:
            (folder / ADAPTER_FOLDER).mkdir()
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copyfile(files.adapter / name, folder / ADAPTER_FOLDER / name)
        if files.state is not None:
            shutil.copytree(files.state, folder / BACKEND_FOLDER, copy_function=shutil.copyfile)

    try:
        write_folder(target, fill)
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"model.adapter: {files.source} cannot be copied to {target}: {error}") from error


# --- versions of other runs ---


async def _find_version(config: RunConfig, reference: str) -> AdapterFiles:
    """Return the files of the version that the reference, NAME or NAME@VERSION, names."""
    name, _, suffix = reference.rpartition("@")
    requested = int(suffix) if name and suffix.isdigit() else None
    folder, agent_id = _find_run(config, reference if requested is None else name)
    source = folder.read_config()
    _check_source_backend(config, source)
    policy_id = _choose_source_policy(source, agent_id)
    versions = await _list_versions(source, policy_id)
    defaults = [version for version in versions if version.is_default]
    if requested is not None:
        chosen = next((version for version in versions if version.version == requested), None)
    else:
        chosen = defaults[-1] if defaults else None
    if chosen is None:
        available = ", ".join(str(version.version) for version in versions) or "none"
        missing = "a committed version that is served" if requested is None else f"version {requested}"
        raise ConfigError(
            f"model.adapter: {policy_id} has no files of {missing}, because it was never published or its "
            f"files were removed (trainer.keep_checkpoints); available versions: {available}"
        )
    state = chosen.state if _get_name(source.backend) == _get_name(config.backend) else None
    if chosen.adapter is not None:
        settings = _read_settings(chosen.adapter, config)
    else:
        settings = source.backend.model_dump(include=set(CLOUD_SETTINGS))
    return AdapterFiles(f"{RUN_PREFIX}{policy_id}@{chosen.version}", chosen.adapter, state, settings)


def _find_run(config: RunConfig, name: str) -> tuple[RunFolder, str | None]:
    """Return the folder of a run, and the agent in a name of the form RUN/AGENT. The name of a run without a
    slash is that of a folder next to this run's folder, or in `runs`."""
    parents = [config.run_dir.absolute().parent, Path("runs").absolute()]
    run_name, separator, agent_id = name.partition("/")
    folders: list[tuple[Path, str | None]] = []
    if separator:
        path = Path(name).expanduser()
        folders = [(path, None), (path.parent, path.name)]
    if run_name:  # empty for an absolute path
        folders += [(parent / run_name, agent_id or None) for parent in parents]
    for path, agent in folders:
        folder = RunFolder(path)
        if folder.config_file.is_file():
            return folder, agent
    names = sorted({file.parent.name for parent in parents for file in parent.glob("*/config.json")})
    searched = " or ".join(dict.fromkeys(str(path) for path, _ in folders))
    raise ConfigError(f"model.adapter: there is no run in {searched}; runs: {', '.join(names) or 'none'}")


def _check_source_backend(config: RunConfig, source: RunConfig) -> None:
    backend, source_backend = config.backend, source.backend
    if getattr(source_backend, "lora", ...) is None:
        raise ConfigError(
            f"model.adapter: {source.name} trained all weights (backend.lora: null), so it has no adapter; "
            f"set model.name to one of the folders in {source.run_dir / 'policies'} instead"
        )
    is_cloud = isinstance(backend, CloudSection) or isinstance(source_backend, CloudSection)
    if is_cloud and backend.type != source_backend.type:
        raise ConfigError(
            f"model.adapter: {source.name} was trained by the {source_backend.type} backend, but this run "
            f"uses {backend.type}; set backend.type to {source_backend.type}"
        )
    if isinstance(backend, CloudSection) and isinstance(source_backend, CloudSection):
        base_model = backend.base_model or config.model.name
        source_base_model = source_backend.base_model or source.model.name
        if base_model != source_base_model:
            raise ConfigError(
                f"model.adapter: {source.name} was trained on {source_base_model!r}, but this run trains "
                f"{base_model!r}"
            )


def _get_name(backend: BackendConfig) -> str:
    return backend.name if isinstance(backend, PluginConfig) else backend.type


def _choose_source_policy(source: RunConfig, agent_id: str | None) -> str:
    if agent_id is not None and agent_id not in source.trained_agents:
        available = ", ".join(source.trained_agents) or "none"
        raise ConfigError(
            f"model.adapter: the run {source.name} has no policy of the agent {agent_id!r}; agents with a "
            f"policy: {available}"
        )
    if agent_id is None and len(source.policy_ids) > 1:
        examples = " or ".join(f"{RUN_PREFIX}{policy_id}" for policy_id in source.policy_ids)
        raise ConfigError(
            f"model.adapter: the run {source.name} has a policy for each learning agent; choose {examples}"
        )
    return source.policy_id if agent_id is None else source.get_policy_id(agent_id)


async def _list_versions(source: RunConfig, policy_id: str) -> Sequence[StoredVersion]:
    """Return the versions of the policy that can still be loaded, oldest first."""
    store = open_store(source, read_only=True)
    try:
        if policy_id != source.name and await store.steps(source.name):
            policy_id = source.name  # an earlier version of Instar trained one policy for all agents
        rows = await store.policy_versions(policy_id)
        steps = await store.steps(policy_id)
    finally:
        await store.close()
    committed_steps = {0, *(step.step for step in steps if step.state is StepState.COMMITTED)}
    versions: list[StoredVersion] = []
    for row in rows:
        adapter, state = _locate_files(source, row.policy, row.step)
        files = (adapter if adapter.is_dir() else None, state if state.is_dir() else None)
        if row.state is PolicyState.PUBLISHED and files[row.policy.artifact.kind == "remote"] is not None:
            is_default = row.stage is PolicyStage.SERVING and row.step in committed_steps
            versions.append(StoredVersion(row.policy.version, is_default, *files))
    return versions


def _locate_files(source: RunConfig, policy: Policy, step: int) -> tuple[Path, Path]:
    """Return the folders of a version's adapter and state, which may not exist. Only the name of the recorded
    path is used, because the run may have been moved. A rollback has the files of an earlier version."""
    name = Path(policy.artifact.path).name if policy.artifact.kind in ("adapter", "weights") else ""
    if policy.version == 0 or name == ADAPTER_FOLDER:
        initial = initial_path(source.run_dir)
        return initial / ADAPTER_FOLDER, initial / BACKEND_FOLDER
    folder = source.get_policy_dir(policy.policy_id)
    published = policy_path(folder, policy.version)
    return published.with_name(name or published.name), checkpoint_path(folder, step) / BACKEND_FOLDER


# --- settings of the backend ---


def _read_settings(folder: Path, config: RunConfig) -> Json:
    """Return the settings of a torch backend that fit the adapter in the folder. Raises ConfigError if the
    adapter cannot be loaded or was trained on another model."""
    try:
        adapter = read_adapter_settings(folder)
    except ValueError as error:
        raise ConfigError(f"model.adapter: {error}") from error
    if not isinstance(adapter.targets, list):
        raise ConfigError(
            f"model.adapter: target_modules in {folder / CONFIG_FILE} is the pattern {adapter.targets!r}; "
            "replace it with the list of the adapted modules"
        )
    if not _is_same_model(config.model.name, adapter.base_model):
        raise ConfigError(
            f"model.name: got {config.model.name!r}, but the adapter in {folder} was trained on "
            f"{adapter.base_model!r}; set model.name to that model"
        )
    if isinstance(config.backend, PluginConfig):
        return {}
    return {"lora": {"rank": adapter.rank, "alpha": adapter.alpha, "targets": adapter.targets}}


def _is_same_model(name: str, other_name: str) -> bool:
    """Return True if both may name the same model. The folder of a model differs between machines, so folders
    are compared by name."""
    if not other_name or _get_short_name(name) == _get_short_name(other_name):
        return True
    return is_local(name) and str(resolve_model(name)) == other_name


def _get_short_name(name: str) -> str:
    """Return the last part of a model's id or folder. A folder of the Hugging Face cache has the model's id
    in an earlier part: `models--Qwen--Qwen3-0.6B/snapshots/…`."""
    parts = Path(name).parts
    cached = next((part for part in parts if part.startswith("models--")), None)
    return (cached.rpartition("--")[2] if cached else parts[-1]).lower()


def _apply_adapter(config: RunConfig, settings: Json) -> RunConfig:
    """Return the config with the settings of the backend that fit the adapter."""
    backend = _apply_settings(config.backend, settings, "backend", cast(str, config.model.adapter))
    return config.model_copy(update={"backend": backend})


def _apply_settings(section: S, settings: Json, path: str, source: str) -> S:
    """Return the section with the adapter's settings. Raises ConfigError if the user set another value."""
    changes: Json = {}
    for name, value in settings.items():
        current = getattr(section, name)
        if isinstance(value, dict):
            changes[name] = _apply_settings(current, cast(Json, value), f"{path}.{name}", source)
        elif name not in section.model_fields_set:
            changes[name] = value
        elif not _is_equal_setting(current, value):
            raise ConfigError(
                f"{path}.{name}: got {current!r}, but {source} has {value!r}; remove the setting, which is "
                "then taken from the adapter"
            )
    return section.model_copy(update=changes)


def _is_equal_setting(value: Any, adapter_value: Any) -> bool:
    if value == "all-linear":  # the backend compares the modules when it loads the adapter
        return True
    return sorted(value) == sorted(adapter_value) if isinstance(value, list) else value == adapter_value
