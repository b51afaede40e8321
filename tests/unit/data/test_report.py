from __future__ import annotations

import numpy as np
import pytest

from instar.data.linearize import linearize
from instar.data.report import report_outputs
from instar.types import Sample, Span
from tests.unit.data.builders import make_call, make_session


def sample(*tokens: int) -> Sample:
    """Two tokens of a prompt, then these, all sampled."""
    count = 2 + len(tokens)
    zeros = np.zeros(count, np.float32)
    versions = np.array([-1, -1, *(0 for _ in tokens)], np.int32)
    ids = np.array([1, 2, *tokens], np.int32)
    return Sample("k", "s", ids, zeros, zeros, zeros, versions, spans=(Span("c", 2, len(tokens)),))


def test_outputs_are_compared_within_their_group() -> None:
    same, other = [sample(5, 6)], [sample(5, 7)]
    report = report_outputs([[same, same, other], [same, other]])
    assert report == {"output_tokens_mean": 2.0, "output_repetition": 0.0, "identical_share": 0.4}


def test_repetition_counts_runs_of_four_tokens() -> None:
    report = report_outputs([[[sample(*[5] * 9)], [sample(*range(9))]]])
    assert report["output_repetition"] == (1 - 1 / 6) / 2
    assert report_outputs([[[]]]) == {}


def test_what_several_walks_go_on_from_counts_once() -> None:
    first = make_call("first", [1, 2], range(10, 110))
    branches = [make_call(f"branch {i}", [3, 4 + i], [200 + i, 300 + i], parent=first) for i in range(5)]
    report = report_outputs([[linearize(make_session(), [first, *branches])]])
    assert report["output_tokens_mean"] == 110
    assert report["output_repetition"] == pytest.approx(0.0)
