"""YAML → RunConfig. A mistake is explained by the setting's path, what was given, what is allowed."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from instar.config import RunConfig
from instar.errors import ConfigError

DEMO = Path(__file__).parent.parent / "demo" / "run.yaml"


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override, validate. Python functions that the file names may live beside it."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a run is described by a mapping of sections, not by a {_kind(data)}")
    _importable(path.resolve().parent)
    return validate(apply_overrides(data, overrides), str(path))


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        _apply(data, override)
    return data


def validate(data: dict[str, Any], origin: str) -> RunConfig:
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        mistakes = [explain(item) for item in error.errors()]
        listed = "\n".join(f"  {mistake}" for mistake in mistakes)
        raise ConfigError(f"{origin}: {len(mistakes)} mistake(s)\n{listed}") from error


def explain(item: Any) -> str:
    """One pydantic error in a line: path, what was given, what is allowed."""
    path, section = _locate(item["loc"])
    given, context = item["input"], item.get("ctx", {})
    match item["type"]:
        case "extra_forbidden":
            allowed = sorted(section.model_fields) if section else []
            return f"{path}: no such setting{_suggest(path.rpartition('.')[2], allowed)}"
        case "missing":
            return f"{path}: missing; it has no default"
        case "literal_error":
            allowed = [word.strip(" '") for word in context["expected"].replace(" or ", ", ").split(",")]
            return f"{path}: {given!r} is not allowed{_suggest(str(given), allowed)}"
        case "union_tag_invalid":
            allowed = [word.strip(" '") for word in context["expected_tags"].split(",")]
            return f"{path}.type: {context['tag']!r} is not allowed{_suggest(context['tag'], allowed)}"
        case "union_tag_not_found":
            return f"{path}.type: missing; it says which kind this is"
        case "value_error":
            return f"{path}: {context['error']}" if path else str(context["error"])
        case _:
            return f"{path}: given {given!r}; {item['msg'][:1].lower()}{item['msg'][1:]}"


def _locate(location: tuple[str | int, ...]) -> tuple[str, type[BaseModel] | None]:
    """The dotted path without pydantic's union tags, and the section that holds its last part."""
    path: list[str] = []
    section: type[BaseModel] | None = RunConfig
    for part in location:
        if section is not None and part in section.model_fields:
            holder = section
            section = _section_of(section.model_fields[str(part)].annotation)
            path.append(str(part))
            if part == location[-1]:
                section = holder
        elif (tagged := _tagged(section, path, part)) is not None:
            section = tagged
        else:
            path.append(str(part))
    return ".".join(path), section


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _sections_in(part)]


def _section_of(annotation: Any) -> type[BaseModel] | None:
    found = _sections_in(annotation)
    return found[0] if len(found) == 1 else None


def _tagged(section: type[BaseModel] | None, path: list[str], tag: str | int) -> type[BaseModel] | None:
    """The variant of a union that a tag names."""
    if section is not None or not path:
        return None
    holder: type[BaseModel] | None = RunConfig
    for part in path[:-1]:
        holder = _section_of(holder.model_fields[part].annotation) if holder else None
    if holder is None or path[-1] not in holder.model_fields:
        return None
    for variant in _sections_in(holder.model_fields[path[-1]].annotation):
        field = variant.model_fields.get("type")
        if field is not None and tag in getattr(field.annotation, "__args__", ()):
            return variant
    return None


def _suggest(given: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, allowed, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"; allowed: {', '.join(allowed)}{hint}" if allowed else ""


def _apply(data: dict[str, Any], override: str) -> None:
    """``a.b.c=value``, the value read as YAML."""
    path, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: expected PATH=VALUE, for example trainer.steps=5")
    *parents, last = path.split(".")
    for parent in parents:
        child = data.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {parent} is not a section")
        data = child
    data[last] = yaml.safe_load(text)


def _importable(folder: Path) -> None:
    """Functions named in the file may live beside it or in the working folder; roles inherit this."""
    wanted = [str(folder), str(Path.cwd())]
    for path in reversed(wanted):
        if path not in sys.path:
            sys.path.insert(0, path)
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*wanted, *known]))


def _kind(value: object) -> str:
    return {list: "list", str: "text", int: "number", float: "number"}.get(type(value), type(value).__name__)
