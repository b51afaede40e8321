"""Values shared by the gateway's components."""

from __future__ import annotations

from dataclasses import dataclass, field

from instar.config import GatewayConfig, SamplingConfig
from instar.record.hashing import MessageHasher
from instar.record.redact import Redactor
from instar.store.base import Store


@dataclass(frozen=True, slots=True)
class RunIdentity:
    run_id: str
    default_agent_id: str
    """The agent to which a request is attributed if its key does not belong to an agent."""
    policy_id: str


@dataclass(frozen=True, slots=True)
class GatewayContext:
    store: Store
    identity: RunIdentity
    config: GatewayConfig
    hasher: MessageHasher
    redactor: Redactor
    train_sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """The sampling settings of every call on the `train` channel. A session's own settings override them."""
