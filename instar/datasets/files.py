"""The tables as files: lines of JSON, Parquet, or a folder of Hugging Face `datasets`."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

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

ROWS_AT_ONCE = 256
"""Rows that are held in memory before they are written."""


class TableWriter(ABC):
    def __init__(self, folder: Path, tables: Sequence[TableName]) -> None:
        self.folder = folder
        self.tables = tuple(tables)

    @abstractmethod
    def add(self, table: TableName, row: ExportRow, line: str) -> None:
        """``line`` is the row's canonical one."""

    @abstractmethod
    def finish(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Also where it was not finished. What was written then is of no use."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JsonlWriter(TableWriter):
    def __init__(self, folder: Path, tables: Sequence[TableName]) -> None:
        super().__init__(folder, tables)
        self._opened = ExitStack()
        self._files: dict[TableName, TextIO] = {
            name: self._opened.enter_context((folder / f"{name}.jsonl").open("w", encoding="utf-8"))
            for name in tables
        }

    def add(self, table: TableName, row: ExportRow, line: str) -> None:
        self._files[table].write(line + "\n")

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()


class ParquetWriter(TableWriter):
    def __init__(self, folder: Path, tables: Sequence[TableName]) -> None:
        super().__init__(folder, tables)
        pq = _package("pyarrow.parquet")
        self._waiting: dict[TableName, list[ExportRow]] = {name: [] for name in tables}
        self._schemas = {name: _schema(TABLES[name]) for name in tables}
        self._writers = {
            name: pq.ParquetWriter(folder / f"{name}.parquet", self._schemas[name], compression="zstd")
            for name in tables
        }

    def add(self, table: TableName, row: ExportRow, line: str) -> None:
        waiting = self._waiting[table]
        waiting.append(row)
        if len(waiting) >= ROWS_AT_ONCE:
            self._flush(table)

    def _flush(self, table: TableName) -> None:
        waiting, self._waiting[table] = self._waiting[table], []
        if waiting:
            self._writers[table].write_batch(_batch(self._schemas[table], TABLES[table], waiting))

    def finish(self) -> None:
        for table in self.tables:
            self._flush(table)
        self.close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class HfWriter(ParquetWriter):
    """A `DatasetDict` with one dataset per table, for `datasets.load_from_disk`."""

    def finish(self) -> None:
        super().finish()
        datasets, pq = _package("datasets"), _package("pyarrow.parquet")
        for name in self.tables:
            parquet = self.folder / f"{name}.parquet"
            table = pq.read_table(parquet, memory_map=True)
            # A fingerprint of our own: theirs is drawn anew each time, so no two folders would be the same.
            datasets.Dataset(table, fingerprint=f"instar-{name}").save_to_disk(self.folder / name)
            parquet.unlink()
        (self.folder / "dataset_dict.json").write_text(json.dumps({"splits": list(self.tables)}))


WRITERS: dict[Format, type[TableWriter]] = {"jsonl": JsonlWriter, "parquet": ParquetWriter, "hf": HfWriter}


# --- reading ------------------------------------------------------------------------------------


def read_rows(folder: Path, format: Format, table: TableName) -> Iterator[ExportRow]:
    if format == "jsonl":
        return _read_jsonl(folder / f"{table}.jsonl", table)
    batches = _parquet_batches if format == "parquet" else _arrow_batches
    return _read_batches(batches(folder, table), table, folder)


def _read_jsonl(path: Path, table: TableName) -> Iterator[ExportRow]:
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                yield decode_line(TABLES[table], line, f"{path}, line {number},")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _parquet_batches(folder: Path, table: TableName) -> Iterator[Any]:
    pq = _package("pyarrow.parquet")
    with pq.ParquetFile(folder / f"{table}.parquet") as file:
        yield from file.iter_batches(batch_size=ROWS_AT_ONCE)


def _arrow_batches(folder: Path, table: TableName) -> Iterator[Any]:
    """The files of a saved dataset, in its own order, without the package that wrote them."""
    pa = _package("pyarrow")
    state = json.loads((folder / table / "state.json").read_text())
    for each in state["_data_files"]:
        name = Path(each["filename"]).name
        with pa.memory_map(str(folder / table / name)) as file:
            yield from pa.ipc.open_stream(file)


def _read_batches(batches: Iterator[Any], table: TableName, folder: Path) -> Iterator[ExportRow]:
    pa = _package("pyarrow")
    columns = TABLES[table]
    try:
        for batch in batches:
            values = {name: _values(kind, batch.column(name)) for name, kind in columns.items()}
            for place in range(batch.num_rows):
                yield {name: values[name][place] for name in columns}
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise DataError(f"the table {table} in {folder} cannot be read: {error}") from error


def _values(kind: ColumnType, column: Any) -> list[Any]:
    if kind in (ColumnType.IDS, ColumnType.FLOATS):
        return [_array(scalar) for scalar in column]
    given = column.to_pylist()
    if kind is ColumnType.JSON:
        return [None if text is None else json.loads(text) for text in given]
    return given


def _array(scalar: Any) -> Any:
    return scalar.values.to_numpy(zero_copy_only=False) if scalar.is_valid else None


def _schema(columns: Columns) -> Any:
    pa = _package("pyarrow")
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
    return pa.schema([pa.field(name, types[kind]) for name, kind in columns.items()])


def _batch(schema: Any, columns: Columns, rows: Sequence[ExportRow]) -> Any:
    pa = _package("pyarrow")
    arrays: list[Any] = []
    for name, kind in columns.items():
        values = [row[name] for row in rows]
        if kind is ColumnType.JSON:
            values = [None if value is None else dump_canonical_json(value) for value in values]
        arrays.append(pa.array(values, type=schema.field(name).type))
    return pa.record_batch(arrays, schema=schema)


def _package(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"this format needs {name.split('.')[0]}: pip install 'instar[data]'") from error
