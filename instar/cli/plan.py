"""`instar plan`: show what the next training step would train on, and why."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from instar.cli.options import AsJson, RunDir
from instar.cli.run_store import open_run_store
from instar.config import RunConfig
from instar.data.batcher import Batcher, StepBatch
from instar.data.corrections import CorrectionBatch, load_corrections
from instar.errors import InstarError
from instar.store.base import Store
from instar.trainer.checkpoint import checkpoint_path, read_trainer_state
from instar.trainer.loop import EPOCH
from instar.types import Channel, Claim, ClaimOutcome, Group, GroupStatus, Json, StepState

WAITING = (GroupStatus.READY, GroupStatus.SCORING, GroupStatus.OPEN)


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    version: int
    """The policy version that the step would start from."""
    groups_needed: int
    """The number of groups in a step."""
    groups: list[Group]
    batch: StepBatch
    corrections: CorrectionBatch
    waiting: dict[str, int]
    """The number of unclaimed groups by status."""


def plan(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Nothing is trained or written."""
    next_step = asyncio.run(_load_plan(run_dir))
    if as_json:
        typer.echo(json.dumps(plan_json(next_step)))
    else:
        _print(Console(), next_step)


async def _load_plan(run_dir: Path) -> StepPlan:
    async with open_run_store(run_dir, read_only=True) as (config, store):
        return await make_plan(store, config)


async def make_plan(store: Store, config: RunConfig) -> StepPlan:
    """Return the step that the trainer's batcher would build now, without writing anything."""
    run = await store.run(config.name)
    if run is None:
        raise InstarError(f"Run {config.name} has not started: it is not in its store.")
    steps = await store.steps(config.name)
    step = max((row.step for row in steps), default=0) + 1
    head = await store.latest_policy(run.policy_id)
    batcher = Batcher(store, config.name, config)
    saved = [row.step for row in steps if row.state in (StepState.SAVED, StepState.COMMITTED)]
    if saved and config.trainer.advantage.estimator == "running":
        batcher.load_baseline(read_trainer_state(checkpoint_path(config.run_dir, saved[-1])).baseline)
    made_by = await store.steps_by_version(run.policy_id)
    batch = await batcher.preview(step, EPOCH, head.version, made_by)
    corrections = await load_corrections(store, config.name, config.trainer, step, EPOCH)
    groups, waiting = await _load_groups(store, config, batch)
    groups_needed = config.trainer.groups_per_step
    return StepPlan(step, head.version, groups_needed, groups, batch, corrections, waiting)


async def _load_groups(
    store: Store, config: RunConfig, batch: StepBatch
) -> tuple[list[Group], dict[str, int]]:
    """Return the batch's groups in order, and the number of waiting groups by status."""
    known: dict[str, Group] = {}
    waiting: Counter[str] = Counter()
    for status in WAITING:
        for group in await store.groups(config.name, Channel.TRAIN, status, unclaimed_in_epoch=EPOCH):
            known[group.group_id] = group
            waiting[status.value] += 1
    batch_ids = dict.fromkeys(claim.group_id for claim in batch.claims if claim.group_id is not None)
    groups = [known.get(each) or await store.group(each) for each in batch_ids]
    return [group for group in groups if group is not None], dict(waiting)


# --- output ----------------------------------------------------------------------------


def plan_json(plan: StepPlan) -> Json:
    return {
        "step": plan.step,
        "version": plan.version,
        "ready": plan.batch.is_full,
        "groups_wanted": plan.groups_needed,
        "groups_waiting": plan.waiting,
        "groups": [_group_json(plan, group) for group in plan.groups],
        "dropped_outside": [_claim_json(claim) for claim in plan.batch.drops],
        "corrections": [_claim_json(claim) for claim in plan.corrections.claims],
        "report": plan.batch.report,
    }


def _group_json(plan: StepPlan, group: Group) -> Json:
    claims = _claims_of(plan, group)
    return {
        "group_id": group.group_id,
        "index": group.index,
        "task_id": group.task.task_id,
        "samples": [
            _claim_json(claim) | {"tokens": _tokens(plan).get(claim.sample_key, 0)} for claim in claims
        ],
    }


def _claim_json(claim: Claim) -> Json:
    return {
        "sample": claim.sample_key,
        "session_id": claim.session_id,
        "outcome": claim.outcome,
        "reason": claim.reason,
        "reward": claim.reward,
        "advantage": claim.advantage,
        "staleness": claim.staleness,
    }


def _claims_of(plan: StepPlan, group: Group) -> list[Claim]:
    return [claim for claim in plan.batch.claims if claim.group_id == group.group_id]


def _tokens(plan: StepPlan) -> dict[str, int]:
    return {sample.sample_key: sample.trained_tokens for sample in plan.batch.samples}


def _print(console: Console, plan: StepPlan) -> None:
    report = plan.batch.report
    ready = f"{len(plan.groups)} of {plan.groups_needed} groups are ready"
    status = "would train on" if plan.batch.is_full else f"waits ({ready}); it would train on"
    console.print(
        f"step {plan.step}, from version {plan.version}: {status} {report['samples']} samples, "
        f"{report['tokens']} trained tokens of {report['sequence_tokens']}",
        highlight=False,
    )
    numbers = [Column(name, justify="right") for name in ("reward", "advantage", "stale", "tokens")]
    table = Table("group", "task", "session", *numbers, "outcome", box=None, padding=(0, 1, 0, 0))
    tokens = _tokens(plan)
    for group in plan.groups:
        for place, claim in enumerate(_claims_of(plan, group)):
            first = (str(group.index), Text(group.task.task_id)) if place == 0 else ("", Text(""))
            table.add_row(*first, *_claim_cells(claim, tokens.get(claim.sample_key, 0)))
    if plan.groups:
        console.print(table)
    _print_footer(console, plan)


def _claim_cells(claim: Claim, tokens: int) -> list[str]:
    return [
        claim.session_id,
        "" if claim.reward is None else f"{claim.reward:g}",
        "" if claim.advantage is None else f"{claim.advantage:+.3f}",
        "" if claim.staleness is None else str(claim.staleness),
        str(tokens),
        "trained" if claim.outcome is ClaimOutcome.TRAINED else f"dropped: {claim.reason}",
    ]


def _print_footer(console: Console, plan: StepPlan) -> None:
    lines: list[str] = []
    for reason, count in Counter(claim.reason for claim in plan.batch.drops).items():
        lines.append(f"{count} sample(s) of other groups would be dropped: {reason}")
    if plan.corrections.samples:
        lines.append(f"{len(plan.corrections.samples)} corrected replies would be trained on")
    lines.append(f"waiting groups: {_format_counts(plan.waiting)}")
    for line in lines:
        console.print(line, highlight=False)


def _format_counts(waiting: dict[str, int]) -> str:
    words: Sequence[str] = [f"{count} {status}" for status, count in waiting.items()]
    return ", ".join(words) or "none"
