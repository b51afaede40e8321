"""`instar versions`: list the versions of a run's policy, and choose which one is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

from instar.backends.factory import get_known_capabilities
from instar.cli.options import Agent, AsJson, RunDir, async_command, new_app
from instar.cli.output import format_time, plain_table, print_json, print_result, select_fields
from instar.cli.run_store import open_run_store
from instar.cli.version_warnings import list_version_warnings, print_warnings
from instar.cluster.versions import choose_policy_id
from instar.config import RunConfig
from instar.errors import InstarError
from instar.store.base import Evaluation, EvaluationItem, PolicyVersion, Store
from instar.trainer.checkpoint import is_pruned
from instar.trainer.lineage import INITIAL_STEP, get_checkpoint_path
from instar.types import ClaimOutcome, Json, PolicyStage, StepState

app = new_app()

VersionNumber = Annotated[int | None, typer.Argument(metavar="[VERSION]", help="Number of the version.")]


@dataclass(frozen=True, slots=True)
class Lineage:
    policy_id: str
    rows: list[PolicyVersion]
    serving: int
    """The version that engines load."""
    evaluations: dict[int, Evaluation]
    """The last evaluation of each version that has one."""

    def find(self, version: int) -> PolicyVersion:
        for row in self.rows:
            if row.policy.version == version:
                return row
        known = ", ".join(str(row.policy.version) for row in self.rows) or "none"
        raise InstarError(f"Version {version} does not exist. Versions: {known}")


async def _read_lineage(store: Store, policy_id: str) -> Lineage:
    head = await store.latest_policy(policy_id)
    evaluations = {row.version: row for row in await store.evaluations(policy_id)}
    return Lineage(policy_id, await store.policy_versions(policy_id), head.version, evaluations)


def _version_json(lineage: Lineage, row: PolicyVersion) -> Json:
    evaluation = lineage.evaluations.get(row.policy.version)
    return {
        "policy": lineage.policy_id,
        "version": row.policy.version,
        "stage": row.stage,
        "is_served": row.policy.version == lineage.serving,
        "parent": row.parent,
        "step": row.step,
        "artifact": row.policy.artifact.path,
        "promoted_at": row.promoted_at,
        "updated_at": row.updated_at,
        "reason": row.reason,
        "evaluation": None if evaluation is None else _evaluation_json(evaluation),
    }


def _evaluation_json(evaluation: Evaluation) -> Json:
    names = ("decision", "reason", "incumbent", "method", "number", "alpha", "started_at", "updated_at")
    return {**select_fields(evaluation, *names), "sets": evaluation.results}


@app.command("ls")
@async_command
async def list_versions(run_dir: RunDir, agent: Agent = None, as_json: AsJson = False) -> None:
    """List versions with their parents, stages and evaluations. The newest one with the stage `serving`
    answers the agent. Without --agent, list the versions of all agents' policies."""
    async with open_run_store(run_dir, read_only=True) as (config, store):
        policy_ids = config.policy_ids if agent is None else [choose_policy_id(config, agent)]
        lineages = [await _read_lineage(store, policy_id) for policy_id in policy_ids]
        warnings = await list_version_warnings(store, config)
    if as_json:
        print_json([_version_json(lineage, row) for lineage in lineages for row in lineage.rows])
        return
    for lineage in lineages:
        if len(policy_ids) > 1:
            typer.echo(f"{lineage.policy_id}:")
        _print_lineage(lineage)
    print_warnings(warnings, Console())


def _print_lineage(lineage: Lineage) -> None:
    numbers = [Column(name, justify="right") for name in ("version", "parent", "step")]
    table = plain_table(*numbers, "stage", "evaluation", Column("changed", no_wrap=True), "reason")
    for row in lineage.rows:
        table.add_row(
            str(row.policy.version),
            "" if row.parent is None else str(row.parent),
            str(row.step),
            row.stage,
            evaluation.decision if (evaluation := lineage.evaluations.get(row.policy.version)) else "",
            format_time(row.updated_at),
            Text(row.reason or ""),
        )
    Console().print(table)
    typer.echo(f"serving: version {lineage.serving}" + ("" if lineage.serving else " (the base model)"))


@app.command()
@async_command
async def show(
    run_dir: RunDir, version: VersionNumber = None, agent: Agent = None, as_json: AsJson = False
) -> None:
    """Show a version, its evaluation, and the sessions that its step was trained on. Default: the newest
    version."""
    async with open_run_store(run_dir, read_only=True) as (config, store):
        lineage = await _read_lineage(store, choose_policy_id(config, agent))
        if not lineage.rows:
            raise InstarError(
                f"{lineage.policy_id} has no versions yet, except version 0, from which it starts."
            )
        row = lineage.find(lineage.rows[-1].policy.version if version is None else version)
        claims = await store.claims(config.name, policy_id=lineage.policy_id, step=row.step)
        items: list[EvaluationItem] = []
        if (evaluation := lineage.evaluations.get(row.policy.version)) is not None:
            key = (evaluation.policy_id, evaluation.version, evaluation.incumbent)
            items = await store.evaluation_items(*key)
    rejected = row.policy.version if row.stage is PolicyStage.REJECTED else None
    trained = [claim for claim in claims if claim.outcome is ClaimOutcome.TRAINED]
    claims_json = [
        select_fields(claim, "session_id", "reward", "advantage") | {"rejected_version": rejected}
        for claim in trained
    ]
    details = _version_json(lineage, row)
    if as_json:
        item_names = ("set_name", "item_key", "candidate_score", "incumbent_score")
        details["evaluation_items"] = [select_fields(item, *item_names) for item in items]
        print_json({**details, "trained_on": claims_json})
        return
    del details["evaluation"]
    for name, value in details.items():
        if value is not None:
            shown = format_time(value) if name.endswith("_at") else value
            Console().print(f"{name}: {shown}", highlight=False, markup=False)
    sessions = sorted({claim.session_id for claim in trained})
    if evaluation is not None:
        for line in _describe_evaluation(evaluation):
            Console().print(line, highlight=False, markup=False)
    note = "" if rejected is None else "; they stay claimed, and no version that is served contains them"
    typer.echo(f"trained on {len(sessions)} session(s): {', '.join(sessions)}{note}")


def _describe_evaluation(evaluation: Evaluation) -> list[str]:
    lines = [
        f"evaluation {evaluation.number}: {evaluation.decision} ({evaluation.reason})",
        f"  against version {evaluation.incumbent} by {evaluation.method}, alpha {evaluation.alpha:.2g}, "
        f"{format_time(evaluation.started_at)} to {format_time(evaluation.updated_at)}",
    ]
    for name, result in evaluation.results.items():
        lines.append(
            f"  {name}: {result['scored']} items, difference {result['difference']:+.3f} "
            f"(at least {result['lower']:+.3f}, at most {result['upper']:+.3f})"
        )
    return lines


@app.command()
@async_command
async def promote(
    run_dir: RunDir, version: VersionNumber = None, agent: Agent = None, as_json: AsJson = False
) -> None:
    """Serve a candidate to its agent. Default: the newest candidate."""
    async with open_run_store(run_dir) as (config, store):
        policy_id = _choose_live_policy(config, agent)
        version = await _choose_candidate(store, policy_id, version)
        lineage = await _read_lineage(store, policy_id)
        committed = {row.step for row in await store.steps(policy_id) if row.state is StepState.COMMITTED}
        # The store reports a version that is not a candidate, or whose step is not committed.
        if any(row.policy.version == version and row.step in committed for row in lineage.rows):
            _check_files(config, lineage, version)
        await store.promote_version(policy_id, version)
    text = f"Version {version} of {policy_id} is now the serving version."
    print_result(as_json, {"policy": policy_id, "serving": version}, text)


@app.command()
@async_command
async def reject(
    run_dir: RunDir,
    version: VersionNumber = None,
    agent: Agent = None,
    reason: Annotated[str, typer.Option(help="Why the candidate is not served.")] = "rejected by a person",
    as_json: AsJson = False,
) -> None:
    """Reject a candidate and those trained from it. Default: the newest candidate. If training has reached
    one of them, it continues from the serving version."""
    async with open_run_store(run_dir) as (config, store):
        policy_id = _choose_live_policy(config, agent)
        version = await _choose_candidate(store, policy_id, version)
        rejected = await store.reject_version(policy_id, version, reason)
    text = f"Rejected versions of {policy_id}: {', '.join(map(str, rejected))}."
    print_result(as_json, {"policy": policy_id, "rejected": rejected}, text)


@app.command()
@async_command
async def rollback(
    run_dir: RunDir, version: VersionNumber = None, agent: Agent = None, as_json: AsJson = False
) -> None:
    """Serve an earlier version again, under a new number, and continue training from it. Default: the version
    that was served before. All candidates are rejected."""
    async with open_run_store(run_dir) as (config, store):
        policy_id = _choose_live_policy(config, agent)
        lineage = await _read_lineage(store, policy_id)
        if version is None:
            served = [r for r in lineage.rows if r.promoted_at and r.stage is PolicyStage.RETIRED]
            version = served[-1].policy.version if served else 0
        _check_files(config, lineage, version)
        number = await store.roll_back(policy_id, config.name, version)
    text = f"Version {number} of {policy_id} is now the serving version, with the weights of {version}."
    print_result(as_json, {"policy": policy_id, "serving": number, "source": version}, text)


def _choose_live_policy(config: RunConfig, agent: str | None) -> str:
    if not config.trains_on_live:
        raise InstarError(
            "The versions of this run are served as soon as they are published, because its `data` does not "
            "list `live`; there is nothing to promote, reject or roll back."
        )
    return choose_policy_id(config, agent)


async def _choose_candidate(store: Store, policy_id: str, version: int | None) -> int:
    """Return ``version`` or, if it is None, the newest candidate."""
    if version is not None:
        return version
    rows = await store.policy_versions(policy_id)
    candidates = [row.policy.version for row in rows if row.stage.is_pending]
    if not candidates:
        raise InstarError("There are no candidates; see `instar versions ls`.")
    return candidates[-1]


def _check_files(config: RunConfig, lineage: Lineage, version: int) -> None:
    """Raise InstarError if the files that engines or the trainer need for the version were removed."""
    row = lineage.find(version) if version else None
    step = INITIAL_STEP if row is None else row.step
    checkpoint = get_checkpoint_path(config, lineage.policy_id, step)
    capabilities = get_known_capabilities(config.backend)
    can_load_adapters = capabilities is not None and "folder" in capabilities.adapter_sources
    has_adapter = row is not None and row.policy.artifact.kind == "adapter"
    can_train = checkpoint.is_dir() or (can_load_adapters and has_adapter)
    if not can_train or (row is not None and is_pruned(row.policy.artifact)):
        raise InstarError(
            f"The files of version {version} were removed, or its step has no checkpoint "
            f"(trainer.checkpoint_every: {config.trainer.checkpoint_every}). The last "
            f"trainer.keep_checkpoints ({config.trainer.keep_checkpoints}) candidates and promoted versions "
            "are kept; choose one of these."
        )
