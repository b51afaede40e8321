"""Names → classes: every built-in one resolves, others come by entry points, mistakes are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from instar import registry
from instar.config import PluginConfig, ScriptedEngineConfig
from instar.errors import ConfigError

LIGHT = [
    (kind, name)
    for kind, table in registry.BUILTIN.items()
    for name in table
    if kind in ("stores", "tasks", "agents", "rewards", "dialects")
]


@pytest.mark.parametrize(("kind", "name"), LIGHT)
def test_every_built_in_name_resolves(kind: str, name: str) -> None:
    assert callable(registry.resolve(kind, name))


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown engine 'vllmm'; known: local, scripted"):
        registry.resolve("engines", "vllmm")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("instar.registry", "is not of the form 'package.module:attribute'"),
        ("instar.nowhere:x", "cannot import 'instar.nowhere'"),
        ("instar.registry:nothing", "'instar.registry' has no 'nothing'"),
        ("instar.registry:resolve.nothing", "'instar.registry' has no 'resolve.nothing'"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        registry.load_object(path)


def test_a_nested_attribute_is_found() -> None:
    assert registry.load_object("pathlib:Path.home") == Path.home


def test_another_package_adds_a_variant_by_an_entry_point(tmp_path: Path) -> None:
    """With an installed package's metadata on the path, as pip would leave it."""
    metadata = tmp_path / "instar_extra-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: instar-extra\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[instar.engines]\nextra = instar_extra:ExtraEngine\n")
    (tmp_path / "instar_extra.py").write_text("class ExtraEngine: pass\n")
    code = (
        "from instar import registry\n"
        "print(registry.list_names('engines'), registry.resolve('engines', 'extra').__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "['extra', 'local', 'scripted', 'vllm'] ExtraEngine", done.stderr


def test_a_config_names_a_plugin_by_entry_point_or_path() -> None:
    by_path = PluginConfig(type="plugin", name="instar.engines.scripted:ScriptedEngine")
    assert registry.resolve_section("engines", by_path).__name__ == "ScriptedEngine"
    assert registry.resolve_section("engines", ScriptedEngineConfig()) is registry.resolve_section(
        "engines", by_path
    )
    with pytest.raises(ConfigError, match="unknown engine 'nowhere'"):
        registry.resolve_section("engines", PluginConfig(type="plugin", name="nowhere"))
