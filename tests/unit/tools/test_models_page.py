"""Tests that docs/models.md is current, and that tools/models_page.py notices if it is not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.test_architecture import FAILING_TYPES, WRONG_TYPES

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def models_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "tools" / "models_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "models.json").read_text())


def test_page_is_current(models_page: ModuleType, results: dict[str, Any]) -> None:
    assert models_page.find_problem(results, (ROOT / "docs" / "models.md").read_text()) is None


def test_missing_type_and_changed_result_are_noticed(
    models_page: ModuleType, results: dict[str, Any]
) -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    changed = results | {"families": results["families"] | {"qwen3": results["families"]["gemma-2"]}}
    assert "make docs" in models_page.find_problem(changed, page)
    del results["types"]["llama"]
    assert "llama in types" in models_page.find_problem(results, page)


def test_page_names_the_reasons_for_refusals_without_their_advice(models_page: ModuleType) -> None:
    detail = (
        "The local engine does not support the model '/model': it has | and more. Set engine.type to vllm."
    )
    row = {"outcome": "refused", "detail": detail}
    assert models_page._split_refusal(row) == ("engine", "it has \\| and more")


def test_no_published_result_is_wrong(results: dict[str, Any]) -> None:
    outcomes = {name: row["outcome"] for name, row in results["types"].items()}
    assert set(outcomes.values()) == {"right", "refused"}
    known = [name for name in (*WRONG_TYPES, *FAILING_TYPES) if name in outcomes]
    assert {outcomes[name] for name in known} == {"refused"}
    assert {outcomes[name] for name in ("llama", "qwen3", "gemma")} == {"right"}
    fractions = ("linked", "trained", "exact_possible")
    assert all(row[name] == 1 for row in results["families"].values() for name in fractions)
