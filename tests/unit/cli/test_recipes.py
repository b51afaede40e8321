"""Tests that all recipes are valid, and that the demo recipes match the demo config."""

from __future__ import annotations

from pathlib import Path

import pytest

from instar.clouds.base import SERVICES
from instar.types import Json
from tests.unit.cli.conftest import Instar

FOLDER = Path(__file__).parents[3] / "recipes"
BACKEND_BY_RECIPE = {"local": "local", **{name: name for name in SERVICES}, "vllm": "local", "ray": "local"}
"""The backend type of each demo recipe."""
RECIPE_SETTINGS = {"name", "backend", "engine", "store", "cluster"}
"""Settings in which a demo recipe may differ from the demo config."""


@pytest.mark.parametrize("name", BACKEND_BY_RECIPE)
def test_demo_recipe_matches_the_demo_config(name: str, instar: Instar) -> None:
    demo = instar("config", "show", "--json").json
    recipe = instar("config", "show", FOLDER / f"{name}.yaml", "--json").json
    assert recipe["name"] == f"demo-{name}"
    assert recipe["backend"]["type"] == BACKEND_BY_RECIPE[name]
    assert {key: recipe[key] for key in recipe.keys() - RECIPE_SETTINGS} == {
        key: demo[key] for key in demo.keys() - RECIPE_SETTINGS
    }


def check_recipe(instar: Instar, name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> Json:
    for service in SERVICES.values():
        key_prefix = next(iter(service.key_prefixes), "")
        monkeypatch.setenv(service.key_env, f"{key_prefix}test-key-0123456789")
        monkeypatch.delenv(service.url_env, raising=False)
    return instar("config", "check", FOLDER / f"{name}.yaml", "--json", *options).json


@pytest.mark.parametrize(
    "name", sorted(recipe.stem for recipe in FOLDER.glob("*.yaml") if recipe.stem != "mint")
)
def test_recipe_passes_config_check(name: str, instar: Instar, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_recipe(instar, name, monkeypatch)
    assert report["ok"], report["mistakes"]


def test_mint_recipe_fails_only_on_missing_python(
    instar: Instar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """tests/integration/backends runs the recipe with a Python environment that has MinT."""
    python = tmp_path / "mint-env" / "bin" / "python"
    (error,) = check_recipe(instar, "mint", monkeypatch, "--set", f"backend.python={python}")["mistakes"]
    assert error == f"backend.python: cannot run {str(python)!r}: No such file or directory"
