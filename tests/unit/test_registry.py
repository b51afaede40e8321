"""Tests that the registry resolves built-in names, entry points and import paths, and explains errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from instar import registry
from instar.config import PluginConfig, ScriptedEngineConfig
from instar.errors import ConfigError

BUILTIN_NAMES = [
    (kind, name)
    for kind, table in registry.BUILTIN.items()
    for name in table
    if kind in ("stores", "tasks", "agents", "rewards", "dialects")
]
"""Engines, backends and samplers are left out, because some of them need optional packages."""


@pytest.mark.parametrize(("kind", "name"), BUILTIN_NAMES)
def test_resolve_builtin_name_returns_a_callable(kind: str, name: str) -> None:
    assert callable(registry.resolve(kind, name))


def test_resolve_unknown_name_lists_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown engine 'vllmm'; available: local, scripted"):
        registry.resolve("engines", "vllmm")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("instar.registry", "is not of the form 'package.module:attribute'"),
        ("instar.missing:x", "cannot import 'instar.missing'"),
        ("instar.registry:missing", "'instar.registry' has no attribute 'missing'"),
        ("instar.registry:resolve.missing", "'instar.registry' has no attribute 'resolve.missing'"),
    ],
)
def test_load_object_with_an_invalid_path_raises(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.load_object(path)


def test_load_object_with_a_nested_attribute_returns_it() -> None:
    assert registry.load_object("pathlib:Path.home") == Path.home


def test_resolve_finds_entry_points_of_other_packages(tmp_path: Path) -> None:
    """The test writes the metadata that pip would write for an installed package."""
    metadata = tmp_path / "instar_extra-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: instar-extra\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[instar.engines]\nextra = instar_extra:ExtraEngine\n")
    (tmp_path / "instar_extra.py").write_text("class ExtraEngine: pass\n")
    code = (
        "from instar import registry\n"
        "print(registry.list_names('engines'), registry.resolve('engines', 'extra').__name__)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert completed.stdout.strip() == "['extra', 'local', 'scripted', 'vllm'] ExtraEngine", completed.stderr


def test_resolve_section_accepts_a_plugin_by_path() -> None:
    by_path = PluginConfig(type="plugin", name="instar.engines.scripted:ScriptedEngine")
    assert registry.resolve_section("engines", by_path).__name__ == "ScriptedEngine"
    assert registry.resolve_section("engines", ScriptedEngineConfig()) is registry.resolve_section(
        "engines", by_path
    )
    with pytest.raises(ConfigError, match="unknown engine 'missing'"):
        registry.resolve_section("engines", PluginConfig(type="plugin", name="missing"))
