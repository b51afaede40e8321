"""Tests that passes in protobuf and JSON are parsed into samples, and that the SDK decodes the results."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.forward_backward_request import ForwardBackwardRequest

from instar.protocol.base import ProtocolError, SampledSequence
from instar.protocol.tinker.passes import TinkerBatch, parse_json_pass, parse_protobuf_pass
from instar.protocol.tinker.results import TinkerPassResult, TinkerSampleResult

RATIO_TENSORS = {
    "target_tokens": [2, 3, 4],
    "logprobs": [-0.5, -0.25, -2.0],
    "advantages": [0.0, 1.0, -1.5],
}


def make_datum(tokens: list[int], **tensors: list[Any]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            name: types.TensorData(data=values, dtype="int64" if name == "target_tokens" else "float32")
            for name, values in tensors.items()
        },
    )


def encode_protobuf(
    data: list[types.Datum], loss: Any, config: dict[str, Any] | None = None, seq: int = 7
) -> bytes:
    pass_input = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    request = ForwardBackwardRequest(forward_backward_input=pass_input, model_id="m", seq_id=seq)
    return forward_backward_request_to_proto(request).SerializeToString()


def encode_json(data: list[types.Datum], loss: str, config: dict[str, Any] | None = None) -> bytes:
    """Return the body that tinker 0.22 sends."""
    pass_input = {
        "data": [
            {
                "model_input": {"chunks": [{"tokens": d.model_input.to_ints(), "type": "encoded_text"}]},
                "loss_fn_inputs": {
                    name: {"data": list(t.data), "dtype": t.dtype, "shape": [len(t.data)]}
                    for name, t in d.loss_fn_inputs.items()
                },
            }
            for d in data
        ],
        "loss_fn": loss,
        "loss_fn_config": config,
    }
    return json.dumps({"forward_backward_input": pass_input, "model_id": "m", "seq_id": 7}).encode()


def parse_both_formats(
    data: list[types.Datum], loss: str, config: dict[str, Any] | None = None
) -> TinkerBatch:
    """Parse the pass in both formats, check that the batches are equal, and return one of them."""
    passes = [parse_protobuf_pass(encode_protobuf(data, loss, config))]
    passes.append(parse_json_pass(encode_json(data, loss, config), forward_only=False))
    batches = [p.require_batch() for p in passes]
    for p in passes:
        assert (p.model_id, p.seq, p.forward_only) == ("m", 7, False)
    for sample, other in zip(batches[0].samples, batches[1].samples, strict=True):
        for name in ("token_ids", "mask", "logprobs", "advantages"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(other, name))
    assert batches[0].loss == batches[1].loss
    return batches[0]


def test_datum_tensors_apply_to_the_next_token() -> None:
    [sample] = parse_both_formats([make_datum([1, 2, 3], **RATIO_TENSORS)], "importance_sampling").samples
    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert sample.token_ids.dtype == np.int32
    assert sample.mask.tolist() == [0, 1, 1, 1]
    np.testing.assert_array_equal(sample.logprobs, np.array([np.nan, -0.5, -0.25, -2.0], np.float32))
    assert sample.advantages.tolist() == [0.0, 0.0, 1.0, -1.5]


def test_cross_entropy_without_weights_uses_weight_one() -> None:
    [sample] = parse_both_formats([make_datum([1, 2], target_tokens=[2, 9])], "cross_entropy").samples
    assert sample.advantages.tolist() == [0.0, 1.0, 1.0]


def test_chunks_are_concatenated() -> None:
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
    datum = types.Datum(
        model_input=types.ModelInput(chunks=chunks),
        loss_fn_inputs={"target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64")},
    )
    [sample] = parse_protobuf_pass(encode_protobuf([datum], "cross_entropy")).require_batch().samples
    assert sample.token_ids.tolist() == [1, 2, 3, 4]


def test_loss_options_are_converted() -> None:
    clip = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5}
    loss = parse_both_formats([make_datum([1, 2, 3], **RATIO_TENSORS)], "ppo", clip).loss
    assert (loss.name, loss.clip_low, loss.clip_high) == ("ppo", 0.7, 1.5)
    assert parse_both_formats([make_datum([1, 2, 3], **RATIO_TENSORS)], "dro", {"beta": 0.1}).loss.beta == 0.1


def test_filler_targets_with_zero_weight_are_masked() -> None:
    datum = make_datum([1, 2, 3], target_tokens=[0, 3, 4], weights=[0.0, 1.0, 1.0])
    [sample] = parse_both_formats([datum], "cross_entropy").samples
    assert sample.mask.tolist() == [0, 0, 1, 1]
    assert sample.token_ids.tolist() == [1, 2, 3, 4]


def test_token_without_old_logprob_and_advantage_is_masked() -> None:
    tensors = RATIO_TENSORS | {"logprobs": [float("nan"), -0.25, -2.0]}
    for loss in ("importance_sampling", "dro"):
        [sample] = (
            parse_protobuf_pass(encode_protobuf([make_datum([1, 2, 3], **tensors)], loss))
            .require_batch()
            .samples
        )
        assert sample.mask.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("loss", "override", "config", "message"),
    [
        ("ppo", {"mask": [1.0, 1.0, 1.0]}, None, "datum 1: unknown loss_fn_inputs mask; ppo supports"),
        (
            "ppo",
            {"target_tokens": [2, 9, 4]},
            None,
            r"datum 1: target_tokens\[1\] is 9, .* next .* is 3",
        ),
        ("dro", {"target_tokens": [9, 3, 4]}, None, r"datum 1: target_tokens\[0\] is 9"),
        ("cispo", {"advantages": [0.0]}, None, "datum 1: advantages has 1 entries, expected 3"),
        ("cispo", {"target_tokens": [2, 3, -1]}, None, r"target_tokens\[2\] must be a token id, got -1"),
        ("gspo", {}, None, "unknown loss_fn 'gspo'; supported: cross_entropy,"),
        (
            "importance_sampling",
            {},
            {"clip_low_threshold": 0.5},
            "options clip_low_threshold; importance_sampling supports no options",
        ),
        ("ppo", {}, {"beta": 0.5}, "options beta; ppo supports clip_low_threshold"),
    ],
)
def test_invalid_pass_is_reported_when_it_runs(
    loss: str, override: dict[str, Any], config: dict[str, Any] | None, message: str
) -> None:
    data = [make_datum([1, 2, 3], **RATIO_TENSORS), make_datum([1, 2, 3], **RATIO_TENSORS | override)]
    for tinker_pass in (
        parse_protobuf_pass(encode_protobuf(data, loss, config)),
        parse_json_pass(encode_json(data, loss, config), forward_only=False),
    ):
        assert tinker_pass.seq == 7
        with pytest.raises(ProtocolError, match=message) as caught:
            tinker_pass.require_batch()
        assert caught.value.category == "user"


def test_images_and_matrices_are_rejected() -> None:
    image = types.Datum(
        model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=3)]),
        loss_fn_inputs={"target_tokens": types.TensorData(data=[1], dtype="int64")},
    )
    with pytest.raises(ProtocolError, match="datum 0: images and audio are not supported"):
        parse_protobuf_pass(encode_protobuf([image], "cross_entropy")).require_batch()
    matrix = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": types.TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2])},
    )
    with pytest.raises(ProtocolError, match="target_tokens must be a dense, one-dimensional tensor"):
        parse_protobuf_pass(encode_protobuf([matrix], "cross_entropy")).require_batch()


def test_unparsable_pass_is_rejected_immediately() -> None:
    with pytest.raises(ProtocolError, match="cannot be parsed"):
        parse_protobuf_pass(b"\xff\xff\xff")
    with pytest.raises(ProtocolError, match="cannot be parsed"):
        parse_json_pass(b"{", forward_only=True)


def test_sdk_reads_pass_results() -> None:
    logprobs = [np.array([np.nan, -1.0, -2.0], np.float32), np.array([np.nan, -3.0], np.float32)]
    result = TinkerPassResult.from_logprobs(4.5, {"tokens": 3.0, "ratio_max": 2.0, "kl": 0.0}, logprobs)
    output = deserialize_forward_backward_output(result.to_protobuf())
    assert [list(out["logprobs"].data) for out in output.loss_fn_outputs] == [[-1.0, -2.0], [-3.0]]
    assert [out["logprobs"].shape for out in output.loss_fn_outputs] == [[2], [1]]
    assert output.metrics == {"loss:sum": 4.5, "tokens:sum": 3.0, "ratio_max:max": 2.0, "kl:mean": 0.0}
    assert result.to_json()["metrics"] == output.metrics


def test_sdk_reads_sample_results() -> None:
    sequences = [
        SampledSequence([5, 6], [-0.5, -1.0], "stop", "ab"),
        SampledSequence([7], [-2.0], "length", "c"),
    ]
    response = deserialize_sample_response(
        TinkerSampleResult(sequences, np.array([np.nan, -1.5], np.float32)).to_protobuf()
    )
    assert [(s.tokens, s.logprobs, s.stop_reason) for s in response.sequences] == [
        ([5, 6], [-0.5, -1.0], "stop"),
        ([7], [-2.0], "length"),
    ]
    assert response.prompt_logprobs == [None, -1.5]
