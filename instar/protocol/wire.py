"""Request fields shared by the Tinker and Weaver protocols, and their conversion to Instar's types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict
from numpy.typing import NDArray
from pydantic import ValidationError

from instar.config import AdamConfig, LossConfig
from instar.protocol.base import ProtocolError
from instar.types import NOT_SAMPLED, Floats, Ids, Sample, SamplingParams

LOSS_OPTIONS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high", "beta": "beta"}
"""Maps option names in `loss_fn_config` to `LossConfig` fields."""
_REQUEST_NAMES = {field: option for option, field in LOSS_OPTIONS.items()} | {"lr": "learning_rate"}


class AdamFields(Struct, kw_only=True):
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float

    def to_config(self) -> AdamConfig:
        fields = asdict(self)
        learning_rate = fields.pop("learning_rate")
        try:
            # `AdamConfig` rejects a learning rate of 0, which a schedule may reach, so it is set afterwards.
            adam = AdamConfig(lr=learning_rate or 1.0, **fields)
        except ValidationError as error:
            raise _make_invalid_value_error("adam_params", error) from None
        return adam.model_copy(update={"lr": learning_rate})


class SamplingFields(Struct, kw_only=True):
    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def to_params(
        self, *, max_tokens: int, seed: int | None, stop: Iterable[str], stop_token_ids: Iterable[int]
    ) -> SamplingParams:
        """Convert the fields to sampling parameters. ``max_tokens`` applies if the request has no limit."""
        return SamplingParams(
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            seed=seed,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
        )


def build_loss_config(loss: str, options: Mapping[str, Any]) -> LossConfig:
    """Build a loss configuration. The keys of ``options`` must be keys of `LOSS_OPTIONS`."""
    fields = {LOSS_OPTIONS[name]: value for name, value in options.items()}
    try:
        return LossConfig.model_validate({"name": loss, **fields})
    except ValidationError as error:
        raise _make_invalid_value_error("loss_fn_config", error) from None


def _make_invalid_value_error(section: str, error: ValidationError) -> ProtocolError:
    details = error.errors()[0]
    field = str(details["loc"][0])
    name = _REQUEST_NAMES.get(field, field)
    return ProtocolError(f"{section}.{name}: {details['msg']}, got {details['input']}")


def build_sample(
    name: str, token_ids: Ids, *, mask: NDArray[Any], logprobs: NDArray[Any], advantages: NDArray[Any]
) -> Sample:
    """Build a sample from arrays with one value per target: value i describes token i + 1, because the first
    token is not a target. Values after the last token are dropped."""

    def align(target_values: NDArray[Any], first: float) -> Floats:
        return np.append(np.float32(first), target_values)[: len(token_ids)].astype(np.float32)

    return Sample(
        sample_key=name,
        session_id="",
        token_ids=token_ids,
        mask=align(mask, 0.0),
        logprobs=align(logprobs, np.nan),
        advantages=align(advantages, 0.0),
        versions=np.full(len(token_ids), NOT_SAMPLED, np.int32),
    )
