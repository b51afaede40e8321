"""Tests that kill points name existing functions. Otherwise, only the rarely run torture tests would fail."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tests.torture.kill_switch import RECOVERY_POINTS, STEP_POINTS, KillPoint
from tests.torture.service_points import BACKEND_CLASSES, make_kill_points

ALL_POINTS = {
    **{f"local {name}": point for name, point in (STEP_POINTS | RECOVERY_POINTS).items()},
    **{
        f"{backend} {name}": point
        for backend in BACKEND_CLASSES
        for name, point in make_kill_points(backend).items()
    },
}


@pytest.mark.parametrize("point", ALL_POINTS.values(), ids=ALL_POINTS.keys())
def test_kill_point_names_an_existing_function(point: KillPoint) -> None:
    module_name, _, path = point.target.partition(":")
    target: Any = import_module(module_name)
    for name in path.split("."):
        target = getattr(target, name)
    assert callable(target)
