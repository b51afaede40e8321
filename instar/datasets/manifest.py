"""What says of a folder of exported data which data it is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from instar.datasets.columns import TABLES, ExportRow, TableName, encode_line
from instar.errors import DataError
from instar.types import Json

FILE = "manifest.json"
VERSION = 1
"""Of the format; one more with every change of what `columns` declares."""

Format = Literal["jsonl", "parquet", "hf", "sft", "dpo"]
IMPORTABLE_FORMATS: tuple[Format, ...] = ("jsonl", "parquet", "hf")
"""Those that hold everything, and can be imported."""


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """It names no time and no place, so that the same data is the same folder."""

    format: Format
    run: str
    store: str
    """``sqlite`` or ``postgres``."""
    filters: Json
    """What was asked for."""
    counts: dict[str, int]
    hash: str
    """``sha256:…`` of the content, whatever the format it is written in."""
    policies: list[Json] = field(default_factory=list[Json])
    """The published versions of the run's policy: number, step, kind and name of the artifact."""
    versions: list[int] = field(default_factory=list[int])
    """Those that sampled a token of it."""
    instar: str = ""
    format_version: int = VERSION

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> DatasetManifest:
    path = folder / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder} holds no exported data: there is no {FILE} in it") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") not in get_args(Format):
        raise DataError(f"{path} is not one that Instar has written")
    if found.get("format_version") != VERSION:
        raise DataError(
            f"{path} has format version {found.get('format_version')}, and this Instar reads {VERSION}"
        )
    try:
        return DatasetManifest(**found)
    except TypeError as error:
        raise DataError(f"{path} is not one that Instar has written: {error}") from error


class ContentHash:
    """Of rows in their order, table by table: the same for every format."""

    def __init__(self) -> None:
        self._tables = {name: hashlib.sha256() for name in TABLES}

    def add(self, table: TableName, row: ExportRow) -> str:
        """Returns the row's line."""
        line = encode_line(TABLES[table], row)
        self._tables[table].update(line.encode() + b"\n")
        return line

    def add_text(self, table: TableName, line: str) -> None:
        self._tables[table].update(line.encode() + b"\n")

    def hexdigest(self, *tables: TableName) -> str:
        whole = hashlib.sha256()
        for name in tables:
            whole.update(f"{name} {self._tables[name].hexdigest()}\n".encode())
        return f"sha256:{whole.hexdigest()}"
