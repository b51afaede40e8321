"""What is wrong with a run's settings, each mistake in one line: path, what was given, what is allowed."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from instar.config import RunConfig
from instar.types import Json

SHOWN = 80
"""Longest piece of a given value that is repeated in a message."""


def explain(error: ValidationError, given: Json | None = None) -> list[str]:
    """One line for each setting that is wrong. ``given``: the settings as they were written."""
    by_path: dict[str, list[str]] = {}
    for item in error.errors():
        path, section = locate(_written(item["loc"], given or {}))
        path, text = _explain(path, section, item)
        by_path.setdefault(path, []).append(text)
    # A setting that takes several kinds of value has an error for each of them.
    return [
        f"{path}: {' or '.join(dict.fromkeys(texts))}" if path else "; ".join(texts)
        for path, texts in by_path.items()
    ]


def _explain(path: str, section: type[BaseModel] | None, item: Any) -> tuple[str, str]:
    given, context = "…" if path.endswith("api_key") else item["input"], item.get("ctx", {})
    match item["type"]:
        case "extra_forbidden":
            known = sorted(section.model_fields) if section else []
            return path, f"no such setting{suggest(path.rpartition('.')[2], known)}"
        case "missing":
            return path, "missing; it has no default"
        case "literal_error":
            return path, f"given {_shown(given)}{suggest(given, _words(context['expected']))}"
        case "union_tag_invalid":
            allowed = _words(context["expected_tags"])
            return f"{path}.type", f"given {_shown(context['tag'])}{suggest(context['tag'], allowed)}"
        case "union_tag_not_found":
            kinds = [word for kind in section_kinds(path) for word in kind]
            return f"{path}.type", f"missing; it says which kind this is{suggest('', kinds)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return path, f"given {_shown(given)}; a section is a mapping, one `setting: value` a line"
        case "value_error":
            return path, str(context["error"])
        case _:
            allowed = item["msg"].replace("Input should be", "it must be")
            return path, f"given {_shown(given)}; {allowed[:1].lower()}{allowed[1:]}"


def suggest(given: Any, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(given), allowed, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"; allowed: {', '.join(allowed)}{hint}" if allowed else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _words(listed: str) -> list[str]:
    """pydantic's «'a', 'b' or 'c'» → the words."""
    return [word.strip(" '") for word in listed.replace(" or ", ", ").split(",")]


# --- from pydantic's location to the path that a person wrote -------------------------------------


def _written(location: Sequence[str | int], given: Json) -> list[str | int]:
    """Without the place in a list that a person did not write: one section may stand for a list of one."""
    match location:
        case [str() as name, int(), *rest] if not isinstance(given.get(name), list):
            return [name, *rest]
        case _:
            return list(location)


def locate(location: Sequence[str | int]) -> tuple[str, type[BaseModel] | None]:
    """The dotted path without pydantic's own words (a union's tag, a kind of value), and the section that
    holds its last part."""
    path: list[str] = []
    holder: type[BaseModel] | None = None
    candidates: list[type[BaseModel]] = [RunConfig]
    for part in location:
        tagged = [section for section in candidates if part in kinds_of(section)]
        if len(candidates) > 1 and tagged:
            candidates = tagged
            continue
        found = next((section for section in candidates if part in section.model_fields), None)
        if found is not None:
            holder, candidates = found, sections_in(found.model_fields[str(part)].annotation)
        elif isinstance(part, str) and "[" in part:
            continue
        else:
            holder = candidates[0] if len(candidates) == 1 else holder
        path.append(str(part))
    return ".".join(path), holder


def section_kinds(path: str) -> list[tuple[str, ...]]:
    """The words that `type` takes in the section at this path."""
    candidates: list[type[BaseModel]] = [RunConfig]
    for part in (part for part in path.split(".") if not part.isdigit()):
        fields = [section.model_fields[part] for section in candidates if part in section.model_fields]
        candidates = [found for field in fields for found in sections_in(field.annotation)]
    return [kinds_of(section) for section in candidates]


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Every section that an annotation names, the variants of a union one by one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    parts: Iterable[Any] = typing.get_args(annotation)
    return [found for part in parts for found in sections_in(part)]


def kinds_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The words of a variant's `type`; none for a section without variants."""
    field = section.model_fields.get("type")
    return typing.get_args(field.annotation) if field is not None else ()
