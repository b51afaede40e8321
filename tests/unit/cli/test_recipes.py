"""Tests that all recipes are valid, and that recipes of the demo run have the demo's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from instar.clouds.base import SERVICES
from instar.types import Json
from tests.unit.cli.conftest import Instar

FOLDER = Path(__file__).parents[3] / "recipes"
BACKENDS = {"local": "local", **{name: name for name in SERVICES}, "vllm": "local", "ray": "local"}
"""The backend type of each recipe that trains the demo run."""
RECIPE_SETTINGS = {"name", "backend", "engine", "store", "cluster"}
"""Settings in which a recipe may differ from the demo."""


@pytest.mark.parametrize("name", BACKENDS)
def test_recipe_matches_the_demo(name: str, instar: Instar) -> None:
    demo = instar("config", "show", "--json").json
    recipe = instar("config", "show", FOLDER / f"{name}.yaml", "--json").json
    assert recipe["name"] == f"demo-{name}"
    assert recipe["backend"]["type"] == BACKENDS[name]
    assert {key: recipe[key] for key in recipe.keys() - RECIPE_SETTINGS} == {
        key: demo[key] for key in demo.keys() - RECIPE_SETTINGS
    }


def check_recipe(instar: Instar, name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> Json:
    for service in SERVICES.values():
        monkeypatch.setenv(service.key_env, f"{(*service.key_prefixes, '')[0]}test-key-0123456789")
        monkeypatch.delenv(service.url_env, raising=False)
    return instar("config", "check", FOLDER / f"{name}.yaml", "--json", *options).json


@pytest.mark.parametrize(
    "name", sorted(recipe.stem for recipe in FOLDER.glob("*.yaml") if recipe.stem != "mint")
)
def test_recipe_passes_config_check(name: str, instar: Instar, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_recipe(instar, name, monkeypatch)
    assert report["ok"], report["mistakes"]


def test_mint_recipe_lacks_only_its_environment(
    instar: Instar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """tests/integration/backends runs the recipe in that environment."""
    python = tmp_path / "mint-env" / "bin" / "python"
    (mistake,) = check_recipe(instar, "mint", monkeypatch, "--set", f"backend.python={python}")["mistakes"]
    assert mistake == f"backend.python: cannot run {str(python)!r}: No such file or directory"
