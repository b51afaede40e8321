from __future__ import annotations

import random

import numpy as np
import pytest

from instar.data.linearize import linearize, with_advantage
from instar.errors import StoreError
from instar.types import NOT_SAMPLED, Call, CallStatus, Link, Span
from tests.unit.data.builders import make_call, make_session


def test_linearize_matches_the_example_in_types() -> None:
    first = make_call("a", [1, 2], [7, 8], version=4)
    second = make_call("b", [3], [9], parent=first, version=4)
    (sample,) = linearize(make_session(), [first, second])
    assert sample.token_ids.tolist() == [1, 2, 7, 8, 3, 9]
    assert sample.mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert sample.versions.tolist() == [-1, -1, 4, 4, -1, 4]
    nan = np.nan
    np.testing.assert_allclose(sample.logprobs, [nan, nan, -0.07, -0.08, nan, -0.09], rtol=1e-6)
    assert sample.spans == (Span("a", 2, 2), Span("b", 5, 1))
    assert with_advantage(sample, 0.5).advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0.5]
    assert with_advantage(sample, 0.5, {"b": 1.0}).advantages.tolist() == [0, 0, 0.5, 0.5, 0, 1.5]


def test_branches_train_shared_tokens_once() -> None:
    a = make_call("a", [1], [5, 6])
    b = make_call("b", [2], [7], parent=a)
    c = make_call("c", [3], [8], parent=b)
    d = make_call("d", [4], [9], parent=b)
    first, second = linearize(make_session(), [a, b, c, d])
    assert first.token_ids.tolist() == [1, 5, 6, 2, 7, 3, 8]
    assert first.mask.tolist() == [0, 1, 1, 0, 1, 0, 1]
    assert second.token_ids.tolist() == [1, 5, 6, 2, 7, 4, 9]
    assert second.mask.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert not np.isnan(second.logprobs[[1, 2, 4, 6]]).any(), "sampled tokens keep their logprobs"
    assert [span.call_id for span in second.spans] == ["a", "b", "d"]


def test_siblings_and_rewritten_histories_start_new_walks() -> None:
    a = make_call("a", [1], [5])
    sibling = make_call("a2", [1], [6], link=Link.SIBLING, parent_id="a")
    rewritten = make_call("r", [1, 4], [7], link=Link.BRANCH)
    samples = linearize(make_session(), [a, sibling, rewritten])
    assert [sample.token_ids.tolist() for sample in samples] == [[1, 5], [1, 6], [1, 4, 7]]
    assert sum(sample.trained_tokens for sample in samples) == 3


def test_sample_keys_are_based_on_the_slot_or_the_session() -> None:
    calls = [make_call("a", [1], [5]), make_call("b", [2], [6])]
    keys = [sample.sample_key for sample in linearize(make_session(group_id="g", slot=3), calls)]
    assert keys == ["g/3/0", "g/3/1"]
    assert [sample.sample_key for sample in linearize(make_session("x"), calls)] == ["x/0", "x/1"]


def test_untrainable_calls_are_context_only() -> None:
    a = make_call("a", [1], [5], trainable=False, reason="redacted")
    b = make_call("b", [2], [6], parent=a)
    aborted = make_call("c", [3], [7], status=CallStatus.ABORTED)
    (sample,) = linearize(make_session(), [a, b, aborted])
    assert sample.sample_key == "s/0", "the aborted walk has no token to train and is omitted"
    assert sample.mask.tolist() == [0, 0, 0, 1]
    assert sample.versions.tolist() == [NOT_SAMPLED, 0, NOT_SAMPLED, 0]


def test_call_without_stored_tokens_is_omitted() -> None:
    a = make_call("a", [1], [5])
    redacted = make_call("b", [], [], link=Link.EXTENDS, parent_id="a", trainable=False, reason="redacted")
    (sample,) = linearize(make_session(), [a, redacted])
    assert sample.token_ids.tolist() == [1, 5]


def test_behavior_logprobs_are_set_if_any_call_has_them() -> None:
    a = make_call("a", [1], [5])
    b = make_call("b", [2], [6], parent=a, behavior_logprobs=np.array([-0.5], np.float32))
    (sample,) = linearize(make_session(), [a, b])
    assert sample.behavior_logprobs is not None
    np.testing.assert_allclose(sample.behavior_logprobs, [np.nan, -0.05, np.nan, -0.5], rtol=1e-6)


def test_linearize_with_contradictory_links_raises() -> None:
    a = make_call("a", [1], [5])
    contradicting = make_call("b", [1, 6, 2], [7], link=Link.EXTENDS, parent_id="a")
    with pytest.raises(StoreError, match=r"b .*extending call a.*2 tokens"):
        linearize(make_session(), [a, contradicting])
    with pytest.raises(StoreError, match="extends call a, which is not in session"):
        linearize(make_session(), [make_call("b", [2], [6], parent=a)])
    without_logprob = make_call("c", [1], [5], logprobs=np.array([np.nan], np.float32))
    with pytest.raises(StoreError, match="c is marked trainable"):
        linearize(make_session(), [without_logprob])


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_train_every_token_once(seed: int) -> None:
    """Each trainable token is trained once, at its position and with its own logprob and version."""
    rng = random.Random(seed)
    calls: list[Call] = []
    for number in range(rng.randint(1, 25)):
        has_parent = bool(calls) and rng.random() < 0.8
        calls.append(
            make_call(
                f"c{number}",
                [rng.randint(1, 50) for _ in range(rng.randint(1, 4))],
                [rng.randint(1, 50) for _ in range(rng.randint(0, 4))],
                parent=rng.choice(calls) if has_parent else None,
                version=number,
                trainable=rng.random() < 0.8,
            )
        )
    samples = linearize(make_session(), calls)
    by_id = {call.call_id: call for call in calls}
    trained: list[tuple[str, int]] = []
    for sample in samples:
        sampled = np.zeros(len(sample), bool)
        for span in sample.spans:
            call, positions = by_id[span.call_id], slice(span.start, span.start + span.length)
            sampled[positions] = True
            assert sample.token_ids[: span.start].tolist() == call.prompt_ids.tolist()
            assert sample.token_ids[positions].tolist() == call.sampled_ids.tolist()
            assert sample.logprobs[positions].tolist() == call.logprobs.tolist()
            assert (sample.versions[positions] == call.versions).all()
            trained += [(span.call_id, i) for i in np.flatnonzero(sample.mask[positions])]
        assert np.isnan(sample.logprobs[~sampled]).all()
        assert (sample.versions[~sampled] == NOT_SAMPLED).all()
        assert (sample.mask[~sampled] == 0).all()
        assert sample.trained_tokens > 0
    expected = [(c.call_id, i) for c in calls if c.trainable for i in range(len(c.sampled_ids))]
    assert sorted(trained) == sorted(expected)
