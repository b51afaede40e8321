"""The manifest that describes a folder of exported data."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from instar.datasets.columns import TABLES, ExportRow, TableName, encode_line
from instar.errors import DataError
from instar.types import Json

FILE_NAME = "manifest.json"
VERSION = 1
"""The version of the format, incremented with every change to the columns."""

Format = Literal["jsonl", "parquet", "hf", "sft", "dpo"]
IMPORTABLE_FORMATS: tuple[Format, ...] = ("jsonl", "parquet", "hf")
"""The formats that contain all recorded data and can be imported."""


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """Describes exported data, without timestamps and paths, so that exports of the same data by the same
    version of Instar are equal."""

    format: Format
    run: str
    store: str
    """The type of the store: ``sqlite`` or ``postgres``."""
    filters: Json
    """The filters and options of the export, as returned by `ExportOptions.describe`."""
    counts: dict[str, int]
    hash: str
    """The content hash, ``sha256:…``. It is the same in all importable formats."""
    policies: list[Json] = field(default_factory=list[Json])
    """The published versions of the run's policy: id, version, step, artifact kind and artifact name."""
    versions: list[int] = field(default_factory=list[int])
    """The policy versions that sampled the tokens; empty if the format is not importable."""
    instar: str = ""
    """The version of Instar that wrote the export."""
    format_version: int = VERSION

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (folder / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> DatasetManifest:
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder} is not an exported dataset: {FILE_NAME} is missing") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict) or content.get("format") not in get_args(Format):
        raise DataError(f"{path} is not the manifest of an Instar export: the format is missing or unknown")
    if content.get("format_version") != VERSION:
        raise DataError(
            f"{path} has format version {content.get('format_version')}, but this version of Instar reads "
            f"version {VERSION}; export the data again with this version"
        )
    try:
        return DatasetManifest(**content)
    except TypeError as error:
        raise DataError(f"{path} is not the manifest of an Instar export: {error}") from error


class ContentHash:
    """Hashes the rows of each table in order. The hash does not depend on the file format."""

    def __init__(self) -> None:
        self._tables = defaultdict[str, Any](hashlib.sha256)

    def add(self, table: TableName, row: ExportRow) -> str:
        """Add a row and return its canonical line."""
        return self.add_line(table, encode_line(TABLES[table], row))

    def add_line(self, table: str, line: str) -> str:
        self._tables[table].update(line.encode() + b"\n")
        return line

    def hexdigest(self, *tables: str) -> str:
        """Return the hash of the tables as ``sha256:…``."""
        digest = hashlib.sha256()
        for name in tables:
            digest.update(f"{name} {self._tables[name].hexdigest()}\n".encode())
        return f"sha256:{digest.hexdigest()}"
