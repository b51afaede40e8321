"""Write or check docs/configuration.md (from instar/config) and docs/openapi.json (from the routes)."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from instar.cli.config_errors import find_section_classes, type_values
from instar.config import GatewayConfig, RunConfig
from instar.gateway.app import GatewayApp, create_app
from instar.store.sqlite import SqliteStore

HEAD = """# Configuration

One YAML file describes a run. This page is generated from `instar/config/` (`make docs`);
`instar config check run.yaml` reports errors, `instar config show run.yaml` prints every setting.
Some sections have several types; `type` selects one, and each type has its own settings. A relative path in
the file is relative to the file's folder; a relative path in `--set` is relative to the working directory.
"""


async def create_app_without_engine() -> GatewayApp:
    """Return a gateway app with all routes, to generate their description. It cannot handle requests."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "store.db")
        app = create_app(
            store=store,
            engine=None,
            renderer=None,
            run_id="run",
            agent_id="agent",
            policy_id="policy",
            config=GatewayConfig(),
            admin_key="none",
        )
        await store.close()
    return app


async def render_api() -> str:
    """Return the OpenAPI description of the gateway's routes."""
    return json.dumps((await create_app_without_engine()).description, indent=1) + "\n"


def render_settings() -> str:
    return "\n".join([HEAD, *_render_section(RunConfig, "", set())]).rstrip() + "\n"


def _render_section(section: type[BaseModel], path: str, rendered: set[tuple[str, str]]) -> Iterator[str]:
    """Yield the Markdown parts of a section and its subsections, except those already in ``rendered``."""
    if (path, section.__name__) in rendered:
        return
    rendered.add((path, section.__name__))
    title = f"`{path}`" if path else "The run"
    if types := type_values(section):
        title += f" with `type: {types[0]}`"
    yield f"\n## {title}\n\n{(section.__doc__ or '').strip()}\n"
    rows: list[str] = []
    subsections: list[tuple[type[BaseModel], str]] = []
    for name, field in section.model_fields.items():
        if name == "type":
            continue
        children = find_section_classes(field.annotation)
        subsections += [(child, f"{path}.{name}".lstrip(".")) for child in children]
        default = _format_default(field.get_default(call_default_factory=True))
        text = " ".join((field.description or "").split())
        if children and not text:
            text = " ".join((children[0].__doc__ or "").split())
        rows.append(f"| `{name}` | {_format_type(field.annotation)} | {default} | {text} |")
    table = "| setting | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows)
    yield table if rows else "This section has no settings."
    for child, child_path in subsections:
        yield from _render_section(child, child_path, rendered)


def _format_type(annotation: Any) -> str:
    if find_section_classes(annotation):
        return "section"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " \\| ".join(f"`{word}`" for word in arguments)
    if origin is typing.Annotated:
        return _format_type(arguments[0])
    if origin in (list, dict):
        return f"{origin.__name__} of {_format_type(arguments[-1])}"
    if origin is tuple:
        return f"[{', '.join(map(_format_type, arguments))}]"
    if arguments:
        return " \\| ".join(_format_type(part) for part in arguments)
    name: str = annotation.__name__
    return {"NoneType": "null", "str": "text", "Path": "path"}.get(name, name)


def _format_default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, dict) and any(isinstance(item, BaseModel) for item in value.values()):
        return ", ".join(f"`{key}`" for key in value)
    if value is None:
        return "null"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", type=Path, nargs="+", help="Files to write: Markdown or OpenAPI (.json).")
    parser.add_argument("--check", action="store_true", help="Write nothing, and fail if a file is outdated.")
    arguments = parser.parse_args()
    for path in arguments.paths:
        text = asyncio.run(render_api()) if path.suffix == ".json" else render_settings()
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is outdated; run `make docs`.")


if __name__ == "__main__":
    main()
