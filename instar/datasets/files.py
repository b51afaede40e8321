"""Writes and reads exported tables as JSON Lines, Parquet or a Hugging Face `datasets` folder."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from instar.datasets.columns import (
    TABLES,
    Columns,
    ColumnType,
    ExportRow,
    TableName,
    decode_line,
    dump_canonical_json,
)
from instar.datasets.manifest import Format
from instar.errors import ConfigError, DataError

ROWS_PER_BATCH = 256


class TableWriter(ABC):
    def __init__(self, folder: Path, tables: Sequence[TableName]) -> None:
        self.folder = folder
        self.tables = tuple(tables)
        self._exit_stack = ExitStack()

    @abstractmethod
    def add(self, table: TableName, row: ExportRow, line: str) -> None:
        """Write a row. ``line`` is the row as canonical JSON."""

    def finish(self) -> None:
        """Complete the files and close them."""
        self.close()

    def close(self) -> None:
        """Close the files. They are incomplete if `finish` was not called."""
        self._exit_stack.close()


class JsonlWriter(TableWriter):
    def __init__(self, folder: Path, tables: Sequence[TableName]) -> None:
        super().__init__(folder, tables)
        self._files = {
            name: self._exit_stack.enter_context((folder / f"{name}.jsonl").open("w", encoding="utf-8"))
            for name in tables
        }

    def add(self, table: TableName, row: ExportRow, line: str) -> None:
        self._files[table].write(line + "\n")


class ParquetWriter(TableWriter):
    def __init__(self, folder: Path, tables: Sequence[TableName]) -> None:
        super().__init__(folder, tables)
        pq = _import_package("pyarrow.parquet")
        self._pending: dict[TableName, list[ExportRow]] = {name: [] for name in tables}
        self._schemas = {name: _make_schema(TABLES[name]) for name in tables}
        self._writers = {
            name: self._exit_stack.enter_context(
                pq.ParquetWriter(folder / f"{name}.parquet", schema, compression="zstd")
            )
            for name, schema in self._schemas.items()
        }

    def add(self, table: TableName, row: ExportRow, line: str) -> None:
        self._pending[table].append(row)
        if len(self._pending[table]) >= ROWS_PER_BATCH:
            self._write_pending(table)

    def _write_pending(self, table: TableName) -> None:
        pending, self._pending[table] = self._pending[table], []
        if pending:
            self._writers[table].write_batch(_make_batch(self._schemas[table], TABLES[table], pending))

    def finish(self) -> None:
        for table in self.tables:
            self._write_pending(table)
        super().finish()


class HfWriter(ParquetWriter):
    """Writes a `DatasetDict` with one dataset per table, for `datasets.load_from_disk`."""

    def finish(self) -> None:
        super().finish()
        datasets, pq = _import_package("datasets"), _import_package("pyarrow.parquet")
        for name in self.tables:
            parquet = self.folder / f"{name}.parquet"
            table = pq.read_table(parquet, memory_map=True)
            # The default fingerprint is random, so two exports of the same data would differ.
            datasets.Dataset(table, fingerprint=f"instar-{name}").save_to_disk(self.folder / name)
            parquet.unlink()
        (self.folder / "dataset_dict.json").write_text(json.dumps({"splits": list(self.tables)}))


WRITERS: dict[Format, type[TableWriter]] = {"jsonl": JsonlWriter, "parquet": ParquetWriter, "hf": HfWriter}


def read_rows(folder: Path, format: Format, table: TableName) -> Iterator[ExportRow]:
    if format == "jsonl":
        return _read_jsonl(folder / f"{table}.jsonl", table)
    read_batches = _read_parquet_batches if format == "parquet" else _read_arrow_batches
    return _read_batches(read_batches(folder, table), table, folder)


def _read_jsonl(path: Path, table: TableName) -> Iterator[ExportRow]:
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                yield decode_line(TABLES[table], line, f"{path}, line {number},")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _read_parquet_batches(folder: Path, table: TableName) -> Iterator[Any]:
    pq = _import_package("pyarrow.parquet")
    with pq.ParquetFile(folder / f"{table}.parquet") as file:
        yield from file.iter_batches(batch_size=ROWS_PER_BATCH)


def _read_arrow_batches(folder: Path, table: TableName) -> Iterator[Any]:
    # Read the files directly, so that importing does not require the `datasets` package.
    pa = _import_package("pyarrow")
    state = json.loads((folder / table / "state.json").read_text())
    for data_file in state["_data_files"]:
        name = Path(data_file["filename"]).name
        with pa.memory_map(str(folder / table / name)) as file:
            yield from pa.ipc.open_stream(file)


def _read_batches(batches: Iterator[Any], table: TableName, folder: Path) -> Iterator[ExportRow]:
    pa = _import_package("pyarrow")
    columns = TABLES[table]
    try:
        for batch in batches:
            values = {
                name: _decode_column(column_type, batch.column(name)) for name, column_type in columns.items()
            }
            for index in range(batch.num_rows):
                yield {name: values[name][index] for name in columns}
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise DataError(f"cannot read the table {table} in {folder}: {error}") from error


def _decode_column(column_type: ColumnType, column: Any) -> list[Any]:
    if column_type in (ColumnType.IDS, ColumnType.FLOATS):
        return [
            scalar.values.to_numpy(zero_copy_only=False) if scalar.is_valid else None for scalar in column
        ]
    values = column.to_pylist()
    if column_type is ColumnType.JSON:
        return [None if text is None else json.loads(text) for text in values]
    return values


def _make_schema(columns: Columns) -> Any:
    pa = _import_package("pyarrow")
    types = {
        ColumnType.TEXT: pa.string(),
        ColumnType.INT: pa.int64(),
        ColumnType.REAL: pa.float64(),
        ColumnType.BOOL: pa.bool_(),
        ColumnType.IDS: pa.list_(pa.int32()),
        ColumnType.FLOATS: pa.list_(pa.float32()),
        ColumnType.JSON: pa.string(),
        ColumnType.BYTES: pa.binary(),
    }
    return pa.schema([pa.field(name, types[column_type]) for name, column_type in columns.items()])


def _make_batch(schema: Any, columns: Columns, rows: Sequence[ExportRow]) -> Any:
    pa = _import_package("pyarrow")
    arrays: list[Any] = []
    for name, column_type in columns.items():
        values = [row[name] for row in rows]
        if column_type is ColumnType.JSON:
            values = [None if value is None else dump_canonical_json(value) for value in values]
        arrays.append(pa.array(values, type=schema.field(name).type))
    return pa.record_batch(arrays, schema=schema)


def _import_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise ConfigError(
            f"the formats parquet and hf require {package}, which cannot be imported; run "
            "`pip install 'instar[data]'`"
        ) from error
