"""Tests for the public surface: version, light imports, a fast `--help`, type information and docs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import instar
from instar.config import RunConfig

ROOT = Path(__file__).parents[2]
HEAVY_PACKAGES = ("torch", "transformers", "peft", "renderers", "matplotlib", "openai")
LIGHT_MODULES = [
    "instar.types",
    "instar.errors",
    "instar.config",
    "instar.registry",
    "instar.client",
    "instar.models",
    "instar.cli.main",
    "instar.cli.config",
    "instar.cli.backends",
    "instar.config.base",
    "instar.store.base",
    "instar.engines.base",
    "instar.engines.cloud.base",
    "instar.backends.base",
    "instar.sync.base",
    "instar.record.base",
    "instar.rewards.base",
    "instar.rewards.sandbox.base",
    "instar.rollout.base",
    "instar.clouds.base",
    "instar.cluster.base",
    "instar.live.base",
    "instar.protocol.base",
    "instar.curation.base",
    "instar.reference.base",
    "instar.simulate.base",
    "instar.gateway.base",
    "instar.gateway.dialects.base",
    "instar.gateway.upstream.base",
]


def test_package_has_its_version_and_type_information() -> None:
    assert instar.__version__ == importlib.metadata.version("instar")
    assert (Path(instar.__file__).parent / "py.typed").is_file()


def test_light_modules_import_nothing_heavy() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT_MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {HEAVY_PACKAGES!r} if heavy in sys.modules]\n"
        "    assert not loaded, f'{name} imports {loaded}'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_light_modules_include_every_base_module() -> None:
    bases = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "instar").rglob("base.py")
    }
    assert bases <= set(LIGHT_MODULES)


def test_help_is_fast() -> None:
    command = [str(Path(sys.executable).with_name("instar")), "--help"]
    seconds: list[float] = []
    for _ in range(5):
        before = os.times()
        help_text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        after = os.times()
        # Measure CPU time, because the machine may be busy.
        seconds.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    assert min(seconds) < 0.3, seconds
    for command_name in ("demo", "train", "serve", "report", "doctor", "config", "sessions"):
        assert re.search(rf"^\s+{command_name}\b", help_text, re.MULTILINE), command_name


def test_configuration_reference_is_current() -> None:
    from instar.cli.reference import render_settings

    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == render_settings(), "run `make docs`"


@pytest.mark.parametrize(
    "page", ["README.md", "AGENTS.md", "docs/concepts.md", "docs/backends.md", "docs/measurements.md"]
)
def test_files_named_in_docs_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    linked = re.findall(r"\]\((?!https?://)([^)#]+)[^)]*\)", text)
    named = re.findall(r"`((?:instar|docs|tests|bench|recipes)/[\w./-]+\.\w+)`", text)
    base = (ROOT / page).parent
    missing = [link for link in linked if not (base / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_agents_page_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) < 80


def test_readme_config_is_valid() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    config = RunConfig.model_validate(yaml.safe_load(block))
    assert config.name == "my-agent"
    assert config.rollout is not None


def test_tool_format_in_docs_matches_the_code() -> None:
    from instar.record.tool_calls import format_call, format_tool_list
    from instar.types import Tool, ToolCall

    schema = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    listed = format_tool_list([Tool(name="calc", description="Evaluate arithmetic.", parameters=schema)])
    called = format_call(ToolCall(id="", name="calc", arguments='{"expression": "24 * 310"}'))
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert f"```\n{listed}\n```" in page
    assert f"```\n{called}\n```" in page


def test_docs_list_every_group_field_and_public_member_of_the_client() -> None:
    from instar import client
    from instar.gateway import base

    page = (ROOT / "docs" / "groups.md").read_text(encoding="utf-8")
    for message_type in (base.OpenGroup, base.GroupView, base.SlotView):
        for name in message_type.__struct_fields__:
            assert re.search(rf"`{name}`", page), f"{message_type.__name__}.{name}"
    internal = {"request", "request_group", "view", "url", "max_wait"}
    for member in (client.Client, client.Group, client.Slot):
        for name in {name for name in vars(member) if not name.startswith("_")} - internal:
            assert re.search(rf"\b{name}\b", page), f"{member.__name__}.{name}"


def test_client_exports_its_public_names() -> None:
    from instar import client

    assert client.__all__ == ["Client", "Group", "Slot"]


def test_docs_list_every_control_field() -> None:
    from instar.gateway import base

    page = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
    table = page[page.index("## Control") :]
    for message_type in (base.OpenSession, base.OpenedSession, base.CompleteSession, base.FailSession):
        for field in message_type.__struct_fields__:
            assert re.search(rf"\b{field}\b", table), f"{message_type.__name__}.{field}"
    for field in (*base.RewardBody.__struct_fields__, *base.SAMPLING_KEYS):
        assert re.search(rf"\b{field}\b", table), field
