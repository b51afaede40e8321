"""`instar forget`: delete the data of sessions, and list the policy versions that were trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column

from instar.cli.options import AsJson, RunDir, SessionIds, async_command
from instar.cli.output import plain_table, print_json
from instar.cli.run_store import open_run_store
from instar.config import RunConfig
from instar.errors import ConfigError, StoreError
from instar.gateway.app import HASH_KEY_NAME
from instar.gateway.pipeline.parse import encode_user_id, shorten_id
from instar.record.hashing import MessageHasher
from instar.record.redact import Redactor
from instar.store.base import Store, TrainedSession

SESSIONS_PER_WRITE = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    session_ids: list[str]
    deleted: list[str]
    in_use: list[str]
    """The sessions of rollouts in progress, which were not deleted."""
    trained: list[TrainedSession]
    erase_problem: str | None
    """Why the deleted data may still be in the store's files, or None if it was erased."""


@async_command
async def forget(
    run_dir: RunDir,
    session_ids: SessionIds = None,
    agent: Annotated[str | None, typer.Option(help="Delete all sessions of this agent.")] = None,
    user: Annotated[
        str | None, typer.Option(metavar="ID", help="Delete all sessions whose requests named this user.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    rewrite: Annotated[
        bool,
        typer.Option(
            help="Rewrite the store's files, so that unused parts have no remnants. Writes wait for it."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Texts, tokens, rewards and feedback of the sessions are deleted from the run's store. Exported data,
    reports and checkpoints are not changed. See docs/privacy.md."""
    if sum(map(bool, (session_ids, agent, user))) != 1:
        raise ConfigError("Select the sessions in one way: by their ids, with --agent or with --user.")
    async with open_run_store(run_dir) as (config, store):
        selected = await _select_sessions(config, store, session_ids, agent, user)
        if selected and not yes:
            question = (
                f"Delete the data of {len(selected)} session(s) of run {config.name}? This cannot be undone."
            )
            typer.confirm(question, abort=True, err=True)
        outcome = await _forget_sessions(config, store, selected, rewrite=rewrite)
    if as_json:
        print_json(_to_json(outcome))
    else:
        _print_outcome(outcome)
    if outcome.in_use or outcome.erase_problem:
        raise typer.Exit(1)


async def _select_sessions(
    config: RunConfig, store: Store, session_ids: Sequence[str] | None, agent: str | None, user: str | None
) -> list[str]:
    if session_ids:
        selected = list(dict.fromkeys(session_ids))
        forgotten = {row.session_id: row.run_id for row in await store.forgotten_sessions(selected)}
        for session_id in selected:
            session = await store.session(session_id)
            run_id = session.run_id if session else forgotten.get(session_id)
            if run_id != config.name:
                raise ConfigError(f"There is no session {session_id} in this run; see `instar sessions ls`.")
        return selected
    if user is None:
        return await store.session_ids(config.name, agent_id=agent)
    hasher = MessageHasher(await store.secret(HASH_KEY_NAME))
    encoded = encode_user_id(user, Redactor.from_config(config.gateway.redact), hasher)
    # Sessions from before the redaction was configured have the id itself.
    matches = [await store.session_ids(config.name, user_id=name) for name in (encoded, shorten_id(user))]
    return list(dict.fromkeys(chain.from_iterable(matches)))


async def _forget_sessions(
    config: RunConfig, store: Store, session_ids: Sequence[str], *, rewrite: bool
) -> Outcome:
    deleted: list[str] = []
    for start in range(0, len(session_ids), SESSIONS_PER_WRITE):
        deleted += await store.forget_sessions(config.name, session_ids[start : start + SESSIONS_PER_WRITE])
    # Read this last: until its data was deleted, a session could still be claimed by a step.
    trained = await store.trained_sessions(session_ids)
    forgotten = {row.session_id for row in await store.forgotten_sessions(session_ids)}
    try:
        # Also if nothing was deleted: an earlier command may have been interrupted here.
        is_erased = await store.erase_deleted(rewrite=rewrite)
        problem = None if is_erased else "another process kept using the store"
    except StoreError as error:
        problem = str(error)
    in_use = [session_id for session_id in session_ids if session_id not in forgotten]
    return Outcome(list(session_ids), deleted, in_use, trained, problem)


def _to_json(outcome: Outcome) -> dict[str, object]:
    return {
        "sessions": outcome.session_ids,
        "deleted": len(outcome.deleted),
        "in_use": outcome.in_use,
        "erased": outcome.erase_problem is None,
        "trained": [asdict(row) for row in outcome.trained],
    }


def _print_outcome(outcome: Outcome) -> None:
    typer.echo(f"Deleted the data of {len(outcome.deleted)} session(s).")
    if earlier := len(outcome.session_ids) - len(outcome.deleted) - len(outcome.in_use):
        typer.echo(f"The data of {earlier} session(s) was deleted before.")
    if outcome.trained:
        typer.echo("These policy versions were trained on the sessions; later versions continue from them:")
        _print_versions(outcome.trained)
    elif outcome.session_ids:
        typer.echo("No policy version was trained on the sessions.")
    if outcome.in_use:
        typer.echo(
            f"{len(outcome.in_use)} session(s) belong to rollouts in progress and were not deleted. Repeat "
            f"the command when their groups have ended: {', '.join(outcome.in_use)}",
            err=True,
        )
    if outcome.erase_problem:
        typer.echo(
            "The data was deleted, but remnants may still be in unused parts of the store's files: "
            f"{outcome.erase_problem}. Repeat the command to erase them.",
            err=True,
        )


def _print_versions(rows: Sequence[TrainedSession]) -> None:
    steps: dict[tuple[str, int], list[TrainedSession]] = {}
    for row in rows:
        steps.setdefault((row.policy_id, row.step), []).append(row)
    numbers = [Column(name, justify="right") for name in ("version", "step")]
    table = plain_table(
        "policy", *numbers, "state", *(Column(n, justify="right") for n in ("sessions", "samples"))
    )
    for (policy_id, step), sessions in steps.items():
        version, state = sessions[0].version, sessions[0].state
        samples = sum(row.samples for row in sessions)
        table.add_row(
            policy_id,
            "" if version is None else str(version),
            str(step),
            state,
            str(len(sessions)),
            str(samples),
        )
    Console().print(table)
