"""`instar sessions export` and `import`, and `instar datasets`."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from instar.cli.run_store import store_of
from instar.cluster.data import DATASET_INDEX_FILE, open_dataset_index, open_dataset_index_in
from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.data.linearize import linearize
from instar.datasets import export as exporting
from instar.datasets.bring_in import bring_back, check_content
from instar.datasets.export import Views, Wanted, check_target
from instar.datasets.manifest import WHOLE, Manifest
from instar.errors import ConfigError
from instar.store.base import DatasetRow, Run, Store
from instar.types import Json

RUNS = Path("runs")
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


# --- out and in ---------------------------------------------------------------------------------


def run_export(run_dir: Path, to: Path | None, wanted: Wanted, *, name: str | None, as_json: bool) -> None:
    if to is None and name is None:
        raise ConfigError("--to: say which folder to write to, or give the data a name with --as")
    if name is not None:
        _check_name(name)
        if wanted.format not in WHOLE:
            raise ConfigError(f"--as: {wanted.format} cannot be trained on here; use {', '.join(WHOLE)}")
    if to is not None:
        check_target(to)
    asyncio.run(_export(run_dir.absolute(), to and to.absolute(), wanted, name, as_json))


async def _export(run_dir: Path, to: Path | None, wanted: Wanted, name: str | None, as_json: bool) -> None:
    async with store_of(run_dir, read_only=True) as (config, store):
        kind = config.store.type
        combine = RewardCombiner(config)
        # Data without logprobs can be trained on too.
        samples = partial(linearize, requires_logprobs=False)
        views = Views(samples, lambda record: combine(record.rewards, record.scores))
        kept = run_dir.parent / "datasets"
        with _bar("exporting", as_json) as progress, _place(to, kept) as folder:
            manifest = await exporting.export(
                store, config.name, folder, wanted, views, store_kind=kind, progress=progress
            )
            if to is None:
                to = _keep(folder, kept / _folder_name(name, manifest, wanted))
        row = None
        if name is not None:
            async with _names_of(config) as names:
                row = await names.put_dataset(name, str(to), manifest.hash, asdict(manifest))
    _tell_export(to, manifest, row, as_json)


@contextmanager
def _place(to: Path | None, kept: Path) -> Generator[Path]:
    """Where to write: data that is known by name alone gets a folder named after its content, later."""
    if to is not None:
        yield to
        return
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept, prefix=".export-") as folder:
        yield Path(folder) / "data"


def _folder_name(name: str | None, manifest: Manifest, wanted: Wanted) -> str:
    """The hash is of the rows alone, so that the files are named as well."""
    samples = "-samples" if wanted.samples else ""
    return f"{name}-{manifest.hash[7:19]}-{wanted.format}{samples}"


def _keep(folder: Path, wanted: Path) -> Path:
    if not wanted.exists():  # otherwise it is the same content in the same files, which its name says
        folder.rename(wanted)
    return wanted


def _tell_export(to: Path, manifest: Manifest, row: DatasetRow | None, as_json: bool) -> None:
    known = {} if row is None else {"dataset": row.name, "version": row.version}
    if as_json:
        typer.echo(json.dumps({"path": str(to), **known, **asdict(manifest)}))
        return
    counts = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in manifest.counts.items())
    typer.echo(f"{to}: {counts}\n{manifest.hash}")
    if row is not None:
        typer.echo(f"known as dataset:{row.name}@{row.version}")


def run_import(folder: Path, into: Path | None, run: str | None, *, as_json: bool) -> None:
    asyncio.run(_import(folder, into, run, as_json))


async def _import(folder: Path, into: Path | None, run: str | None, as_json: bool) -> None:
    manifest = check_content(folder)
    name = run or (into.name if into is not None else manifest.run)
    target = into if into is not None else RUNS / name
    fresh = not RunFolder(target).config_file.is_file()
    if fresh:
        _check_name(name)
        RunFolder(target).create(RunConfig(name=name, dir=target.resolve()))
    async with store_of(target) as (config, store):
        if run is not None and config.name != run:
            raise ConfigError(f"--run: given {run!r}, and {target} is the folder of run {config.name!r}")
        if await store.run(config.name) is None:
            settings = config.model_dump(mode="json")
            await store.put_run(Run(config.name, config.name, settings, status="finished", reason="imported"))
        with _bar("importing", as_json) as progress:
            brought = await bring_back(store, folder, config.name, manifest, progress)
    if as_json:
        typer.echo(json.dumps({"run_dir": str(target), "run": config.name, **asdict(brought)}))
        return
    there = f", {brought.there} were there" if brought.there else ""
    typer.echo(f"{target}: {brought.sessions} sessions and {brought.groups} groups brought in{there}")


@contextmanager
def _bar(text: str, as_json: bool) -> Generator[exporting.Progress | None]:
    """On a terminal; elsewhere nothing is said until it is done."""
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield None
        return
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# --- by name ------------------------------------------------------------------------------------


def _check_name(name: str) -> None:
    if not NAME.match(name):
        raise ConfigError(f"{name!r}: a name has letters, digits, dots, underscores and hyphens")


@asynccontextmanager
async def _names_of(config: RunConfig) -> AsyncGenerator[Store]:
    names = open_dataset_index(config)
    try:
        yield names
    finally:
        await names.close()


@asynccontextmanager
async def _names(where: Path) -> AsyncGenerator[Store]:
    """``where``: the folder that runs are in, or one of the runs."""
    is_run = RunFolder(where).config_file.is_file()
    names = open_dataset_index(RunFolder(where).read_config()) if is_run else open_dataset_index_in(where)
    try:
        yield names
    finally:
        await names.close()


def run_ls(where: Path, *, as_json: bool) -> None:
    async def ls() -> list[DatasetRow]:
        if not any((where / file).is_file() for file in (DATASET_INDEX_FILE, "config.json")):
            return []
        async with _names(where) as names:
            return await names.datasets()

    rows = asyncio.run(ls())
    if as_json:
        typer.echo(json.dumps([_row(row) for row in rows]))
        return
    table = Table("dataset", "sessions", "format", "hash", "folder", box=None, padding=(0, 1, 0, 0))
    for row in rows:
        sessions = str(row.manifest["counts"].get("sessions", ""))
        name = f"{row.name}@{row.version}"
        table.add_row(name, sessions, row.manifest["format"], row.hash.removeprefix("sha256:")[:12], row.path)
    Console(soft_wrap=True).print(table)


def run_add(where: Path, name: str, folder: Path, *, as_json: bool) -> None:
    _check_name(name)
    manifest, path = check_content(folder), str(folder.absolute())

    async def add() -> DatasetRow:
        async with _names(where) as names:
            return await names.put_dataset(name, path, manifest.hash, asdict(manifest))

    row = asyncio.run(add())
    typer.echo(json.dumps(_row(row)) if as_json else f"dataset:{row.name}@{row.version}")


def run_show(where: Path, name: str, *, as_json: bool) -> None:
    row = asyncio.run(_find(where, name))
    there = Path(row.path).is_dir()
    if as_json:
        typer.echo(json.dumps({**_row(row), "there": there, "manifest": row.manifest}))
        return
    typer.echo(f"dataset:{row.name}@{row.version}  {row.path}{'' if there else '  (the folder is gone)'}")
    typer.echo(json.dumps(row.manifest, indent=2, ensure_ascii=False))


def run_rm(where: Path, name: str, *, files: bool, as_json: bool) -> None:
    wanted, version = _split(name)

    async def rm() -> list[DatasetRow]:
        async with _names(where) as names:
            rows = [row for row in await names.datasets() if row.name == wanted]
            gone = [row for row in rows if version in (None, row.version)]
            await names.remove_dataset(wanted, version)
            used = {row.path for row in await names.datasets()}
            return [replace(row, path="") if row.path in used else row for row in gone]

    gone = asyncio.run(rm())
    if not gone:
        raise ConfigError(f"{name}: there is no such dataset")
    for path in {row.path for row in gone if files and row.path}:
        shutil.rmtree(path, ignore_errors=True)
    removed = [f"{row.name}@{row.version}" for row in gone]
    typer.echo(json.dumps({"removed": removed}) if as_json else f"removed {', '.join(removed)}")


async def _find(where: Path, name: str) -> DatasetRow:
    async with _names(where) as names:
        row = await names.dataset(*_split(name))
        if row is None:
            known = ", ".join(f"{each.name}@{each.version}" for each in await names.datasets()) or "none"
            raise ConfigError(f"{name}: there is no such dataset. Known: {known}")
        return row


def _split(name: str) -> tuple[str, int | None]:
    base, at, version = name.removeprefix("dataset:").partition("@")
    if at and not version.isdecimal():
        raise ConfigError(f"{name}: a version is a number, as in {base}@2")
    return base, int(version) if version else None


def _row(row: DatasetRow) -> Json:
    return {
        "name": row.name,
        "version": row.version,
        "path": row.path,
        "hash": row.hash,
        "created_at": row.created_at,
    }
