"""The requests that the scheduler runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from instar.engines.local.adapters import Adapter
from instar.engines.local.grammar import TokenMatcher
from instar.engines.local.penalties import LogitPenalties
from instar.engines.policies import LoadedPolicy
from instar.engines.stopping import StopRule
from instar.errors import EngineError
from instar.types import Floats, Ids, PolicyRef, SamplingParams, TokenChunk


@dataclass(eq=False, slots=True)
class SchedulerRequest:
    prompt: Ids
    params: SamplingParams
    stop_rule: StopRule
    rng: Random
    length_limit: int
    """The maximum number of tokens in the prompt and the reply together."""
    policy: PolicyRef | None = None
    """The policy that the request names, or None for the served policy."""
    loaded_policy: LoadedPolicy[Adapter] = field(init=False)
    """The policy that the request samples from. If it names none, this changes when another one is loaded."""
    sampled: list[int] = field(default_factory=list[int])
    computed_tokens: int = 0
    """The number of tokens with keys and values in the request's row."""
    row: int = -1
    """The request's row in the KV cache, or -1 before it starts and after it ends."""
    admission_order: int = 0
    has_mixed_versions: bool = False
    """True if the keys and values were computed under several versions, so they must not be cached."""
    prompt_key: int = 0
    """The key of the policy under which the prompt was computed, or a unique value if the policy changed
    during its computation."""
    is_finished: bool = False
    matcher: TokenMatcher | None = None
    """If set, the request samples only the tokens that it allows."""
    penalties: LogitPenalties | None = None
    """If set, it changes the logits that the request samples from."""
    scores: Floats | None = None
    """If set, the request samples no reply, and the prompt's logprobs are written to this array."""

    def append_sampled(self, token: int) -> None:
        self.sampled.append(token)
        if self.penalties is not None:
            self.penalties.count(token)


Emission = tuple[SchedulerRequest, TokenChunk | EngineError]
