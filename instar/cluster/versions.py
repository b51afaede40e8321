"""Select the version of a run's policy to serve."""

from __future__ import annotations

import time
from pathlib import Path

from instar.config import RunConfig
from instar.errors import ConfigError
from instar.store.base import Store
from instar.types import Artifact, Policy


def choose_policy_id(config: RunConfig, agent_id: str | None) -> str:
    """Return the policy of the agent or, if it is None, the only policy of the run. Raises ConfigError if the
    run trains no policy of the agent, or if it trains several and the agent is None."""
    agents = config.trained_agents
    if agent_id is None and len(config.policy_ids) == 1:
        return config.policy_id
    if agent_id in agents:
        return config.get_policy_id(agent_id)
    if agent_id is None:
        raise ConfigError(
            f"--agent: this run trains a policy for each learning agent; choose one of {', '.join(agents)}"
        )
    if not agents:
        raise ConfigError(
            f"--agent: got {agent_id!r}, but this run has one policy for all agents; leave --agent out"
        )
    raise ConfigError(f"--agent: got {agent_id!r}; the agents that learn in this run are {', '.join(agents)}")


async def find_policy(store: Store, policy_id: str, version: int | None = None) -> Policy:
    """Return a published version, by default the newest serving one. Version 0 is the policy from which the
    run starts. Raises ConfigError if the version was not published, or if an engine cannot load it."""
    base = Policy(policy_id, 0, Artifact("base"))
    policies = {0: base} | {p.version: p for p, _ in await store.published_policies(policy_id)}
    policy = await store.latest_policy(policy_id) if version is None else policies.get(version)
    if policy is not None and (not policy.version or is_loadable(policy)):
        return policy
    available = [number for number in sorted(policies) if not number or is_loadable(policies[number])]
    problem = "was not published" if policy is None else "has no files that an engine can load"
    raise ConfigError(
        f"Version {policy.version if policy else version} of {policy_id!r} {problem}. Versions that can be "
        f"served: {', '.join(map(str, available))}; choose one with --version"
    )


def is_loadable(policy: Policy) -> bool:
    """Return True if a new engine can load the policy itself. If only the trainer has the weights, the folder
    is not on this machine, or a cloud sampler has expired, the trainer sends the policy instead."""
    artifact = policy.artifact
    if artifact.kind in ("adapter", "weights"):
        return Path(artifact.path).is_dir()
    return artifact.kind != "live" and (artifact.expires_at is None or artifact.expires_at > time.time())
