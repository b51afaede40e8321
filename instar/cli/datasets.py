"""`instar datasets`, and `instar sessions export` and `import`."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from instar.cli.filters import session_filter, with_session_filters
from instar.cli.options import AsJson, RunDir, new_app
from instar.cli.run_store import open_run_store
from instar.cluster.data import DATASET_INDEX_FILE, open_dataset_index, open_dataset_index_in
from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.data.linearize import linearize
from instar.datasets import export as exporting
from instar.datasets import importing
from instar.datasets.export import ExportHooks, ExportOptions, check_target
from instar.datasets.manifest import IMPORTABLE_FORMATS, DatasetManifest
from instar.errors import ConfigError
from instar.store.base import DatasetRow, Run, Store
from instar.types import Json

RUNS = Path("runs")
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")

app = new_app()

RunsDir = Annotated[
    Path, typer.Option("--runs", help="The folder of all runs, or the folder of one run, to use its store.")
]
DatasetName = Annotated[str, typer.Argument(help="NAME or NAME@VERSION.")]


class ExportFormat(StrEnum):
    jsonl = "jsonl"
    parquet = "parquet"
    hf = "hf"
    sft = "sft"
    dpo = "dpo"


# --- export and import ---------------------------------------------------------------------------------


@with_session_filters
def export_sessions(
    run_dir: RunDir,
    filters: dict[str, Any],
    to: Annotated[Path | None, typer.Option(help="The folder to write; it must not exist.")] = None,
    format: Annotated[
        ExportFormat,
        typer.Option(
            help="jsonl, parquet, hf: everything, as JSON lines, Parquet or a Hugging Face folder. "
            "sft, dpo: conversations and preference pairs in TRL's formats."
        ),
    ] = ExportFormat.jsonl,
    name: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Register it as the next version of dataset:NAME."),
    ] = None,
    samples: Annotated[bool, typer.Option("--samples", help="Also write the flat samples.")] = False,
    margin: Annotated[float, typer.Option(min=0, help="dpo: minimum difference of the rewards.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Write ended sessions to a folder. With sft, --reward-min selects the sessions to imitate (default:
    those with a reward above 0)."""
    min_reward = None
    if format is ExportFormat.sft:
        min_reward, filters = filters["reward_min"], {**filters, "reward_min": None}
    request = ExportOptions(
        format=format.value,
        where=session_filter(filters),
        samples=samples,
        min_reward=min_reward,
        margin=margin,
    )
    if to is None and name is None:
        raise ConfigError("Give the folder to write with --to, or a name for the data with --as.")
    if name is not None:
        _check_name(name)
        if request.format not in IMPORTABLE_FORMATS:
            raise ConfigError(
                f"--as: {request.format} data cannot be trained on; use {', '.join(IMPORTABLE_FORMATS)}."
            )
    if to is not None:
        check_target(to)
    asyncio.run(_export(run_dir.absolute(), to and to.absolute(), request, name, as_json))


async def _export(
    run_dir: Path, to: Path | None, request: ExportOptions, name: str | None, as_json: bool
) -> None:
    async with open_run_store(run_dir, read_only=True) as (config, store):
        kind = config.store.type
        combine = RewardCombiner(config)
        # Data without logprobs can be trained on too.
        samples = partial(linearize, requires_logprobs=False)
        views = ExportHooks(samples, lambda record: combine(record.rewards, record.scores))
        kept = run_dir.parent / "datasets"
        with _progress_bar("exporting", as_json) as progress, _target_folder(to, kept) as folder:
            manifest = await exporting.export_sessions(
                store, config.name, folder, request, views, store_kind=kind, progress=progress
            )
            if to is None:
                to = _move_unless_exists(folder, kept / _folder_name(name, manifest, request))
        row = None
        if name is not None:
            async with _open_index_of(config) as names:
                row = await names.put_dataset(name, str(to), manifest.hash, asdict(manifest))
    _print_export(to, manifest, row, as_json)


@contextmanager
def _target_folder(to: Path | None, kept: Path) -> Generator[Path]:
    """Yield the folder to write: ``to``, or a temporary folder that is later renamed after its content."""
    if to is not None:
        yield to
        return
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept, prefix=".export-") as folder:
        yield Path(folder) / "data"


def _folder_name(name: str | None, manifest: DatasetManifest, request: ExportOptions) -> str:
    """Return a folder name with the format and the content hash, because the hash covers only the rows."""
    samples = "-samples" if request.samples else ""
    return f"{name}-{manifest.hash[7:19]}-{request.format}{samples}"


def _move_unless_exists(folder: Path, request: Path) -> Path:
    if not request.exists():  # an existing folder of this name has the same content
        folder.rename(request)
    return request


def _print_export(to: Path, manifest: DatasetManifest, row: DatasetRow | None, as_json: bool) -> None:
    registration = {} if row is None else {"dataset": row.name, "version": row.version}
    if as_json:
        typer.echo(json.dumps({"path": str(to), **registration, **asdict(manifest)}))
        return
    counts = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in manifest.counts.items())
    typer.echo(f"{to}: {counts}\n{manifest.hash}")
    if row is not None:
        typer.echo(f"registered as dataset:{row.name}@{row.version}")


def import_sessions(
    folder: Annotated[Path, typer.Argument(help="A folder written by `instar sessions export`.")],
    into: Annotated[
        Path | None,
        typer.Option(help="A run's folder. Default: runs/ and the run's name; created if needed."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Name of the run. Default: the exported run's name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import exported sessions. Sessions that exist already are left as they are."""
    asyncio.run(_import(folder, into, run, as_json))


async def _import(folder: Path, into: Path | None, run: str | None, as_json: bool) -> None:
    manifest = importing.verify_content(folder)
    name = run or (into.name if into is not None else manifest.run)
    target = into if into is not None else RUNS / name
    fresh = not RunFolder(target).config_file.is_file()
    if fresh:
        _check_name(name)
        RunFolder(target).create(RunConfig(name=name, dir=target.resolve()))
    async with open_run_store(target) as (config, store):
        if run is not None and config.name != run:
            raise ConfigError(f"--run: given {run!r}, but {target} is the folder of run {config.name!r}.")
        if await store.run(config.name) is None:
            settings = config.model_dump(mode="json")
            await store.put_run(Run(config.name, config.name, settings, status="finished", reason="imported"))
        with _progress_bar("importing", as_json) as progress:
            imported = await importing.import_sessions(store, folder, config.name, manifest, progress)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "run_dir": str(target),
                    "run": config.name,
                    "groups": imported.groups,
                    "sessions": imported.sessions,
                    "there": imported.unchanged,
                }
            )
        )
        return
    existing = f", {imported.unchanged} existed already" if imported.unchanged else ""
    typer.echo(f"{target}: imported {imported.sessions} sessions and {imported.groups} groups{existing}")


@contextmanager
def _progress_bar(text: str, as_json: bool) -> Generator[exporting.ProgressCallback | None]:
    """Show a progress bar on a terminal, and nothing elsewhere. Yield the callback that updates the bar."""
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield None
        return
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# --- datasets by name ------------------------------------------------------------------------------------


def _check_name(name: str) -> None:
    if not NAME.match(name):
        raise ConfigError(f"{name!r} is not a name: use letters, digits, dots, underscores and hyphens.")


@asynccontextmanager
async def _open_index_of(config: RunConfig) -> AsyncGenerator[Store]:
    names = open_dataset_index(config)
    try:
        yield names
    finally:
        await names.close()


@asynccontextmanager
async def _open_index(where: Path) -> AsyncGenerator[Store]:
    """Yield the store with the dataset index of a folder of runs, or of one run."""
    is_run = RunFolder(where).config_file.is_file()
    names = open_dataset_index(RunFolder(where).read_config()) if is_run else open_dataset_index_in(where)
    try:
        yield names
    finally:
        await names.close()


@app.command("ls")
def list_datasets(runs: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """List datasets with version, number of sessions, hash and folder."""

    async def ls() -> list[DatasetRow]:
        if not any((runs / file).is_file() for file in (DATASET_INDEX_FILE, "config.json")):
            return []
        async with _open_index(runs) as names:
            return await names.datasets()

    rows = asyncio.run(ls())
    if as_json:
        typer.echo(json.dumps([_row_json(row) for row in rows]))
        return
    table = Table("dataset", "sessions", "format", "hash", "folder", box=None, padding=(0, 1, 0, 0))
    for row in rows:
        sessions = str(row.manifest["counts"].get("sessions", ""))
        name = f"{row.name}@{row.version}"
        table.add_row(name, sessions, row.manifest["format"], row.hash.removeprefix("sha256:")[:12], row.path)
    Console(soft_wrap=True).print(table)


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="The dataset's name.")],
    folder: Annotated[Path, typer.Argument(help="A folder written by `instar sessions export`.")],
    runs: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Give exported data a name. The same content keeps its version."""
    _check_name(name)
    manifest, path = importing.verify_content(folder), str(folder.absolute())

    async def put() -> DatasetRow:
        async with _open_index(runs) as names:
            return await names.put_dataset(name, path, manifest.hash, asdict(manifest))

    row = asyncio.run(put())
    typer.echo(json.dumps(_row_json(row)) if as_json else f"dataset:{row.name}@{row.version}")


@app.command()
def show(name: DatasetName, runs: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """Show a dataset's folder and manifest."""
    row = asyncio.run(_find_dataset(runs, name))
    folder_exists = Path(row.path).is_dir()
    if as_json:
        typer.echo(json.dumps({**_row_json(row), "there": folder_exists, "manifest": row.manifest}))
        return
    typer.echo(
        f"dataset:{row.name}@{row.version}  {row.path}{'' if folder_exists else '  (the folder is missing)'}"
    )
    typer.echo(json.dumps(row.manifest, indent=2, ensure_ascii=False))


@app.command("rm")
def remove(
    name: DatasetName,
    files: Annotated[bool, typer.Option("--files", help="Delete the folder too.")] = False,
    runs: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Remove a dataset, or one version of it, from the index. Its files are kept."""
    dataset, version = _parse_dataset_name(name)

    async def remove_rows() -> list[DatasetRow]:
        async with _open_index(runs) as names:
            rows = [row for row in await names.datasets() if row.name == dataset]
            removed_rows = [row for row in rows if version in (None, row.version)]
            await names.remove_dataset(dataset, version)
            used = {row.path for row in await names.datasets()}
            return [replace(row, path="") if row.path in used else row for row in removed_rows]

    removed_rows = asyncio.run(remove_rows())
    if not removed_rows:
        raise ConfigError(f"There is no dataset {name}.")
    for path in {row.path for row in removed_rows if files and row.path}:
        shutil.rmtree(path, ignore_errors=True)
    removed = [f"{row.name}@{row.version}" for row in removed_rows]
    typer.echo(json.dumps({"removed": removed}) if as_json else f"removed {', '.join(removed)}")


async def _find_dataset(where: Path, name: str) -> DatasetRow:
    async with _open_index(where) as names:
        row = await names.dataset(*_parse_dataset_name(name))
        if row is None:
            registration = (
                ", ".join(f"{each.name}@{each.version}" for each in await names.datasets()) or "none"
            )
            raise ConfigError(f"There is no dataset {name}. Known: {registration}")
        return row


def _parse_dataset_name(name: str) -> tuple[str, int | None]:
    base, at, version = name.removeprefix("dataset:").partition("@")
    if at and not version.isdecimal():
        raise ConfigError(f"{name}: the version must be a number, e.g. {base}@2.")
    return base, int(version) if version else None


def _row_json(row: DatasetRow) -> Json:
    return {
        "name": row.name,
        "version": row.version,
        "path": row.path,
        "hash": row.hash,
        "created_at": row.created_at,
    }
