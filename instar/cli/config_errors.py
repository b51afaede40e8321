"""Explain the errors in a run's settings, one line each: the path, what is wrong, and the value."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from instar.config import RunConfig
from instar.types import Json

MAX_SHOWN_LENGTH = 80
"""Maximum number of characters of a value in a message."""


def explain(error: ValidationError, settings: Json | None = None) -> list[str]:
    """Return one line for each invalid setting. If the user wrote a single section instead of a list in
    ``settings``, the parsed file, its path has no index."""
    by_path: dict[str, list[tuple[str, str]]] = {}
    for item in error.errors():
        location = item["loc"]
        match location:
            case (str() as name, int(), *rest) if not isinstance((settings or {}).get(name), list):
                location = (name, *rest)  # the user wrote one section, not a list
            case _:
                pass
        path, problem, details = _explain(*locate(location), item)
        by_path.setdefault(path, []).append((problem, details))
    return [f"{path}: {_join(problems)}" if path else _join(problems) for path, problems in by_path.items()]


def _join(problems: Sequence[tuple[str, str]]) -> str:
    """Join the errors of one setting. Pydantic reports one for each type that the setting accepts."""
    texts = dict.fromkeys(problem for problem, _ in problems)
    details = max((details for _, details in problems), key=len)
    return " or ".join(texts).replace(" or must be ", " or ") + details


def _explain(path: str, section: type[BaseModel] | None, item: Any) -> tuple[str, str, str]:
    """Return the path of the setting, what is wrong with it, and the details that follow in the message."""
    value, context = "…" if path.endswith("api_key") else item["input"], item.get("ctx", {})
    got = f", got {_shorten(value)}"
    match item["type"]:
        case "extra_forbidden":
            known = sorted(section.model_fields) if section else []
            available = f". Available: {', '.join(known)}" if known else ""
            return path, "unknown setting", f"{_suggest(path.rpartition('.')[2], known)}{available}"
        case "missing":
            return path, "required setting is missing", ""
        case "literal_error":
            allowed = _parse_words(context["expected"])
            return path, f"must be {_join_choices(allowed)}", f"{got}{_suggest(value, allowed)}"
        case "union_tag_invalid":
            tag, allowed = context["tag"], _parse_words(context["expected_tags"])
            details = f", got {_shorten(tag)}{_suggest(tag, allowed)}"
            return f"{path}.type", f"must be {_join_choices(allowed)}", details
        case "union_tag_not_found":
            choices = _join_choices(allowed_types(path))
            return f"{path}.type", f"required setting is missing; must be {choices}", ""
        case "model_type" | "model_attributes_type" | "dict_type":
            return path, "must be a section with `setting: value` lines", got
        case "value_error":
            return path, str(context["error"]), ""
        case _:
            # Shorten, for example, "Input should be a valid integer, got a number with a fractional part".
            text = re.sub(r", (unable|got) .*", "", re.sub(r"^\w+ should", "must", item["msg"]))
            return path, f"{text[:1].lower()}{text[1:]}", got


def _suggest(value: Any, allowed: Sequence[str]) -> str:
    """Return a did-you-mean hint for an error message, or an empty string if no allowed word is similar."""
    close = difflib.get_close_matches(str(value), allowed, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _join_choices(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}…"


def _parse_words(text: str) -> list[str]:
    """Return the words in a pydantic message such as ``'a', 'b' or 'c'``."""
    return [word.strip(" '") for word in text.replace(" or ", ", ").split(",")]


def locate(location: Sequence[str | int]) -> tuple[str, type[BaseModel] | None]:
    """Return the dotted path without pydantic's union tags and type names, and the class of its section."""
    path: list[str] = []
    parent: type[BaseModel] | None = None
    candidates: list[type[BaseModel]] = [RunConfig]
    for part in location:
        tagged = [section for section in candidates if part in type_values(section)]
        if len(candidates) > 1 and tagged:
            candidates = tagged
            continue
        owner = next((section for section in candidates if part in section.model_fields), None)
        if owner is not None:
            parent, candidates = owner, find_section_classes(owner.model_fields[str(part)].annotation)
        elif isinstance(part, str) and "[" in part:
            continue
        else:
            parent = candidates[0] if len(candidates) == 1 else parent
        path.append(str(part))
    return ".".join(path), parent


def allowed_types(path: str) -> list[str]:
    """Return the accepted values of `type` for the section at this path, such as `engine`."""
    candidates: list[type[BaseModel]] = [RunConfig]
    for part in (part for part in path.split(".") if not part.isdigit()):
        fields = [section.model_fields[part] for section in candidates if part in section.model_fields]
        candidates = [section for field in fields for section in find_section_classes(field.annotation)]
    return [name for section in candidates for name in type_values(section)]


def find_section_classes(annotation: Any) -> list[type[BaseModel]]:
    """Return every section class in an annotation, including each variant of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    parts: Iterable[Any] = typing.get_args(annotation)
    return [section for part in parts for section in find_section_classes(part)]


def type_values(section: type[BaseModel]) -> tuple[str, ...]:
    """Return the accepted values of the section's `type`, or an empty tuple if it has no such field."""
    field = section.model_fields.get("type")
    return typing.get_args(field.annotation) if field is not None else ()
