"""Explain mistakes in a run's settings, one line each: the path, the value, and what is allowed."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from instar.config import RunConfig
from instar.types import Json

MAX_SHOWN_LENGTH = 80
"""The maximum number of characters of a value in a message."""


def explain(error: ValidationError, settings: Json | None = None) -> list[str]:
    """Return one line for each wrong setting. ``settings`` is the parsed file. It is needed to tell a single
    section from a list of sections."""
    by_path: dict[str, list[str]] = {}
    for item in error.errors():
        location = item["loc"]
        match location:
            case (str() as name, int(), *rest) if not isinstance((settings or {}).get(name), list):
                location = (name, *rest)  # the user wrote one section, not a list
            case _:
                pass
        path, text = _explain(*locate(location), item)
        by_path.setdefault(path, []).append(text)
    # pydantic reports an error for each type that a setting accepts.
    return [
        f"{path}: {' or '.join(dict.fromkeys(texts))}" if path else "; ".join(texts)
        for path, texts in by_path.items()
    ]


def _explain(path: str, section: type[BaseModel] | None, item: Any) -> tuple[str, str]:
    value, context = "…" if path.endswith("api_key") else item["input"], item.get("ctx", {})
    match item["type"]:
        case "extra_forbidden":
            known = sorted(section.model_fields) if section else []
            return path, f"unknown setting{suggest(path.rpartition('.')[2], known)}"
        case "missing":
            return path, "missing; it has no default"
        case "literal_error":
            return path, f"given {_shorten(value)}{suggest(value, _parse_words(context['expected']))}"
        case "union_tag_invalid":
            allowed = _parse_words(context["expected_tags"])
            return f"{path}.type", f"given {_shorten(context['tag'])}{suggest(context['tag'], allowed)}"
        case "union_tag_not_found":
            kinds = [word for kind in section_kinds(path) for word in kind]
            return f"{path}.type", f"missing; it selects the variant{suggest('', kinds)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return path, f"given {_shorten(value)}; a section is a mapping with one `setting: value` per line"
        case "value_error":
            return path, str(context["error"])
        case _:
            allowed = item["msg"].replace("Input should be", "it must be")
            return path, f"given {_shorten(value)}; {allowed[:1].lower()}{allowed[1:]}"


def suggest(value: Any, allowed: Sequence[str]) -> str:
    """Return the end of a message: the allowed values, and the one that is most similar to ``value``."""
    close = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"; allowed: {', '.join(allowed)}{hint}" if allowed else ""


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}…"


def _parse_words(text: str) -> list[str]:
    """Return the words in a pydantic message such as ``'a', 'b' or 'c'``."""
    return [word.strip(" '") for word in text.replace(" or ", ", ").split(",")]


def locate(location: Sequence[str | int]) -> tuple[str, type[BaseModel] | None]:
    """Return the dotted path without the parts that pydantic adds (union tags, type names), and the section
    class that contains the last part."""
    path: list[str] = []
    parent: type[BaseModel] | None = None
    candidates: list[type[BaseModel]] = [RunConfig]
    for part in location:
        tagged = [section for section in candidates if part in kinds_of(section)]
        if len(candidates) > 1 and tagged:
            candidates = tagged
            continue
        owner = next((section for section in candidates if part in section.model_fields), None)
        if owner is not None:
            parent, candidates = owner, sections_in(owner.model_fields[str(part)].annotation)
        elif isinstance(part, str) and "[" in part:
            continue
        else:
            parent = candidates[0] if len(candidates) == 1 else parent
        path.append(str(part))
    return ".".join(path), parent


def section_kinds(path: str) -> list[tuple[str, ...]]:
    """Return the accepted values of `type` for each variant of the section at this path, such as `engine`."""
    candidates: list[type[BaseModel]] = [RunConfig]
    for part in (part for part in path.split(".") if not part.isdigit()):
        fields = [section.model_fields[part] for section in candidates if part in section.model_fields]
        candidates = [section for field in fields for section in sections_in(field.annotation)]
    return [kinds_of(section) for section in candidates]


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return every section class in an annotation, including each variant of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    parts: Iterable[Any] = typing.get_args(annotation)
    return [section for part in parts for section in sections_in(part)]


def kinds_of(section: type[BaseModel]) -> tuple[str, ...]:
    """Return the accepted values of the section's `type`, or an empty tuple if it has no such field."""
    field = section.model_fields.get("type")
    return typing.get_args(field.annotation) if field is not None else ()
