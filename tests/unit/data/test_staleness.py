from __future__ import annotations

import numpy as np
import pytest

from instar.data.staleness import Staleness

AGAIN = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3}
"""The steps 2 and 3 were undone and trained again."""


@pytest.mark.parametrize(
    ("version", "steps", "of", "is_"),
    [
        (5, {}, [5, 4, 0], [0, 1, 5]),
        (5, AGAIN, [5, 4, 1, 0], [0, 1, 2, 3]),
        (5, AGAIN, [3, 2], [0, 1]),  # sampled by a version that was undone
        (1, AGAIN, [3, 2], [0, 0]),  # and trained into the version that was restored
    ],
)
def test_staleness_is_counted_in_steps(
    version: int, steps: dict[int, int], of: list[int], is_: list[int]
) -> None:
    assert Staleness(version, steps).of_tokens(np.array(of, np.int32)).tolist() == is_
