"""`instar datasets`, and `instar sessions export` and `import`."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from instar.cli.filters import build_session_filter, with_session_filters
from instar.cli.options import AsJson, RunDir, async_command, new_app
from instar.cli.output import plain_table, print_json, print_result, progress_bar, select_fields
from instar.cli.run_store import open_run_store
from instar.cluster.data import DATASET_INDEX_FILE, open_dataset_index, open_dataset_index_in
from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.data.linearize import linearize
from instar.datasets import export as exporting
from instar.datasets import importing
from instar.datasets.export import ExportHooks, ExportOptions, check_target
from instar.datasets.manifest import IMPORTABLE_FORMATS
from instar.errors import ConfigError
from instar.store.base import DatasetRow, Run, Store
from instar.types import Json

DEFAULT_RUNS_DIR = Path("runs")
NAME_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")

app = new_app()

RunsDir = Annotated[
    Path, typer.Option("--runs", help="Folder that contains the runs; with PostgreSQL, a run's folder.")
]
DatasetName = Annotated[str, typer.Argument(help="NAME or NAME@VERSION.")]


@with_session_filters
@async_command
async def export_sessions(
    run_dir: RunDir,
    filters: dict[str, Any],
    to: Annotated[Path | None, typer.Option(help="Folder to create. Optional with --as.")] = None,
    format: Annotated[
        Literal["jsonl", "parquet", "hf", "sft", "dpo"],
        typer.Option(
            help="jsonl, parquet, hf: everything, as JSON lines, Parquet or a Hugging Face folder. "
            "sft, dpo: conversations and preference pairs in TRL's formats."
        ),
    ] = "jsonl",
    name: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Register the data as the next version of dataset:NAME."),
    ] = None,
    include_open: Annotated[
        bool, typer.Option("--open", help="Also export sessions that are still open, as they are now.")
    ] = False,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Also export live sessions that evaluate candidates.")
    ] = False,
    samples: Annotated[bool, typer.Option("--samples", help="Also write the training samples.")] = False,
    margin: Annotated[float, typer.Option(min=0, help="dpo: rewards must differ by more than this.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Export sessions to a folder. With sft, --reward-min selects the sessions to imitate (default:
    those with a reward above 0)."""
    min_reward = None
    if format == "sft":
        min_reward, filters = filters["reward_min"], {**filters, "reward_min": None}
    where = build_session_filter(filters)
    options = ExportOptions(
        format=format,
        where=where,
        include_open=include_open,
        include_samples=samples,
        min_reward=min_reward,
        exclude_held_out=not held_out,
        margin=margin,
    )
    if include_open and format not in IMPORTABLE_FORMATS:
        raise ConfigError(
            f"--open: {format} data contains only completed sessions; leave --open out, or use --format "
            f"{' or '.join(IMPORTABLE_FORMATS)}."
        )
    if to is None and name is None:
        raise ConfigError("Set a folder with --to, or a dataset name with --as.")
    if name is not None:
        _check_name(name)
        if format not in IMPORTABLE_FORMATS:
            raise ConfigError(
                f"--as: Instar cannot import {format} data; use --format {' or '.join(IMPORTABLE_FORMATS)}, "
                "or export to a folder with --to."
            )
    if to is not None:
        check_target(to)
    await _export(run_dir.absolute(), to and to.absolute(), options, name, as_json)


async def _export(
    run_dir: Path, to: Path | None, options: ExportOptions, name: str | None, as_json: bool
) -> None:
    async with open_run_store(run_dir, read_only=True) as (config, store):
        options = replace(options, exclude_held_out=options.exclude_held_out and config.has_gate)
        store_type = config.store.type
        combine = RewardCombiner(config)
        # Data without logprobs can be trained on too.
        get_samples = partial(linearize, requires_logprobs=False)
        hooks = ExportHooks(get_samples, lambda record: combine(record.rewards, record.scores))
        datasets_dir = run_dir.parent / "datasets"
        with (
            progress_bar("exporting", hidden=as_json) as progress,
            _target_folder(to, datasets_dir) as folder,
        ):
            manifest = await exporting.export_sessions(
                store, config.name, folder, options, hooks, store_type=store_type, progress=progress
            )
            if to is None:
                # The hash covers only the rows, so the name also includes the format. If a folder with this
                # name exists, it has the same content.
                suffix = f"{options.format}-samples" if options.include_samples else options.format
                to = datasets_dir / f"{name}-{manifest.hash[7:19]}-{suffix}"
                if not to.exists():
                    folder.rename(to)
    row = None
    if name is not None:
        async with _open_index(run_dir) as index:
            row = await index.put_dataset(name, str(to), manifest.hash, asdict(manifest))
    if as_json:
        registration = {} if row is None else {"dataset": row.name, "version": row.version}
        print_json({"path": str(to), **registration, **asdict(manifest)})
        return
    counts = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in manifest.counts.items())
    typer.echo(f"{to}: {counts}\n{manifest.hash}")
    if row is not None:
        typer.echo(f"registered as dataset:{row.name}@{row.version}")


@contextmanager
def _target_folder(to: Path | None, datasets_dir: Path) -> Generator[Path]:
    """Yield the folder to write: ``to``, or a temporary folder that the caller may rename."""
    if to is not None:
        yield to
        return
    datasets_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=datasets_dir, prefix=".export-") as folder:
        yield Path(folder) / "data"


@async_command
async def import_sessions(
    folder: Annotated[Path, typer.Argument(help="A folder written by `instar sessions export`.")],
    into: Annotated[
        Path | None,
        typer.Option(help="Run folder, created if needed. Default: runs/NAME, where NAME is the run's name."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Name of the run. Default: the name of --into or of the exported run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import exported sessions. Existing sessions are kept; the import fails if one of them differs."""
    manifest = importing.verify_content(folder)
    name = run or (into.name if into is not None else manifest.run)
    target = into if into is not None else DEFAULT_RUNS_DIR / name
    if not RunFolder(target).config_file.is_file():
        _check_name(name)
        RunFolder(target).create(RunConfig(name=name, dir=target.resolve()))
    async with open_run_store(target) as (config, store):
        if run is not None and config.name != run:
            raise ConfigError(f"--run: the run in {target} is named {config.name!r}, not {run!r}.")
        if await store.run(config.name) is None:
            settings = config.model_dump(mode="json")
            await store.put_run(Run(config.name, config.name, settings, status="finished", reason="imported"))
        with progress_bar("importing", hidden=as_json) as progress:
            imported = await importing.import_sessions(store, folder, config.name, manifest, progress)
    counts = select_fields(imported, "groups", "sessions", "unchanged")
    existing = f", {imported.unchanged} already existed" if imported.unchanged else ""
    text = f"{target}: imported {imported.sessions} sessions and {imported.groups} groups{existing}"
    print_result(as_json, {"run_dir": str(target), "run": config.name, **counts}, text)


def _check_name(name: str) -> None:
    if not NAME_PATTERN.match(name):
        raise ConfigError(
            f"{name!r} is not a valid name; names must start with a letter or digit and may contain only "
            "letters, digits, '.', '_' and '-'."
        )


@asynccontextmanager
async def _open_index(folder: Path) -> AsyncGenerator[Store]:
    """Yield the store with the dataset index. ``folder`` contains runs, or is a run's folder."""
    is_run = RunFolder(folder).config_file.is_file()
    store = open_dataset_index(RunFolder(folder).read_config()) if is_run else open_dataset_index_in(folder)
    try:
        yield store
    finally:
        await store.close()


@app.command("ls")
@async_command
async def list_datasets(runs: RunsDir = DEFAULT_RUNS_DIR, as_json: AsJson = False) -> None:
    """List datasets with version, number of sessions, format, hash and folder."""
    rows: list[DatasetRow] = []
    if any((runs / file).is_file() for file in (DATASET_INDEX_FILE, "config.json")):
        async with _open_index(runs) as index:
            rows = await index.datasets()
    if as_json:
        print_json([_row_json(row) for row in rows])
        return
    table = plain_table("dataset", "sessions", "format", "hash", "folder")
    for row in rows:
        sessions = str(row.manifest["counts"].get("sessions", ""))
        name = f"{row.name}@{row.version}"
        table.add_row(name, sessions, row.manifest["format"], row.hash.removeprefix("sha256:")[:12], row.path)
    Console(soft_wrap=True).print(table)


@app.command()
@async_command
async def add(
    name: Annotated[str, typer.Argument(help="The dataset's name.")],
    folder: Annotated[Path, typer.Argument(help="A folder written by `instar sessions export`.")],
    runs: RunsDir = DEFAULT_RUNS_DIR,
    as_json: AsJson = False,
) -> None:
    """Register exported data as the next version of a dataset. If the same content is already registered, it
    keeps its version."""
    _check_name(name)
    manifest = importing.verify_content(folder)
    async with _open_index(runs) as index:
        row = await index.put_dataset(name, str(folder.absolute()), manifest.hash, asdict(manifest))
    print_result(as_json, _row_json(row), f"dataset:{row.name}@{row.version}")


@app.command()
@async_command
async def show(name: DatasetName, runs: RunsDir = DEFAULT_RUNS_DIR, as_json: AsJson = False) -> None:
    """Show a dataset's folder and manifest."""
    async with _open_index(runs) as index:
        row = await index.dataset(*_parse_dataset_name(name))
        available = [f"{other.name}@{other.version}" for other in await index.datasets()]
    if row is None:
        raise ConfigError(f"Unknown dataset {name!r}. Available: {', '.join(available) or 'none'}")
    _print_dataset(row, as_json)


def _print_dataset(row: DatasetRow, as_json: bool) -> None:
    folder_exists = Path(row.path).is_dir()
    note = "" if folder_exists else "  (the folder is missing)"
    manifest = json.dumps(row.manifest, indent=2, ensure_ascii=False)
    text = f"dataset:{row.name}@{row.version}  {row.path}{note}\n{manifest}"
    print_result(as_json, {**_row_json(row), "exists": folder_exists, "manifest": row.manifest}, text)


@app.command("rm")
@async_command
async def remove(
    name: DatasetName,
    delete_files: Annotated[
        bool, typer.Option("--files", help="Also delete the folders, unless another dataset uses them.")
    ] = False,
    runs: RunsDir = DEFAULT_RUNS_DIR,
    as_json: AsJson = False,
) -> None:
    """Remove a dataset, or one version of it, from the index. The files are kept unless --files is set."""
    dataset, version = _parse_dataset_name(name)
    async with _open_index(runs) as index:
        rows = await index.datasets()
        removed = [row for row in rows if row.name == dataset and version in (None, row.version)]
        await index.remove_dataset(dataset, version)
        used_paths = {row.path for row in await index.datasets()}
    if not removed:
        available = ", ".join(f"{row.name}@{row.version}" for row in rows) or "none"
        raise ConfigError(f"Unknown dataset {name!r}. Available: {available}")
    for path in {row.path for row in removed} - used_paths if delete_files else ():
        shutil.rmtree(path, ignore_errors=True)
    names = [f"{row.name}@{row.version}" for row in removed]
    print_result(as_json, {"removed": names}, f"removed {', '.join(names)}")


def _parse_dataset_name(name: str) -> tuple[str, int | None]:
    dataset, at, version = name.removeprefix("dataset:").partition("@")
    if at and not version.isdecimal():
        raise ConfigError(f"{name}: the version must be a number, e.g. {dataset}@2.")
    return dataset, int(version) if version else None


def _row_json(row: DatasetRow) -> Json:
    return select_fields(row, "name", "version", "path", "hash", "created_at")
