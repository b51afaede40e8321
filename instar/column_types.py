"""The column types of dataclass fields. Stores and exports derive their columns from these types."""

from __future__ import annotations

from enum import Enum
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from instar.types import Floats, Ids


class ColumnType(Enum):
    TEXT = "text"
    INT = "int"
    REAL = "real"
    BOOL = "bool"
    IDS = "ids"
    """An int32 array."""
    FLOATS = "floats"
    """A float32 array; NaN marks a missing value."""
    JSON = "json"
    BYTES = "bytes"


class FieldType(NamedTuple):
    column: ColumnType
    python_type: Any
    """The annotated type of the field, without None."""
    is_optional: bool


_COLUMN_TYPES: dict[Any, ColumnType] = {
    str: ColumnType.TEXT,
    int: ColumnType.INT,
    float: ColumnType.REAL,
    bool: ColumnType.BOOL,
    bytes: ColumnType.BYTES,
    Ids: ColumnType.IDS,
    Floats: ColumnType.FLOATS,
}


def get_field_types(cls: type) -> dict[str, FieldType]:
    """Return the type of each field of a dataclass. Enums and literals are text; other objects are JSON."""
    return {name: _get_field_type(hint) for name, hint in get_type_hints(cls).items()}


def get_columns(cls: type) -> dict[str, ColumnType]:
    return {name: field_type.column for name, field_type in get_field_types(cls).items()}


def _get_field_type(hint: Any) -> FieldType:
    alternatives = [alternative for alternative in get_args(hint) if alternative is not NoneType]
    is_optional = NoneType in get_args(hint)
    python_type = alternatives[0] if is_optional else hint
    is_text = get_origin(python_type) is Literal or is_enum(python_type)
    column = ColumnType.TEXT if is_text else _COLUMN_TYPES.get(python_type, ColumnType.JSON)
    return FieldType(column, python_type, is_optional)


def is_enum(python_type: Any) -> bool:
    return isinstance(python_type, type) and issubclass(python_type, Enum)
