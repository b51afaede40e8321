from __future__ import annotations

import numpy as np

from instar.data.report import output_report
from instar.types import Sample


def sample(*tokens: int) -> Sample:
    """Two tokens of a prompt, then these, all sampled."""
    count = 2 + len(tokens)
    zeros = np.zeros(count, np.float32)
    versions = np.array([-1, -1, *(0 for _ in tokens)], np.int32)
    return Sample("k", "s", np.array([1, 2, *tokens], np.int32), zeros, zeros, zeros, versions)


def test_outputs_are_compared_within_their_group() -> None:
    same, other = [sample(5, 6)], [sample(5, 7)]
    report = output_report([[same, same, other], [same, other]])
    assert report == {"output_tokens_mean": 2.0, "output_repetition": 0.0, "identical_share": 0.4}


def test_repetition_counts_runs_of_four_tokens() -> None:
    report = output_report([[[sample(*[5] * 9)], [sample(*range(9))]]])
    assert report["output_repetition"] == (1 - 1 / 6) / 2
    assert output_report([[[]]]) == {}
