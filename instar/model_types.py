"""Types exchanged with a model: messages, sampling parameters, sampled tokens and policy versions.

`instar.types` re-exports these types, and other modules import them from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Json = dict[str, Any]


class ToolCall(TypedDict):
    id: str
    name: str
    arguments: str
    """The JSON text exactly as the model generated it."""


class Message(TypedDict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class Tool(TypedDict):
    name: str
    description: str
    parameters: Json
    """A JSON schema."""


# --- sampling -----------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "aborted"]


class CallForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of a call of one tool: its arguments as JSON, between two fixed texts."""

    begin: str
    schema: str
    """The JSON schema of the arguments, as JSON text."""
    end: str


class OutputConstraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form that a reply must have: JSON that follows ``schema``, or one of ``calls``."""

    schema: str | None = None
    """A JSON schema, as JSON text; None if the reply must be a call."""
    calls: tuple[CallForm, ...] = ()
    separator: str | None = None
    """The text between two calls; None if the reply may have only one call."""
    reasoning: tuple[str, str] | None = None
    """The texts that begin and end the reasoning before the JSON, or None if the model does not reason. The
    reasoning may be left out, unless the first text is empty because the prompt contains it."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    max_tokens: int = 256
    temperature: float = 1.0
    """The sampling temperature; 0 means greedy sampling."""
    top_p: float = 1.0
    top_k: int = 0
    """The number of most likely tokens to sample from; 0 means all tokens."""
    min_p: float = 0.0
    """Tokens with less than this fraction of the most likely token's probability are not sampled."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of the tokens that are already in the reply."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token each time that the token is already in the reply."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or the reply."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the reply. The sampled stop token is part of the reply."""
    constraint: OutputConstraint | None = None
    """Only tokens that can continue a reply of this form are sampled."""
    chat_template_kwargs: dict[str, Any] = {}
    """The variables of the chat template that the request set. They are recorded; engines do not use them."""
    logprobs: bool = msgspec.field(default=True, name="score")
    """False if the caller neither reads the logprobs nor trains on them. Engines that need a second request
    for the logprobs may then omit them."""

    @property
    def modifies_distribution(self) -> bool:
        """True if sampling differs from the full softmax at temperature 1."""
        is_changed = self.temperature != 1.0 or self.constraint is not None
        return is_changed or self.is_truncated or self.modifies_logits

    @property
    def optional_settings(self) -> dict[str, Any]:
        """The settings that not every engine supports, if they differ from their defaults."""
        values = {name: getattr(self, name) for name in OPTIONAL_SAMPLING_FIELDS}
        return {name: value for name, value in values.items() if value != getattr(_DEFAULT_PARAMS, name)}

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def modifies_logits(self) -> bool:
        """True if there is a penalty or a bias."""
        has_penalty = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return has_penalty or self.repetition_penalty != 1.0 or bool(self.logit_bias)


_DEFAULT_PARAMS = SamplingParams()
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "top_p": (0, 1),
    "top_k": (0, 1 << 31),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
"""The allowed minimum and maximum of sampling settings; ``top_p`` must also be greater than 0."""
FULL_SOFTMAX: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The sampling settings of the full softmax at temperature 1. The bias and the constraint are not among
them: they say what replies the agent can use."""
BIAS_RANGE = (-100.0, 100.0)
OPTIONAL_SAMPLING_FIELDS = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
"""The fields of `SamplingParams` that not every engine supports."""


class TokenChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """One or more sampled tokens streamed by an engine, each with its logprob and policy version.

    ``logprobs`` are computed under the full softmax at temperature 1, and ``behavior_logprobs`` under the
    distribution that was sampled from, if it differs. The last chunk of a reply has a ``finish_reason``; its
    ``stop`` is the stop string that ended the reply, if any. The stream includes the stop string's tokens,
    because they were sampled; the gateway trims the text.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    behavior_logprobs: list[float] | None = None
    finish_reason: FinishReason | None = None
    stop: str | None = None


# --- policies -----------------------------------------------------------------------------------

ArtifactKind = Literal["base", "adapter", "weights", "live", "remote"]


class Artifact(msgspec.Struct, frozen=True):
    """The location of a published policy's weights.

    ``base``: the base model itself. ``adapter``: a PEFT LoRA folder. ``weights``: a folder of full weights.
    ``live``: tensors in a running process. ``remote``: a sampler on a training service.
    """

    kind: ArtifactKind
    path: str = ""
    expires_at: float | None = None
    """The Unix time at which a remote sampler expires, if it does."""


class PolicyRef(msgspec.Struct, frozen=True, order=True):
    """The name of a policy version. Version 0 of every policy is the base model."""

    policy_id: str
    version: int

    def __str__(self) -> str:
        return f"{self.policy_id}@{self.version}"


class Policy(msgspec.Struct, frozen=True):
    policy_id: str
    version: int
    artifact: Artifact

    @property
    def ref(self) -> PolicyRef:
        return PolicyRef(self.policy_id, self.version)


class PolicyState(StrEnum):
    RESERVED = "reserved"
    PUBLISHED = "published"
    TOMBSTONED = "tombstoned"


class PolicyStage(StrEnum):
    """States whether engines may serve a version. Engines load the newest serving version."""

    CANDIDATE = "candidate"
    """Trained on live traffic, and not promoted yet."""
    SHADOW = "shadow"
    """A candidate that passed the evaluation. It also answers some live requests, which nobody is shown."""
    CANARY = "canary"
    """A candidate that serves a small share of the live sessions."""
    SERVING = "serving"
    REJECTED = "rejected"
    """A candidate that will not be served, or a version that was trained from one."""
    RETIRED = "retired"
    """A version that was replaced by a later serving version."""

    @property
    def is_pending(self) -> bool:
        """True if the version may still be promoted or rejected."""
        return self in (PolicyStage.CANDIDATE, PolicyStage.SHADOW, PolicyStage.CANARY)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address, process and current activity of a running role."""

    run_id: str
    role: str
    name: str
    url: str
    pid: int
    doing: str = ""
    log: str = ""
    heartbeat: float = 0.0
