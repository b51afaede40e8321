"""Runs the learning test from tests/unit/test_learning.py with more seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_learning import check_model_learns


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_model_learns_with_more_seeds(tmp_path: Path, seed: int) -> None:
    await check_model_learns(tmp_path, seed)
