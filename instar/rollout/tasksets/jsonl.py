"""Reads files with one JSON object per line, optionally compressed with gzip."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec

from instar.errors import ConfigError
from instar.types import Json


def read_json_lines(path: Path) -> Iterator[tuple[int, Json]]:
    """Yield each object with its line number, starting at 1. Raises ConfigError, naming the file and line."""
    open_file = gzip.open if path.suffix == ".gz" else open
    try:
        with open_file(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _parse_object(line, f"{path}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"tasks.path: cannot read {path}: {reason}") from error


def _parse_object(line: bytes, location: str) -> Json:
    try:
        data = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{location}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{location}: a task must be a JSON object, not {type(data).__name__}")
    return cast(Json, data)
