"""Values shared by the gateway's components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from instar.config import GatewayConfig, SamplingConfig
from instar.gateway.live_policies import LivePolicies
from instar.record.hashing import MessageHasher
from instar.record.redact import Redactor
from instar.store.base import Store


@dataclass(frozen=True, slots=True)
class RunIdentity:
    run_id: str
    default_agent_id: str
    """The agent to which a request is attributed if its key does not belong to an agent."""
    policy_id: str
    """The policy of agents without a policy of their own."""
    agent_policies: Mapping[str, str] = field(default_factory=dict[str, str])
    """The policies of the other agents, by agent id."""

    @property
    def policy_ids(self) -> list[str]:
        return list(dict.fromkeys([self.policy_id, *self.agent_policies.values()]))

    def get_policy_id(self, agent_id: str | None) -> str:
        """Return the policy of an agent, or of the default agent if it is None."""
        return self.agent_policies.get(agent_id or self.default_agent_id, self.policy_id)


@dataclass(frozen=True, slots=True)
class GatewayContext:
    store: Store
    identity: RunIdentity
    config: GatewayConfig
    hasher: MessageHasher
    redactor: Redactor
    train_sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """The sampling settings of every call on the `train` channel. A session's own settings override them."""
    live: LivePolicies | None = None
    """Chooses the versions that reply, or None if the version that the engines serve replies to everyone."""
