"""The exported data that a run trains on: found by name, held to what it was, and brought into its store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from instar.config import DataConfig, PostgresStoreConfig, RunConfig
from instar.config.data import DATASET_PREFIX
from instar.datasets.importing import verify_content
from instar.datasets.manifest import read_manifest
from instar.datasets.training_import import import_for_training
from instar.errors import ConfigError, DataError
from instar.store.base import DatasetRow, Store
from instar.store.factory import open_store
from instar.store.sqlite import SqliteStore

DATASET_INDEX_FILE = "datasets.db"


def open_dataset_index(config: RunConfig) -> Store:
    """What knows datasets by name: the server that runs share, or a file beside their folders."""
    if isinstance(config.store, PostgresStoreConfig):
        return open_store(config)
    return open_dataset_index_in(config.run_dir.absolute().parent)


def open_dataset_index_in(runs: Path) -> Store:
    runs.mkdir(parents=True, exist_ok=True)
    return SqliteStore(runs / DATASET_INDEX_FILE)


async def pin_data(config: RunConfig, before: Sequence[DataConfig] = ()) -> RunConfig:
    """The run with each of its datasets held to one version and one content: that of ``before``, where the
    run had begun, or what is there now."""
    if all(each.is_live for each in config.data):
        return config
    known = _paired(config.data, before)
    rows = await _known(config)
    pinned: list[DataConfig] = []
    for place, each in enumerate(config.data):
        path = "data" if len(config.data) == 1 else f"data.{place}"
        pinned.append(each if each.is_live else _pin(each, known.get(place), rows, path))
    _check_distinct(config.data, pinned)
    return config.model_copy(update={"data": pinned})


async def _known(config: RunConfig) -> list[DatasetRow]:
    """The datasets with names; asking makes no file."""
    if all(each.dataset is None for each in config.data):
        return []
    shared = isinstance(config.store, PostgresStoreConfig)
    if not shared and not (config.run_dir.absolute().parent / DATASET_INDEX_FILE).is_file():
        return []
    names = open_dataset_index(config)
    try:
        return await names.datasets()
    finally:
        await names.close()


def _paired(asked: Sequence[DataConfig], before: Sequence[DataConfig]) -> dict[int, DataConfig]:
    """By place, what each was when the run began: the same source, or the version that a name alone came to.
    Where several versions of it are there, the one in the same place."""
    found: dict[int, DataConfig] = {}
    left = dict(enumerate(before))
    for is_same in (_is_source, _is_version):
        for place, section in enumerate(asked):
            there = [at for at, each in left.items() if place not in found and is_same(section, each)]
            if there:
                found[place] = left.pop(place if place in there else there[0])
    return found


def _is_source(section: DataConfig, before: DataConfig) -> bool:
    return section.source == before.source


def _is_version(section: DataConfig, before: DataConfig) -> bool:
    return before.dataset is not None and section.dataset == (before.dataset[0], None)


def _check_distinct(asked: Sequence[DataConfig], pinned: Sequence[DataConfig]) -> None:
    """Groups are known by the label: under one label, a step would claim the same ones twice."""
    held: dict[str, str] = {}
    for section, each in zip(asked, pinned, strict=True):
        if each.is_live:
            continue
        if (other := held.setdefault(each.label, section.source)) != section.source:
            raise ConfigError(
                f"data: {other!r} and {section.source!r} are the same data, {each.label}; give it one share"
            )


def _pin(section: DataConfig, before: DataConfig | None, rows: Sequence[DatasetRow], path: str) -> DataConfig:
    if before is not None:
        section = section.model_copy(update={"source": before.source, "content": before.content})
    row = _named(section, rows, path)
    try:
        found = read_manifest(dataset_folder(section, row)).hash
    except DataError as error:
        raise ConfigError(f"{path}.source: given {section.source!r}; {error}") from error
    if section.content not in (None, found):
        raise ConfigError(f"{path}.content: given {section.content}; what is there now is {found}")
    source = section.source if row is None else f"{DATASET_PREFIX}{row.name}@{row.version}"
    return section.model_copy(update={"source": source, "content": found})


def _named(section: DataConfig, rows: Sequence[DatasetRow], path: str) -> DatasetRow | None:
    """By name and version, by default the newest; None for what is found by its folder."""
    if section.dataset is None:
        return None
    name, version = section.dataset
    found = [row for row in rows if row.name == name and version in (None, row.version)]
    if not found:
        known = ", ".join(f"{row.name}@{row.version}" for row in rows) or "none"
        raise ConfigError(
            f"{path}.source: given {section.source!r}; there is no such dataset. Known: {known}"
        )
    return found[-1]


def dataset_folder(section: DataConfig, row: DatasetRow | None) -> Path:
    return Path(section.source if row is None else row.path)


async def import_data(store: Store, config: RunConfig, log: Callable[[str], None]) -> None:
    """Into the run's store. What is there already, from before a restart, is left alone."""
    if all(each.is_live for each in config.data):
        return
    rows = await _known(config)
    for place, section in enumerate(config.data):
        if section.is_live:
            continue
        folder = dataset_folder(section, _named(section, rows, f"data.{place}"))
        manifest = await asyncio.to_thread(verify_content, folder)
        if manifest.hash != section.content:
            raise DataError(f"{folder} is no longer what the run began with: {section.content}")
        brought = await import_for_training(
            store,
            folder,
            config.name,
            section.label,
            manifest,
            needs_logprobs=config.trainer.loss.name != "cross_entropy",
        )
        if not brought.groups and not brought.unchanged:
            raise DataError(f"{folder} has no finished group to train on")
        log(f"data: {section.source}, {brought.groups + brought.unchanged} groups")
