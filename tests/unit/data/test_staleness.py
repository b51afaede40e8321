from __future__ import annotations

import numpy as np
import pytest

from instar.data.staleness import Staleness

STEPS_AFTER_ROLLBACK = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3}
"""Step of each version. Steps 2 and 3 were rolled back and retrained as versions 4 and 5."""


@pytest.mark.parametrize(
    ("current", "steps", "versions", "expected"),
    [
        (5, {}, [5, 4, 0], [0, 1, 5]),
        (5, STEPS_AFTER_ROLLBACK, [5, 4, 1, 0], [0, 1, 2, 3]),
        (5, STEPS_AFTER_ROLLBACK, [3, 2], [0, 1]),  # sampled by versions that were rolled back
        (1, STEPS_AFTER_ROLLBACK, [3, 2], [0, 0]),  # newer than the restored version: not stale
    ],
)
def test_staleness_is_counted_in_steps(
    current: int, steps: dict[int, int], versions: list[int], expected: list[int]
) -> None:
    assert Staleness(current, steps).of_tokens(np.array(versions, np.int32)).tolist() == expected
