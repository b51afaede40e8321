"""Tests for `instar backends`, backend settings and warnings in other commands, and docs/backends.md."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from instar.backends.factory import get_known_capabilities
from instar.config import RunConfig
from tests.unit.cli.conftest import Instar, SmallRun

KEY = "tml-0123456789-secret"
ENV_PREFIXES = ("TINKER", "MINT", "WEAVER")


@pytest.fixture(autouse=True)
def clear_service_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ENV_PREFIXES:
        monkeypatch.delenv(f"{prefix}_API_KEY", raising=False)
        monkeypatch.delenv(f"{prefix}_BASE_URL", raising=False)


def list_backends(instar: Instar) -> dict[str, Any]:
    return {row["name"]: row for row in instar("backends", "--json").json["backends"]}


def test_backends_table_shows_installed_backends_and_the_auto_choice(
    instar: Instar, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list_backends(instar)
    assert list(rows) == ["local", "tinker", "mint", "weaver", "verl"]
    assert rows["local"]["detected"]
    assert (rows["tinker"]["installed"], rows["tinker"]["version"]) == (True, version("tinker"))
    assert not rows["mint"]["installed"]
    assert "pip install 'instar[mint]'" in rows["mint"]["problem"]
    assert rows["weaver"]["losses"] == ["cross_entropy", "importance_sampling"]
    monkeypatch.setenv("WEAVER_API_KEY", KEY)
    rows = list_backends(instar)
    assert [name for name, row in rows.items() if row["detected"]] == ["weaver"]
    assert rows["weaver"]["why"] == "WEAVER_API_KEY in the environment"
    table = instar("backends").out
    assert "1.19.2" in table
    assert "chosen" in table
    assert KEY not in table


def test_backends_with_two_configured_services_chooses_neither(
    instar: Instar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEAVER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    report = instar("backends", "--json").json
    assert not any(row["detected"] for row in report["backends"])
    assert "weaver (WEAVER_API_KEY" in report["conflict"]
    assert "tinker (TINKER_BASE_URL" in report["conflict"]
    assert "`backend: auto` cannot choose" in instar("backends").out


def test_backends_with_missing_package_shows_the_install_command(
    instar: Instar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_API_KEY", KEY)
    assert "/bin/pip install 'instar[mint]'" in instar("backends").out.replace("\n", "")


# --- other commands -------------------------------------------------------------------------------


def test_config_show_and_check_do_not_reveal_the_key(instar: Instar, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"backend": {"type": "auto", "api_key": KEY, "rank": 8}}))
    show_result = instar("config", "show", path)
    assert yaml.safe_load(show_result.out)["backend"]["api_key"] is None
    checked = instar("config", "check", path, "--json")
    assert checked.json["notes"] == ["backend: tinker (identified by the key's prefix)"]
    invalid = instar("config", "show", path, "--set", f"backend.api_key=[{KEY}")
    assert "--set backend.api_key=…" in invalid.err
    assert KEY not in show_result.out + show_result.err + checked.out + checked.err + invalid.err


def test_report_shows_repeated_warnings_once(instar: Instar, small_run: SmallRun) -> None:
    metrics = small_run.folder / "metrics.jsonl"
    before = metrics.read_text()
    record = json.dumps({"kind": "warning", "step": 0, "time": 0, "text": "training with <x> instead"})
    metrics.write_text(f"{before}{record}\n{record}\n")
    try:
        page = Path(instar("report", small_run.folder, "--json").json["report"]).read_text()
    finally:
        metrics.write_text(before)
    assert page.count("<p class=warn>training with &lt;x&gt; instead</p>") == 1


def test_interpreter_path_is_relative_to_the_config_file(instar: Instar, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("backend: {type: mint, python: ./env/bin/python}\nengine: {type: cloud, python: python3}")
    config = yaml.safe_load(instar("config", "show", path).out)
    assert (config["backend"]["python"], config["engine"]["python"]) == (
        f"{tmp_path}/env/bin/python",
        "python3",
    )


# --- docs/backends.md -----------------------------------------------------------------------------


def test_backends_page_yaml_examples_are_valid() -> None:
    page = (Path(__file__).parents[3] / "docs" / "backends.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 10
    for block in blocks:
        RunConfig.model_validate(yaml.safe_load(block))


def test_backends_page_lists_the_actual_capabilities() -> None:
    page = (Path(__file__).parents[3] / "docs" / "backends.md").read_text(encoding="utf-8")
    for names, losses, reference, full_finetuning in re.findall(
        r"^\| (`.+?) \| (`.+?) \| (yes|no|with an adapter) \| (yes|no) \|$", page, re.M
    ):
        for name in re.findall(r"`(\w+)`", names):
            capabilities = get_known_capabilities(RunConfig.model_validate({"backend": name}).backend)
            assert capabilities is not None
            assert set(re.findall(r"`(\w+)`", losses)) == capabilities.losses
            assert (reference != "no", full_finetuning == "yes") == (
                capabilities.has_reference,
                capabilities.supports_full_finetuning,
            )
