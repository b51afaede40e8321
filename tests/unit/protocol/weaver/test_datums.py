from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from instar.protocol.base import ProtocolError
from instar.protocol.weaver.datums import WeaverBatch, WeaverPassInput, build_outputs, parse_batch
from instar.protocol.weaver.http import json_response, parse_json


def make_datum(tokens: list[int], targets: list[int], **tensors: list[float]) -> dict[str, Any]:
    tensors_by_name = {"target_tokens": targets, **tensors}
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": {
            name: {"data": data, "dtype": "ignored"} for name, data in tensors_by_name.items()
        },
    }


def parse_data(loss: str, *data: dict[str, Any], is_backward: bool = True, **config: Any) -> WeaverBatch:
    body = msgspec.json.encode({"loss_fn": loss, "data": data, "loss_fn_config": config})
    return parse_batch(parse_json(body, WeaverPassInput), vocab_size=100, is_backward=is_backward)


def make_ratio_tensors(count: int) -> dict[str, list[float]]:
    return {"logprobs": [-1.0] * count, "advantages": [0.5] * count, "loss_mask": [1.0] * count}


def test_weaver_tensors_apply_to_the_next_token() -> None:
    batch = parse_data(
        "importance_sampling",
        make_datum([1, 2, 7], [2, 7, 8], logprobs=[0, -2, -3], advantages=[0, 0.0, 0.5], loss_mask=[0, 1, 1]),
    )
    (sample,) = batch.samples
    assert sample.token_ids.tolist() == [1, 2, 7, 8]
    assert sample.token_ids.dtype == np.int32
    assert sample.mask.tolist() == [0, 0, 1, 1]
    assert sample.logprobs[2:].tolist() == [-2, -3]
    assert sample.advantages[2:].tolist() == [0, 0.5]
    assert sample.mask.dtype == sample.logprobs.dtype == sample.advantages.dtype == np.float32


def test_cross_entropy_computes_logprobs_of_every_target() -> None:
    batch = parse_data("cross_entropy", make_datum([1, 2], [2, 3], weights=[0, 0.5]), make_datum([4], [5]))
    assert batch.samples[0].mask.tolist() == [0, 1, 1]
    assert batch.samples[0].advantages[1:].tolist() == [0, 0.5]
    assert batch.samples[1].advantages[1:].tolist() == [1]


def test_cross_entropy_uses_loss_mask() -> None:
    batch = parse_data("cross_entropy", make_datum([1, 2], [2, 3], weights=[0, 0.5], loss_mask=[0, 1]))
    assert batch.samples[0].mask.tolist() == [0, 0, 1]


def test_missing_targets_are_not_trained() -> None:
    batch = parse_data("cross_entropy", make_datum([1, 2, 3], [-100, 3, -100]), make_datum([4], [-100]))
    first, second = batch.samples
    assert first.token_ids.tolist() == [1, 2, 3]
    assert first.mask.tolist() == [0, 0, 1]
    assert second.token_ids.tolist() == [4]
    assert not second.mask.any()
    actual = build_outputs(
        batch, [np.array([np.nan, np.nan, -2], np.float32), np.array([np.nan], np.float32)]
    )
    body = bytes(json_response([output["logprobs"]["data"] for output in actual]).body)
    assert body == b"[[NaN,-2.0,NaN],[NaN]]"


def test_surrogate_loss_uses_surrogate_weights() -> None:
    batch = parse_data(
        "surrogate", make_datum([1, 2], [2, 3], surrogate_weights=[0.25, -1], weights=[1, 1], extra=[1, 1])
    )
    assert batch.loss is not None
    assert batch.loss.name == "cross_entropy"
    assert batch.samples[0].advantages[1:].tolist() == [-0.25, 1]
    assert batch.samples[0].mask.tolist() == [0, 1, 1]


def test_chunks_are_concatenated() -> None:
    datum = make_datum([1, 2], [2, 3])
    datum["model_input"]["chunks"] = [{"tokens": [1]}, {"type": "encoded_text", "tokens": [2]}]
    assert parse_data("cross_entropy", datum).samples[0].token_ids.tolist() == [1, 2, 3]


def test_outputs_contain_the_datum_id() -> None:
    # Missing logprobs are written as NaN instead of null, which must not change the id "null".
    batch = parse_data(
        "forward_logprob", {**make_datum([1, 2], [2, 3]), "datum_id": "null"}, is_backward=False
    )
    assert batch.loss is None
    (output,) = build_outputs(batch, [np.array([np.nan, -1, -2], np.float32)])
    body = json_response(output).body
    assert body == b'{"logprobs":{"data":[-1.0,-2.0],"dtype":"float32"},"datum_id":"null"}'


def test_loss_options_use_tinker_names() -> None:
    batch = parse_data(
        "ppo", make_datum([1], [2], **make_ratio_tensors(1)), clip_low_threshold=0.7, clip_high_threshold=1.5
    )
    assert batch.loss is not None
    assert (batch.loss.clip_low, batch.loss.clip_high) == (0.7, 1.5)
    dro_batch = parse_data(
        "dro", make_datum([1], [2], **make_ratio_tensors(1)), beta=0.1, entropy_coeff=0.0, aggregation="sum"
    )
    assert dro_batch.loss is not None
    assert dro_batch.loss.beta == 0.1


@pytest.mark.parametrize(
    ("loss", "datum", "config", "message"),
    [
        (
            "truncated_importance_sampling",
            make_datum([1], [2]),
            {},
            "unknown loss_fn 'truncated_importance_sampling'; supported: cross_entropy.*dro",
        ),
        ("forward_logprob", make_datum([1], [2]), {}, "supported only in a forward pass"),
        (
            "importance_sampling",
            make_datum([1], [2], logprobs=[-1], advantages=[1]),
            {},
            "loss_mask is missing",
        ),
        (
            "importance_sampling",
            make_datum([1], [2], loss_mask=[1], advantages=[1]),
            {},
            "logprobs is missing",
        ),
        (
            "ppo",
            make_datum([1], [2], mask=[1], **make_ratio_tensors(1)),
            {},
            "mask is not used by this loss",
        ),
        (
            "ppo",
            make_datum([1], [2], **make_ratio_tensors(1)),
            {"entropy_coeff": 1e-4},
            r"unknown option loss_fn_config\.entropy_coeff \(0\.0001\); supported",
        ),
        (
            "dro",
            make_datum([1], [2], **make_ratio_tensors(1)),
            {"beta": -1},
            "beta: .*greater than or equal to 0",
        ),
        ("cross_entropy", {"loss_fn_inputs": {}}, {}, "managed datasets are not supported"),
        (
            "cross_entropy",
            make_datum([1, 2], [2]),
            {},
            "target_tokens has 1 entries, but model_input has 2 tokens",
        ),
        (
            "cross_entropy",
            make_datum([1, 2], [3, 3]),
            {},
            r"target_tokens\[0\] is 3, but the next input token is 2",
        ),
        (
            "cross_entropy",
            make_datum([1, 2], [2, 100]),
            {},
            "token 100 at index 2 is outside the vocabulary of 100",
        ),
        ("cross_entropy", make_datum([-1, 2], [2, 3]), {}, "token -1 at index 0 is outside"),
        ("cross_entropy", make_datum([1], [2.5]), {}, "not an integer"),
        ("cross_entropy", make_datum([2**70], [2]), {}, "cannot be parsed|does not fit into 64 bits"),
        ("cross_entropy", {**make_datum([1], [2]), "metadata": {"router_replay": {}}}, {}, "router replay"),
        (
            "cross_entropy",
            {**make_datum([1], [2]), "loss_fn_inputs": {"target_tokens": [[1]]}},
            {},
            "cannot be parsed",
        ),
    ],
)
def test_unsupported_input_is_rejected(
    loss: str, datum: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_data(loss, datum, **config)


def test_image_chunk_is_rejected() -> None:
    datum = make_datum([1], [2])
    datum["model_input"]["chunks"][0]["type"] = "image"
    with pytest.raises(ProtocolError, match="unsupported chunk type 'image'; supported: encoded_text"):
        parse_data("cross_entropy", datum)


def test_untrained_target_may_be_any_token() -> None:
    masked = make_datum([1, 2], [9, 3], logprobs=[0, -1], advantages=[0, 1], loss_mask=[0, 1])
    batch = parse_data("importance_sampling", masked)
    assert batch.samples[0].mask.tolist() == [0, 0, 1]
    weighted = parse_data("cross_entropy", make_datum([1, 2], [9, 3], weights=[0, 1]))
    assert weighted.samples[0].mask.tolist() == [0, 0, 1]
