"""Runs, groups, sessions, rewards, steps, claims and endpoints ↔ rows, for any SQL store."""

from __future__ import annotations

import math
import time
from typing import Any

from instar.errors import StoreError
from instar.store.base import Run
from instar.store.codec import DatabaseRow, dump_json, load_json, sanitize_text
from instar.types import (
    Artifact,
    Channel,
    Claim,
    ClaimOutcome,
    Endpoint,
    Group,
    GroupStatus,
    Policy,
    Reward,
    RewardSource,
    Session,
    SessionStatus,
    Step,
    StepState,
    Task,
)


def encode_run(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "policy_id": run.policy_id,
        "config": dump_json(run.config),
        "status": run.status,
        "reason": sanitize_text(run.reason),
        "created_at": run.created_at,
    }


def decode_run(row: DatabaseRow) -> Run:
    return Run(
        run_id=row["run_id"],
        policy_id=row["policy_id"],
        config=load_json(row["config"]),
        status=row["status"],
        reason=row["reason"],
        created_at=row["created_at"],
    )


def encode_group(group: Group) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "run_id": group.run_id,
        "channel": group.channel.value,
        "idx": group.index,
        "size": group.size,
        "task_id": group.task.task_id,
        "task_data": dump_json(group.task.data),
        "status": group.status.value,
        "reason": sanitize_text(group.reason),
        "created_at": group.created_at or time.time(),
    }


def decode_group(row: DatabaseRow) -> Group:
    return Group(
        group_id=row["group_id"],
        run_id=row["run_id"],
        channel=Channel(row["channel"]),
        index=row["idx"],
        size=row["size"],
        task=Task(row["task_id"], load_json(row["task_data"])),
        status=GroupStatus(row["status"]),
        reason=row["reason"],
        created_at=row["created_at"],
    )


def encode_session(session: Session, key_hash: str | None) -> dict[str, Any]:
    ended_at = session.ended_at
    if ended_at is None and session.status is not SessionStatus.OPEN:
        ended_at = time.time()
    return {
        "session_id": session.session_id,
        "run_id": session.run_id,
        "agent_id": session.agent_id,
        "policy_id": session.policy_id,
        "channel": session.channel.value,
        "status": session.status.value,
        "group_id": session.group_id,
        "slot": session.slot,
        "attempt": session.attempt,
        "task_id": session.task_id,
        "reason": sanitize_text(session.reason),
        "seed": session.seed,
        "sampling": dump_json(session.sampling) if session.sampling else "{}",
        "metadata": dump_json(session.metadata) if session.metadata else "{}",
        "key_hash": key_hash,
        "created_at": session.created_at or time.time(),
        "ended_at": ended_at,
        "external_id": sanitize_text(session.external_id),
    }


def decode_session(row: DatabaseRow) -> Session:
    return Session(
        session_id=row["session_id"],
        run_id=row["run_id"],
        agent_id=row["agent_id"],
        policy_id=row["policy_id"],
        channel=Channel(row["channel"]),
        status=SessionStatus(row["status"]),
        group_id=row["group_id"],
        slot=row["slot"],
        attempt=row["attempt"],
        task_id=row["task_id"],
        reason=row["reason"],
        seed=row["seed"],
        sampling=load_json(row["sampling"]),
        metadata=load_json(row["metadata"]),
        external_id=row["external_id"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
    )


def encode_reward(reward: Reward) -> dict[str, Any]:
    """Without the run, agent and policy, which are the session's."""
    if not math.isfinite(reward.value):
        raise StoreError(
            f"session {reward.session_id}: a reward of {reward.value} is no number to learn from"
        )
    return {
        "session_id": reward.session_id,
        "call_id": reward.call_id,
        "value": float(reward.value),
        "source": reward.source.value,
        "scorer": reward.scorer,
        "detail": dump_json(reward.detail),
        "created_at": reward.created_at or time.time(),
        "reward_id": reward.reward_id,
        "scorer_version": reward.scorer_version,
        "cost": float(reward.cost),
    }


def decode_reward(row: DatabaseRow) -> Reward:
    return Reward(
        session_id=row["session_id"],
        value=row["value"],
        source=RewardSource(row["source"]),
        scorer=row["scorer"],
        call_id=row["call_id"],
        detail=load_json(row["detail"]),
        created_at=row["created_at"],
        reward_id=row["reward_id"],
        scorer_version=row["scorer_version"],
        cost=row["cost"],
    )


def decode_policy(row: DatabaseRow) -> Policy:
    artifact = Artifact(row["artifact_kind"], row["artifact_path"], row["expires_at"])
    return Policy(row["policy_id"], row["version"], artifact)


def decode_step(row: DatabaseRow) -> Step:
    return Step(
        run_id=row["run_id"],
        step=row["step"],
        state=StepState(row["state"]),
        state_path=row["state_path"],
        version=row["version"],
        metrics=load_json(row["metrics"]),
        updated_at=row["updated_at"],
    )


def encode_claim(claim: Claim, step: int | None) -> dict[str, Any]:
    for name, value in (("reward", claim.reward), ("advantage", claim.advantage)):
        if value is not None and not math.isfinite(value):
            raise StoreError(f"claim of {claim.sample_key}: its {name} is {value}")
    return {
        "run_id": claim.run_id,
        "epoch": claim.epoch,
        "sample_key": claim.sample_key,
        "session_id": claim.session_id,
        "group_id": claim.group_id,
        "outcome": claim.outcome.value,
        "step": step,
        "reason": sanitize_text(claim.reason),
        "reward": None if claim.reward is None else float(claim.reward),
        "advantage": None if claim.advantage is None else float(claim.advantage),
        "staleness": None if claim.staleness is None else int(claim.staleness),
    }


def decode_claim(row: DatabaseRow) -> Claim:
    return Claim(
        run_id=row["run_id"],
        epoch=row["epoch"],
        sample_key=row["sample_key"],
        session_id=row["session_id"],
        group_id=row["group_id"],
        outcome=ClaimOutcome(row["outcome"]),
        step=row["step"],
        reason=row["reason"],
        reward=row["reward"],
        advantage=row["advantage"],
        staleness=row["staleness"],
    )


def encode_endpoint(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "run_id": endpoint.run_id,
        "role": endpoint.role,
        "name": endpoint.name,
        "url": endpoint.url,
        "pid": endpoint.pid,
        "doing": sanitize_text(endpoint.doing),
        "log": endpoint.log,
        "heartbeat": endpoint.heartbeat or time.time(),
    }


def decode_endpoint(row: DatabaseRow) -> Endpoint:
    return Endpoint(
        run_id=row["run_id"],
        role=row["role"],
        name=row["name"],
        url=row["url"],
        pid=row["pid"],
        doing=row["doing"],
        log=row["log"],
        heartbeat=row["heartbeat"],
    )
