"""Find a run's exported data by name or folder, pin its version and import it into the run's store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from instar.async_utils import run_in_daemon_thread
from instar.config import DataConfig, PostgresStoreConfig, RunConfig
from instar.config.data import DATASET_PREFIX
from instar.datasets.importing import import_for_training, verify_content
from instar.datasets.manifest import read_manifest
from instar.errors import ConfigError, DataError
from instar.store.base import DatasetRow, Store
from instar.store.factory import open_store
from instar.store.sqlite import SqliteStore

DATASET_INDEX_FILE = "datasets.db"


def open_dataset_index(config: RunConfig) -> Store:
    """Open the store with the dataset index: the PostgreSQL server, or a file next to the run folders."""
    if isinstance(config.store, PostgresStoreConfig):
        return open_store(config)
    return open_dataset_index_in(config.run_dir.absolute().parent)


def open_dataset_index_in(runs_folder: Path) -> Store:
    runs_folder.mkdir(parents=True, exist_ok=True)
    return SqliteStore(runs_folder / DATASET_INDEX_FILE)


async def pin_data(config: RunConfig, previous: Sequence[DataConfig] = ()) -> RunConfig:
    """Return the config with the version and content hash of all exported data filled in. A resumed run keeps
    those in ``previous``, the `data` of its saved config. Otherwise, datasets without a version get their
    newest one."""
    config = await _pin_reference(config)
    if not any(section.is_exported for section in config.data):
        return config
    previous_by_index = _match_previous(config.data, previous)
    rows = await _list_datasets(config)
    pinned: list[DataConfig] = []
    for index, section in enumerate(config.data):
        path = "data" if len(config.data) == 1 else f"data.{index}"
        pinned.append(
            _pin(section, previous_by_index.get(index), rows, path) if section.is_exported else section
        )
    _check_distinct(config.data, pinned)
    return config.model_copy(update={"data": pinned})


async def _pin_reference(config: RunConfig) -> RunConfig:
    replay = config.live.replay
    if replay.reference_data is None or config.reference_label is None:
        return config
    section = _pin(replay.reference_data, None, await _list_datasets(config), "live.replay.reference")
    pinned = replay.model_copy(update={"reference": section.source, "content": section.content})
    return config.model_copy(update={"live": config.live.model_copy(update={"replay": pinned})})


async def _list_datasets(config: RunConfig) -> list[DatasetRow]:
    if all(section.dataset is None for section in _list_exported(config)):
        return []
    is_shared = isinstance(config.store, PostgresStoreConfig)
    if not is_shared and not (config.run_dir.absolute().parent / DATASET_INDEX_FILE).is_file():
        return []  # opening the index would create the file
    index = open_dataset_index(config)
    try:
        return await index.datasets()
    finally:
        await index.close()


def _list_exported(config: RunConfig) -> list[DataConfig]:
    """Return the sections of the exported data that the run trains on or replays."""
    reference = config.live.replay.reference_data if config.reference_label is not None else None
    sections = [section for section in config.data if section.is_exported]
    return sections if reference is None else [*sections, reference]


def _match_previous(sections: Sequence[DataConfig], previous: Sequence[DataConfig]) -> dict[int, DataConfig]:
    """Map the index of each section to the section of ``previous`` that it continues: one with the same
    source or, for a dataset without a version, any version of that dataset. If several match, the one at the
    same index is used, or else the first."""
    matches: dict[int, DataConfig] = {}
    remaining = dict(enumerate(previous))
    matchers: tuple[Callable[[DataConfig, DataConfig], bool], ...] = (
        lambda section, earlier: section.source == earlier.source,
        lambda section, earlier: (
            earlier.dataset is not None and section.dataset == (earlier.dataset[0], None)
        ),
    )
    for is_match in matchers:
        for index, section in enumerate(sections):
            if index in matches:
                continue
            candidates = [other for other, earlier in remaining.items() if is_match(section, earlier)]
            if candidates:
                matches[index] = remaining.pop(index if index in candidates else candidates[0])
    return matches


def _check_distinct(sections: Sequence[DataConfig], pinned: Sequence[DataConfig]) -> None:
    """Raise ConfigError if two sections refer to the same data, whose groups would be claimed twice."""
    sources: dict[str, str] = {}
    for section, pinned_section in zip(sections, pinned, strict=True):
        if not pinned_section.is_exported:
            continue
        label = pinned_section.label
        if (other := sources.setdefault(label, section.source)) != section.source:
            raise ConfigError(
                f"data: {other!r} and {section.source!r} are the same data, {label}; list it once"
            )


def _pin(
    section: DataConfig, previous: DataConfig | None, rows: Sequence[DatasetRow], path: str
) -> DataConfig:
    if previous is not None:
        section = section.model_copy(update={"source": previous.source, "content": previous.content})
    row = _find_dataset(section, rows, path)
    try:
        content = read_manifest(Path(section.source if row is None else row.path)).hash
    except DataError as error:
        raise ConfigError(f"{path}.source: cannot use {section.source!r}: {error}") from error
    if section.content not in (None, content):
        remedy = f"set it to {content}" if previous is None else "start a new run with the current data"
        raise ConfigError(
            f"{path}.content: expected {section.content}, but {section.source!r} has {content}; restore the "
            f"data, or {remedy}"
        )
    source = section.source if row is None else f"{DATASET_PREFIX}{row.name}@{row.version}"
    return section.model_copy(update={"source": source, "content": content})


def _find_dataset(section: DataConfig, rows: Sequence[DatasetRow], path: str) -> DatasetRow | None:
    """Return the row of a named dataset, by default its newest version, or None if the source is a folder."""
    if section.dataset is None:
        return None
    name, version = section.dataset
    matches = [row for row in rows if row.name == name and version in (None, row.version)]
    if not matches:
        available = ", ".join(f"{row.name}@{row.version}" for row in rows) or "none"
        raise ConfigError(f"{path}.source: unknown dataset {section.source!r}. Available: {available}")
    return matches[-1]


async def import_data(store: Store, config: RunConfig, log: Callable[[str], None]) -> None:
    """Import the run's exported data into its store. Groups that were already imported are not changed.
    Raises DataError if the data has changed or cannot be trained on."""
    sections = _list_exported(config)
    rows = await _list_datasets(config) if sections else []
    for section in sections:
        row = _find_dataset(section, rows, "data")
        folder = Path(section.source if row is None else row.path)
        manifest = await run_in_daemon_thread(lambda: verify_content(folder))  # noqa: B023 - awaited
        if manifest.hash != section.content:
            raise DataError(
                f"{folder} has changed since the run started; restore the data with hash {section.content}"
            )
        imported = await import_for_training(
            store,
            folder,
            config.name,
            section.label,
            manifest,
            needs_logprobs=section in config.data and config.trainer.loss.name != "cross_entropy",
        )
        if not imported.groups and not imported.unchanged:
            raise DataError(f"{folder} has no finished groups to train on")
        log(f"data: {section.source}, {imported.groups + imported.unchanged} groups")
