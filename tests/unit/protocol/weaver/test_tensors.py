"""Tests for the SDK's `http-binary` transport: it trains like JSON, and invalid tensor packs are rejected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from weaver import ServiceClient, WeaverAPIError
from weaver._payloads import prepare_forward_backward_operation
from weaver.operations import WeaverOperationError
from weaver.tensor_transport import MultipartLayout
from weaver.training_client import TrainingClient
from weaver.types import AdamParams, Datum, LoraConfig, ModelInput

from instar.protocol.base import ProtocolError
from instar.protocol.weaver.datums import WeaverBatch, WeaverPassInput, parse_batch
from instar.protocol.weaver.http import MULTIPART, WeaverRequest, parse_json
from instar.protocol.weaver.tensors import unpack_request
from instar.protocol.weaver.training import WeaverSequencedRequest
from tests.unit.protocol.weaver.conftest import BASE_MODEL, KEY, Connect

MAX_BYTES = 100_000
TensorManifest = dict[str, Any]
ADAM = AdamParams(learning_rate=0.01, eps=1e-8, weight_decay=0.0)


def make_ratio_datum(first: int = 20, length: int = 12) -> Datum:
    ids = list(range(first, first + length))
    count = length - 1
    inputs = {
        "target_tokens": ids[1:],
        "logprobs": np.linspace(-9, -8, count, dtype=np.float32).tolist(),
        "advantages": np.linspace(-1, 2, count, dtype=np.float32).tolist(),
        "loss_mask": [0.0, *[1.0] * (count - 1)],
    }
    return Datum(ModelInput.from_ints(ids[:-1]), inputs)


def create_model(client: ServiceClient) -> TrainingClient:
    return client.create_model(
        base_model=BASE_MODEL, lora_config=LoraConfig(rank=4, seed=1, train_unembed=False)
    )


def compute_sum_loss(
    data: Sequence[Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    return -sum((row.sum() for row in logprobs), torch.zeros(())), {}


def run_all_passes(trainer: TrainingClient) -> list[Any]:
    """Run passes of every type and return their results."""
    data = [make_ratio_datum(20), make_ratio_datum(60, 30)]
    data[0].datum_id = "first"
    results: list[Any] = [trainer.forward(data, "forward_logprob")]
    for _ in range(2):
        results.append(trainer.forward_backward(data, "importance_sampling"))
        results.append(trainer.optim_step(ADAM))
    results.append(float(trainer.forward_backward_custom([make_ratio_datum(20)], compute_sum_loss)["loss"]))
    return [*results, trainer.optim_step(ADAM), trainer.forward(data, "forward_logprob")]


@pytest.mark.parametrize("compression", ["raw", "zstd"])
def test_binary_transport_trains_like_json(connect: Connect, compression: str) -> None:
    binary = connect(tensor_transport="http-binary", tensor_compression=compression)
    actual = run_all_passes(create_model(binary))
    expected = run_all_passes(create_model(connect(tensor_transport="default")))
    # Compare as text, because NaN is not equal to NaN.
    assert json.dumps(actual) == json.dumps(expected)


def test_failed_call_consumes_its_sequence_id(connect: Connect) -> None:
    trainer = create_model(connect(tensor_transport="http-binary"))
    with pytest.raises(WeaverOperationError, match="outside the vocabulary"):
        trainer.forward_backward([make_ratio_datum(10**6)], "importance_sampling")
    with pytest.raises(WeaverOperationError, match="advantages has a value that is not a finite"):
        trainer.forward_backward(
            [make_ratio_datum().with_loss_fn_inputs({"advantages": [float("nan")] * 11})],
            "importance_sampling",
        )
    trainer.forward_backward([make_ratio_datum()], "importance_sampling")


def test_repeated_pack_returns_the_same_operation(connect: Connect) -> None:
    """The SDK does not retry requests with a pack, so its caller has to send them again."""
    client = connect(tensor_transport="http-binary")
    trainer = create_model(client)

    def send(datum: Datum) -> str:
        client._operation_seq_by_model[trainer.model_id] = 1
        return trainer.forward_backward([datum], "importance_sampling", wait=False).operation_id

    first = send(make_ratio_datum())
    assert send(make_ratio_datum()) == first
    with pytest.raises(WeaverAPIError, match="only one client can train a model"):
        send(make_ratio_datum(21))


def test_binary_tensors_are_only_accepted_for_passes(connect: Connect) -> None:
    client = connect()
    layout, body = encode_request()
    headers = {"content-type": layout.content_type, "X-WEAVER-API-KEY": KEY}
    path = f"/api/v1/sessions/{client.session_id}/models"
    response = client.http._client.post(path, content=body, headers=headers)
    assert (response.status_code, response.json()["error"]) == (415, "unsupported_media_type")
    headers["content-type"] = "text/plain"
    assert client.http._client.post(path, content=body, headers=headers).status_code == 415
    sampler = client.create_sampling_client(base_model=BASE_MODEL)
    tensor = {"dtype": "int64", "shape": [1], "size_bytes": 8, "offset": 0}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": {"$tensor": tensor}}]}
    with pytest.raises(WeaverAPIError, match="outside the tensor pack of 0 bytes"):
        client.http.post(
            f"/api/v1/sampling-sessions/{sampler.sampling_session_id}/logprobs", json={"prompt": prompt}
        )


# --- tensor packs ----------------------------------------------------------------------------------


def encode_request(
    change: Callable[[TensorManifest], object] = lambda manifest: None,
    compression: Any = "raw",
    pack: bytes | None = None,
) -> tuple[MultipartLayout, bytes]:
    """Encode an SDK request, optionally with a changed manifest or a different pack."""
    prepared = prepare_forward_backward_operation(
        model_id="m",
        seq_id=1,
        data=[make_ratio_datum()],
        loss_fn="importance_sampling",
        loss_fn_config=None,
        request_metadata=None,
        tensor_transport="http-binary",
        tensor_compression=compression,
    )
    assert prepared.tensor_pack is not None
    layout = MultipartLayout(prepared.body, prepared.tensor_pack)
    content = prepared.tensor_pack.path.read_bytes() if pack is None else pack
    prepared.close()
    manifest_json = layout.prefix.split(b"\r\n")[4]
    manifest = json.loads(manifest_json)
    if pack is not None:
        manifest["tensor_pack"] |= {"size_bytes": len(pack), "sha256": hashlib.sha256(pack).hexdigest()}
    change(manifest)
    prefix = layout.prefix.replace(manifest_json, json.dumps(manifest).encode())
    return layout, prefix + content + layout.suffix


def parse_body(layout: MultipartLayout, body: bytes) -> WeaverBatch:
    request, pack = unpack_request(WeaverRequest("owner", {}, layout.content_type, body, None), MAX_BYTES)
    pass_input = parse_json(
        request.parse(WeaverSequencedRequest).payload.forward_backward_input, WeaverPassInput
    )
    return parse_batch(pass_input, pack, vocab_size=100, is_backward=True)


def get_advantages_tensor(manifest: TensorManifest) -> dict[str, Any]:
    datum = manifest["request"]["payload"]["forward_backward_input"]["data"][0]
    return datum["loss_fn_inputs"]["advantages"]["$tensor"]


def get_tokens_tensor(manifest: TensorManifest) -> dict[str, Any]:
    datum = manifest["request"]["payload"]["forward_backward_input"]["data"][0]
    return datum["model_input"]["chunks"][0]["tokens"]["$tensor"]


def test_valid_tensor_pack_is_parsed() -> None:
    for compression in ("raw", "zstd"):
        (sample,) = parse_body(*encode_request(compression=compression)).samples
        assert sample.token_ids.tolist() == list(range(20, 32))
        assert sample.advantages[-1] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "unsupported manifest version 2"),
        (lambda m: m["tensor_pack"].update(size_bytes=9), "the manifest declares 9"),
        (lambda m: m["tensor_pack"].update(sha256="0" * 64), "SHA-256"),
        (lambda m: m["tensor_pack"].update(codec="lz4"), "'lz4'"),
        (lambda m: m["tensor_pack"].update(codec="zstd", decoded_size_bytes=None), "decoded_size_bytes"),
        (lambda m: m["tensor_pack"].update(codec="zstd"), "cannot be decompressed"),
        (
            lambda m: m["tensor_pack"].update(codec="zstd", decoded_size_bytes=MAX_BYTES + 1),
            "decoded_size_bytes must be between",
        ),
        (
            lambda m: m["tensor_pack"].update(codec="zstd", decoded_size_bytes=-1),
            "decoded_size_bytes must be between",
        ),
        (lambda m: m["request"]["payload"].update(seq_id="one"), "cannot be parsed"),
        (lambda m: get_advantages_tensor(m).update(dtype="object"), "object.*supported"),
        (lambda m: get_advantages_tensor(m).update(format="pickle"), "pickle.*supported"),
        (lambda m: get_advantages_tensor(m).update(shape=[1, 11]), "expected one non-negative dimension"),
        (lambda m: get_advantages_tensor(m).update(shape=[-11]), "expected one non-negative dimension"),
        (lambda m: get_advantages_tensor(m).update(shape=[12]), "size_bytes is 44, but shape"),
        (lambda m: get_advantages_tensor(m).update(offset=-4), "outside the tensor pack"),
        (lambda m: get_advantages_tensor(m).update(offset=10**9), "outside the tensor pack"),
        (
            lambda m: get_advantages_tensor(m).update(shape=[2], size_bytes=8),
            "advantages has 2 entries, but model_input has 11 tokens",
        ),
        (lambda m: get_tokens_tensor(m).update(dtype="float64"), "tokens have dtype float64"),
    ],
)
def test_invalid_tensor_pack_is_rejected(change: Callable[[TensorManifest], object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message) as caught:
        parse_body(*encode_request(change))
    assert caught.value.category == "user"


@pytest.mark.parametrize("size", [0, 100, 10_000_000])
def test_decompression_stops_at_the_declared_size(size: int) -> None:
    compressed = zstandard.ZstdCompressor().compress(bytes(size))
    with pytest.raises(ProtocolError, match=r"the decompressed tensor pack has (fewer|more) bytes"):
        parse_body(*encode_request(compression="zstd", pack=compressed))


def test_truncated_multipart_body_is_rejected() -> None:
    layout, body = encode_request()
    parse_body(layout, body)
    # The final line break is not required, so at least one more byte is cut off.
    for end in range(0, len(body) - 2, 7):
        with pytest.raises(ProtocolError):
            parse_body(layout, body[:end])
    with pytest.raises(ProtocolError, match="body is incomplete"):
        unpack_request(WeaverRequest("owner", {}, MULTIPART, body, None), MAX_BYTES)
