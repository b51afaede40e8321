"""Operation results, encoded as protobuf for clients that accept it and as JSON for others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from instar.protocol.base import SampledSequence
from instar.protocol.tinker import messages
from instar.types import Floats, Json

PROTOBUF = "application/x-protobuf"

_REDUCTIONS = {
    "loss": "sum",
    "tokens": "sum",
    "distinct_tokens": "sum",
    "micro_batches": "sum",
    "ratio_max": "max",
}
"""How clients reduce a metric over the parts of a batch. The default is the mean."""
_STOP_REASONS = {"stop": messages.STOP_REASON_STOP, "length": messages.STOP_REASON_LENGTH}
_OUTPUT_TYPE = "ArrayRecord"


@dataclass(frozen=True, slots=True)
class TinkerPassResult:
    logprobs: Sequence[Floats]
    """The logprobs of the targets, one array per datum. Masked targets have NaN."""
    metrics: Mapping[str, float]
    """Metrics by name and reduction over the parts of a batch, such as ``loss:sum``."""

    @classmethod
    def from_logprobs(
        cls, loss: float, metrics: Mapping[str, float], logprobs: Sequence[Floats]
    ) -> TinkerPassResult:
        """Build a result from per-token logprobs, leaving out the first token, which has no logprob."""
        metrics = {"loss": loss, **metrics}
        reduced = {f"{name}:{_REDUCTIONS.get(name, 'mean')}": value for name, value in metrics.items()}
        return cls([values[1:] for values in logprobs], reduced)

    def to_protobuf(self) -> bytes:
        message = messages.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE)
        record = message.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE, num_datums=len(self.logprobs))
        batch = record.fields.add(key="logprobs").value
        batch.dtype = messages.FLOAT32
        batch.data = b"".join(values.astype(np.float32, copy=False).tobytes() for values in self.logprobs)
        batch.offsets = np.cumsum(
            [0, *(4 * len(values) for values in self.logprobs)], dtype=np.int64
        ).tobytes()
        for name, value in self.metrics.items():
            message.metrics.add(key=name, value=value)
        return message.SerializeToString()

    def to_json(self) -> Json:
        return {
            "loss_fn_output_type": _OUTPUT_TYPE,
            "loss_fn_outputs": [
                {"logprobs": {"data": np.ascontiguousarray(row), "dtype": "float32", "shape": [len(row)]}}
                for row in self.logprobs
            ],
            "metrics": drop_non_finite(self.metrics),
        }


@dataclass(frozen=True, slots=True)
class TinkerSampleResult:
    sequences: Sequence[SampledSequence]
    prompt_logprobs: Floats | None = None
    """The prompt's logprobs, or None if not requested. NaN at index 0 and where no logprob was requested."""

    def to_protobuf(self) -> bytes:
        message = messages.SampleResponse()
        for sequence in self.sequences:
            message.sequences.add(
                stop_reason=_STOP_REASONS[sequence.stop_reason],
                tokens=np.asarray(sequence.token_ids, np.int32).tobytes(),
                logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
            )
        if self.prompt_logprobs is not None:
            message.prompt_logprobs = self.prompt_logprobs.astype(np.float32, copy=False).tobytes()
        return message.SerializeToString()

    def to_json(self) -> Json:
        sequences = [sequence.to_fields() for sequence in self.sequences]
        fields: dict[str, Any] = {"type": "sample", "sequences": sequences}
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs
        return fields


def drop_non_finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Drop NaN and infinite metrics, which JSON cannot represent."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
