"""`instar plan`: show what the next training step would train on, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli.options import Agent, AsJson, RunDir, async_command
from instar.cli.output import format_number, plain_table, print_json, select_fields
from instar.cli.run_store import open_run_store
from instar.cluster.versions import choose_policy_id
from instar.config import RunConfig
from instar.data.batcher import Batcher, StepBatch
from instar.data.live import EXCLUSIONS, LiveLoader
from instar.errors import InstarError
from instar.store.base import SessionFilter, Store, is_correction_key
from instar.trainer.checkpoint import checkpoint_path, read_trainer_state
from instar.trainer.lineage import find_replacement
from instar.types import (
    SINGLE_EPOCH,
    Channel,
    Claim,
    ClaimOutcome,
    Group,
    GroupStatus,
    Json,
    Sample,
    Session,
    StepState,
)

WAITING_STATUSES = (GroupStatus.READY, GroupStatus.SCORING, GroupStatus.OPEN)


MAX_LIVE_SESSIONS = 20
"""The maximum number of live sessions that are listed, newest first."""


@dataclass(frozen=True, slots=True)
class PlannedSession:
    session: Session
    claim: Claim | None
    """The session's claim in the planned step or, with the number of the step, in an earlier one."""
    reason: str
    """Why the session is, or is not, in the planned step."""
    rejected_version: int | None = None
    """The version of the earlier step, if it was rejected."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    policy_id: str
    step: int
    version: int
    """The policy version that the step would start from."""
    groups_needed: int
    """Number of groups in a full step."""
    groups: list[Group]
    batch: StepBatch
    waiting: dict[str, int]
    """Number of groups that no step has claimed, by status."""
    live: list[PlannedSession]
    """The newest live sessions, or empty if the run does not train on live traffic."""


@async_command
async def plan(run_dir: RunDir, agent: Agent = None, as_json: AsJson = False) -> None:
    """If the run trains a policy for each agent, the next step of each is shown, or with --agent that of one.
    Nothing is trained or written."""
    async with open_run_store(run_dir, read_only=True) as (config, store):
        if agent is not None:
            choose_policy_id(config, agent)  # raises ConfigError if the agent does not learn
        if len(config.policy_ids) == 1:
            plans = [await make_plan(store, config)]
        else:
            agents = config.trained_agents if agent is None else [agent]
            plans = [await make_plan(store, config.select_agent(name), name) for name in agents]
    if as_json:
        plans_json = [plan_json(next_step) for next_step in plans]
        print_json(plans_json if len(plans) > 1 else plans_json[0])
        return
    for next_step in plans:
        _print(Console(), next_step)


async def make_plan(store: Store, config: RunConfig, agent_id: str | None = None) -> StepPlan:
    """Return the step that the trainer of the config's only policy would run now, and the newest live
    sessions, optionally of one agent. Nothing is written."""
    if await store.run(config.name) is None:
        raise InstarError(f"Run {config.name} has not started; start it with `instar train`.")
    policy_id = config.policy_id
    steps = await store.steps(policy_id)
    step = max((row.step for row in steps), default=0) + 1
    version = (await store.latest_policy(policy_id)).version
    if config.trains_on_live:  # training continues from the newest version, even if no engine serves it yet
        newest = next((row.version for row in reversed(steps) if row.version is not None), version)
        if (replacement := await find_replacement(store, policy_id, newest)) is None:
            version = newest
        else:  # a step of its own loads the serving version first
            version, step = replacement[0].version, step + 1
    batcher = Batcher(store, config.name, config)
    saved_steps = [row.step for row in steps if row.state in (StepState.SAVED, StepState.COMMITTED)]
    if saved_steps and (config.trains_on_live or config.trainer.advantage.estimator == "running"):
        state = read_trainer_state(checkpoint_path(config.get_policy_dir(policy_id), saved_steps[-1]))
        batcher.estimator.load_json(state.baseline)
    step_by_version = await store.steps_by_version(policy_id)
    batch = await batcher.preview(step, SINGLE_EPOCH, version, step_by_version)
    groups, waiting = await _load_groups(store, config, batch)
    groups_needed = config.trainer.groups_per_step
    live = await _describe_live(store, config, batch, agent_id)
    return StepPlan(policy_id, step, version, groups_needed, groups, batch, waiting, live)


async def _describe_live(
    store: Store, config: RunConfig, batch: StepBatch, agent_id: str | None
) -> list[PlannedSession]:
    if not config.trains_on_live:
        return []
    where = SessionFilter(channel=Channel.LIVE, agent=agent_id)
    rows = await store.sessions(config.name, where=where, limit=MAX_LIVE_SESSIONS)
    sessions = [row.session for row in reversed(rows)]
    planned = {claim.session_id: claim for claim in [*batch.drops, *batch.claims]}
    rejected = {agent: await store.rejected_versions(config.get_policy_id(agent)) for agent in config.agents}
    replayed_ids = {sample.session_id for sample in batch.supervised.replayed}
    described: list[PlannedSession] = []
    for live in await LiveLoader(store, config).describe(sessions):
        session_id = live.session.session_id
        stored = await store.claims(config.name, session_id=session_id)
        claims = [claim for claim in stored if not is_correction_key(claim.sample_key)]
        rejected_version = None
        if claims:
            step = f"in step {claims[0].step}" if claims[0].step is not None else "without a step"
            reason = f"already {claims[0].outcome.value} {step}"
            reason += f": {claims[0].reason}" if claims[0].reason else ""
            if claims[0].step is not None:
                rejected_version = rejected.get(live.session.agent_id, {}).get(claims[0].step)
            if rejected_version is not None:
                reason += f"; version {rejected_version} was rejected"
        elif live.exclusion is not None:
            reason = f"excluded: {EXCLUSIONS[live.exclusion]}"
        elif session_id in planned:
            claim = planned[session_id]
            reason = "included" if claim.outcome is ClaimOutcome.TRAINED else f"dropped: {claim.reason}"
        else:
            reason = "waits for a later step, because sessions that ended earlier come first"
        if session_id in replayed_ids:
            reason += "; it would be replayed"
        claim = claims[0] if claims else planned.get(session_id)
        described.append(PlannedSession(live.session, claim, reason, rejected_version))
    return described


async def _load_groups(
    store: Store, config: RunConfig, batch: StepBatch
) -> tuple[list[Group], dict[str, int]]:
    """Return the batch's groups in order, and the number of unclaimed groups by status."""
    waiting_groups: dict[str, Group] = {}
    counts: Counter[str] = Counter()
    for status in WAITING_STATUSES:
        for group in await store.groups(config.name, Channel.TRAIN, status, unclaimed_in_epoch=SINGLE_EPOCH):
            waiting_groups[group.group_id] = group
            counts[status.value] += 1
    batch_ids = dict.fromkeys(claim.group_id for claim in batch.claims if claim.group_id is not None)
    groups = [waiting_groups.get(group_id) or await store.group(group_id) for group_id in batch_ids]
    return [group for group in groups if group is not None], dict(counts)


def plan_json(plan: StepPlan) -> Json:
    tokens, supervised = _tokens_by_sample(plan), plan.batch.supervised
    return {
        **select_fields(plan, "policy_id", "step", "version"),
        "ready": plan.batch.is_full,
        "groups_needed": plan.groups_needed,
        "groups_waiting": plan.waiting,
        "groups": [
            {
                **select_fields(group, "group_id", "index"),
                "task_id": group.task.task_id,
                "samples": [
                    _claim_json(claim) | {"tokens": tokens.get(claim.sample_key, 0)}
                    for claim in _claims_of_group(plan, group)
                ],
            }
            for group in plan.groups
        ],
        "dropped_in_other_groups": [_claim_json(claim) for claim in plan.batch.drops],
        "live_sessions": [
            {
                **select_fields(live.session, "session_id", "agent_id", "status"),
                **select_fields(live, "reason", "rejected_version"),
                "reward": live.claim and live.claim.reward,
                "advantage": live.claim and live.claim.advantage,
            }
            for live in plan.live
        ],
        "replayed": _supervised_json(plan, supervised.replayed),
        "replay_share": _compute_replay_share(plan),
        "corrections": _supervised_json(plan, supervised.corrections),
        "preferences": _supervised_json(plan, [sample for p in supervised.pairs for sample in p.samples]),
        "report": plan.batch.report,
    }


def _supervised_json(plan: StepPlan, samples: Sequence[Sample]) -> list[Json]:
    keys = {sample.sample_key for sample in samples}
    return [_claim_json(claim) for claim in plan.batch.supervised.claims if claim.sample_key in keys]


def _claim_json(claim: Claim) -> Json:
    fields = ("session_id", "outcome", "reason", "reward", "advantage", "staleness")
    return {"sample": claim.sample_key, **select_fields(claim, *fields)}


def _claims_of_group(plan: StepPlan, group: Group) -> list[Claim]:
    return [claim for claim in plan.batch.claims if claim.group_id == group.group_id]


def _tokens_by_sample(plan: StepPlan) -> dict[str, int]:
    return {sample.sample_key: sample.trained_tokens for sample in plan.batch.samples}


def _make_live_table(sessions: Sequence[PlannedSession]) -> Table:
    right = [Column(name, justify="right") for name in ("reward", "advantage")]
    table = plain_table("live session", "agent", *right, "in this step?")
    for live in sessions:
        claim = live.claim
        table.add_row(
            live.session.session_id,
            Text(live.session.agent_id),
            format_number(claim and claim.reward),
            "" if claim is None or claim.advantage is None else f"{claim.advantage:+.3f}",
            Text(live.reason),
        )
    return table


def _describe_replay(plan: StepPlan) -> str:
    replayed = plan.batch.supervised.replayed
    reference = sum(sample.group_id is not None for sample in replayed)
    return (
        f"{len(replayed)} earlier replies would be replayed ({_compute_replay_share(plan):.0%} of the step): "
        f"{len(replayed) - reference} from live sessions, {reference} from the reference set"
    )


def _compute_replay_share(plan: StepPlan) -> float:
    """Return the fraction of the step's samples that are replayed."""
    supervised = plan.batch.supervised
    count = len(supervised.replayed)
    return count / max(1, len(plan.batch.samples) + supervised.count + count)


def _print(console: Console, plan: StepPlan) -> None:
    report = plan.batch.report
    ready_count = len(plan.groups) + len({c.session_id for c in plan.batch.claims if c.group_id is None})
    ready = f"{ready_count} of {plan.groups_needed} groups are ready"
    status = "would train on" if plan.batch.is_full else f"is waiting ({ready}); it would train on"
    _, _, agent_id = plan.policy_id.partition("/")
    agent = f"{agent_id}: " if agent_id else ""
    console.print(
        f"{agent}step {plan.step} (from version {plan.version}) {status} {report['samples']} samples "
        f"({report['tokens']} of their {report['sequence_tokens']} tokens)",
        highlight=False,
    )
    number_names = ("reward", "advantage", "staleness", "tokens")
    number_columns = [Column(name, justify="right") for name in number_names]
    table = plain_table("group", "task", "session", *number_columns, "outcome")
    tokens = _tokens_by_sample(plan)
    for group in plan.groups:
        for index, claim in enumerate(_claims_of_group(plan, group)):
            table.add_row(
                *((str(group.index), Text(group.task.task_id)) if index == 0 else ("", "")),
                claim.session_id,
                format_number(claim.reward),
                "" if claim.advantage is None else f"{claim.advantage:+.3f}",
                format_number(claim.staleness),
                str(tokens.get(claim.sample_key, 0)),
                "trained" if claim.outcome is ClaimOutcome.TRAINED else f"dropped: {claim.reason}",
            )
    if plan.groups:
        console.print(table)
    if plan.live:
        console.print(_make_live_table(plan.live))
    lines = [
        f"{count} sample(s) from other groups would be dropped: {reason}"
        for reason, count in Counter(claim.reason for claim in plan.batch.drops).items()
    ]
    supervised = plan.batch.supervised
    if plan.live:
        lines.append(_describe_replay(plan))
    if supervised.corrections:
        lines.append(f"{len(supervised.corrections)} corrected replies would be used for training")
    if supervised.pairs:
        lines.append(f"{len(supervised.pairs)} preferences would be used for training")
    waiting = ", ".join(f"{count} {status}" for status, count in plan.waiting.items()) or "none"
    for line in (*lines, f"waiting groups: {waiting}"):
        console.print(line, highlight=False)
