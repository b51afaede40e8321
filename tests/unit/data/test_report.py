from __future__ import annotations

import numpy as np
import pytest

from instar.data.linearize import linearize
from instar.data.report import report_outputs
from instar.types import Sample, Span
from tests.unit.data.builders import make_call, make_session


def make_sample(*tokens: int) -> Sample:
    """Return a sample of two prompt tokens followed by the sampled ``tokens``."""
    count = 2 + len(tokens)
    zeros = np.zeros(count, np.float32)
    versions = np.array([-1, -1, *(0 for _ in tokens)], np.int32)
    ids = np.array([1, 2, *tokens], np.int32)
    return Sample("k", "s", ids, zeros, zeros, zeros, versions, spans=(Span("c", 2, len(tokens)),))


def test_report_outputs_counts_identical_outputs_per_group() -> None:
    equal, different = [make_sample(5, 6)], [make_sample(5, 7)]
    report = report_outputs([[equal, equal, different], [equal, different]])
    assert report == {"output_tokens_mean": 2.0, "output_repetition": 0.0, "identical_share": 0.4}


def test_output_repetition_counts_repeated_4_grams() -> None:
    report = report_outputs([[[make_sample(*[5] * 9)], [make_sample(*range(9))]]])
    assert report["output_repetition"] == (1 - 1 / 6) / 2
    assert report_outputs([[[]]]) == {}


def test_report_outputs_with_branches_counts_shared_call_once() -> None:
    first = make_call("first", [1, 2], range(10, 110))
    branches = [make_call(f"branch {i}", [3, 4 + i], [200 + i, 300 + i], parent=first) for i in range(5)]
    report = report_outputs([[linearize(make_session(), [first, *branches])]])
    assert report["output_tokens_mean"] == 110
    assert report["output_repetition"] == pytest.approx(0.0)
