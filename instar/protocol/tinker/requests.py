"""The fields of Tinker requests that the server reads. Other fields are ignored."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from instar.protocol.base import AdapterSpec
from instar.protocol.wire import AdamFields, SamplingFields
from instar.types import Json


class Lora(AdapterSpec, frozen=True):
    train_unembed: bool = True


class CreateRequest(Struct):
    session_id: str
    model_seq_id: int
    optimizer_config: Json | None = None


class CreateModelRequest(CreateRequest, kw_only=True):
    base_model: str
    lora_config: Lora | None = None


class CreateFromWeightsRequest(CreateRequest, kw_only=True):
    """A request to `load_weights` that creates a model from a checkpoint, as clients since tinker 0.38 do."""

    path: str
    optimizer: bool = False
    base_model: str | None = None


class HeartbeatRequest(Struct):
    session_id: str


class ModelRequest(Struct):
    model_id: str
    seq_id: int | None = None


class Adam(AdamFields, kw_only=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(ModelRequest):
    adam_params: Adam | None = None


class SaveRequest(ModelRequest):
    path: str | None = None
    ttl_seconds: float | None = None


class SaveWeightsRequest(SaveRequest):
    overwrite: bool | UnsetType = UNSET
    """If False, the checkpoint must not exist yet. Older clients omit the field and always overwrite."""


class SaveForSamplerRequest(SaveRequest):
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"


class LoadWeightsRequest(ModelRequest):
    path: str = ""
    optimizer: bool = False


class WeightsInfoRequest(Struct):
    tinker_path: str


class CreateSamplingSessionRequest(Struct):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class FutureRequest(Struct):
    request_id: str


class Chunk(Struct):
    tokens: list[int] | None = None
    type: str = "encoded_text"


class ModelInput(Struct):
    chunks: list[Chunk]


class Tensor(Struct):
    data: list[float | None]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None


class JsonDatum(Struct):
    model_input: ModelInput
    loss_fn_inputs: dict[str, Tensor]


class PassInput(Struct):
    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardRequest(ModelRequest, kw_only=True):
    pass_input: PassInput = field(name="forward_input")


class ForwardBackwardRequest(ModelRequest, kw_only=True):
    pass_input: PassInput = field(name="forward_backward_input")


class SamplingOptions(SamplingFields, kw_only=True):
    stop: str | list[str | int] | None = None


class SampleRequest(Struct):
    prompt: ModelInput
    sampling_params: SamplingOptions
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: Any = None
    record_stability_info: bool | None = None
