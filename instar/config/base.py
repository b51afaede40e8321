"""The base class of all config sections, and the types of common fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

DType = Literal["auto", "bf16", "fp32"]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A section of the config. It is immutable and rejects unknown keys, infinity and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def type_shorthand(default: str) -> BeforeValidator:
    """Return a validator that expands a bare word to a section of that `type`, and adds a missing `type`."""

    def expand(value: Any) -> Any:
        if isinstance(value, str):
            return {"type": value}
        if isinstance(value, dict) and "type" not in value:
            return {"type": default, **cast(Any, value)}
        return value

    return BeforeValidator(expand)


class PluginConfig(Section):
    """A backend, engine, agent, reward or task set from another package; see docs/concepts.md."""

    type: Literal["plugin"]
    name: str
    """Name of the entry point in the group `instar.<kind>`, or `package.module:Class`."""
    args: dict[str, Any] = {}
    """The plugin's own settings. The plugin receives this whole section."""
    python: str | None = None
    """Python interpreter for the plugin's process, if it has one. Default: the running interpreter."""
