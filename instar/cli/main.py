"""The `instar` command. Each verb parses here and imports its heavy parts when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from instar import __version__
from instar.cli.data_verbs import add_verbs
from instar.cli.filters import filtered

app = typer.Typer(
    name="instar",
    help="Make the agent you already have learn from its own runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Check and show the YAML that describes a run.", no_args_is_help=True)
sessions_app = typer.Typer(help="Look at what agents did and what became of it.", no_args_is_help=True)
keys_app = typer.Typer(help="Make and revoke the keys that agents use.", no_args_is_help=True)
backends_app = typer.Typer(help="Where gradients are computed: what there is, checked, served.")
app.add_typer(config_app, name="config")
app.add_typer(backends_app, name="backends")
app.add_typer(sessions_app, name="sessions")
app.add_typer(keys_app, name="keys")
add_verbs(app, sessions_app)

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
ConfigFile = Annotated[Path, typer.Argument(help="The YAML file that describes the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: --set trainer.steps=5"),
]


class Protocol(StrEnum):
    tinker = "tinker"
    weaver = "weaver"


RunDir = Annotated[Path, typer.Argument(help="The run's folder, runs/<name>.")]
SessionIds = Annotated[list[str] | None, typer.Argument(metavar="[SESSION]...", help="Their ids.")]


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the tasks, the sampling and the adapter.")] = 0,
    run_dir: Annotated[Path | None, typer.Option("--dir", help="Folder of the run.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train a small model on this machine and watch it learn, in minutes."""
    from instar.cli.train import run_demo

    run_demo(seed=seed, run_dir=run_dir, overrides=overrides or [], as_json=as_json)


@app.command()
def train(
    file: ConfigFile,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its folder.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train an agent's model as a YAML file describes it."""
    from instar.cli.train import run_train

    run_train(file, resume=resume, overrides=overrides or [], as_json=as_json)


@app.command()
def serve(
    file: Annotated[Path | None, typer.Argument(help="The YAML file. Default: the default model.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model to agents and record what they do, without training."""
    from instar.cli.serve import run_serve

    run_serve(file, overrides=overrides or [], as_json=as_json)


@app.command()
def simulate(
    file: ConfigFile,
    engines: Annotated[int | None, typer.Option(min=1, help="Default: those of the YAML.")] = None,
    max_staleness: Annotated[int | None, typer.Option(min=0, help="Default: the YAML's.")] = None,
    workload: Annotated[Path | None, typer.Option(help="A file of sessions to replay.")] = None,
    measured: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_DIR", help="Take the times of a finished run.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default: the run's.")] = None,
    sweep: Annotated[bool, typer.Option(help="Look for a better number of engines and staleness.")] = True,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Predict a run's throughput, idle times and staleness on a virtual clock, in seconds."""
    from instar.cli.simulate import run_simulate

    run_simulate(
        file,
        overrides=overrides or [],
        engines=engines,
        max_staleness=max_staleness,
        workload=workload,
        measured=measured,
        seed=seed,
        sweep=sweep,
        as_json=as_json,
    )


@app.command()
def report(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Write the report of a run again: curves as PNG, and a page."""
    from instar.cli.report import run_report

    run_report(run_dir, as_json=as_json)


@app.command()
def plan(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Show what the next training step would be given, and why, before it is trained on."""
    from instar.cli.plan import run_plan

    run_plan(run_dir, as_json=as_json)


@app.command()
@filtered
def curate(
    run_dir: RunDir,
    chosen: dict[str, Any],
    apply: Annotated[bool, typer.Option("--apply", help="Tag the sessions that are found.")] = False,
    checks: Annotated[
        list[str] | None, typer.Option("--check", metavar="NAME", help="Only this check; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Look at the newest so many.")] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Look for duplicates and for signs of reward hacking; report them, or tag them."""
    from instar.cli.curate import run_curate

    run_curate(run_dir, chosen, apply=apply, checks=checks or [], limit=limit, as_json=as_json)


@app.command()
@filtered
def rescore(
    run_dir: RunDir,
    chosen: dict[str, Any],
    session_ids: SessionIds = None,
    reward: Annotated[
        list[str] | None, typer.Option(metavar="YAML", help="A section of `reward`: '{type: math}'.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Take `reward` and `scoring` from another YAML file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score stored sessions with another rule or judge, beside what they were scored with."""
    from instar.cli.rescore import run_rescore

    run_rescore(run_dir, session_ids or [], chosen, rewards=reward or [], file=config_file, as_json=as_json)


class RoleAction(StrEnum):
    restart = "restart"
    drain = "drain"
    stop = "stop"
    start = "start"


@app.command()
def roles(
    run_dir: RunDir,
    action: Annotated[RoleAction | None, typer.Argument(help="What to do to one of them.")] = None,
    name: Annotated[str | None, typer.Argument(help="Which: `engine-0`, `trainer`.")] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that a role has to drain; then it is stopped.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """List the processes of a run that is up; drain, stop, start or restart one while the others go on."""
    from instar.cli.roles import run_roles

    run_roles(run_dir, action.value if action else None, name, timeout, as_json=as_json)


@app.command()
def status(run_dir: RunDir, as_json: AsJson = False) -> None:
    """List the processes of a run: what each does, where it listens, its log file."""
    from instar.cli.roles import run_roles

    run_roles(run_dir, None, None, 0.0, as_json=as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, and what is missing."""
    from instar.cli.doctor import run_doctor

    run_doctor(as_json=as_json)


@config_app.command("check")
def config_check(file: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Explain what is wrong with a run's YAML, or say that nothing is."""
    from instar.cli.config import run_check

    run_check(file, overrides or [], as_json=as_json)


@config_app.command("show")
def config_show(
    file: Annotated[Path | None, typer.Argument(help="The YAML file. Default: the demo's.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print a run's settings with every default filled in."""
    from instar.cli.config import run_show

    run_show(file, overrides or [], as_json=as_json)


@sessions_app.command("ls")
@filtered
def sessions_ls(
    run_dir: RunDir,
    chosen: dict[str, Any],
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    before: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Those before the one of this number: the next page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List sessions: task, calls, tokens, reward, tags."""
    from instar.cli.sessions import run_ls

    run_ls(run_dir, chosen=chosen, limit=limit, before=before, as_json=as_json)


@sessions_app.command("tag")
@filtered
def sessions_tag(
    run_dir: RunDir,
    tag_name: Annotated[
        str, typer.Argument(metavar="NAME[=VALUE]", help="`untrainable` keeps from training.")
    ],
    chosen: dict[str, Any],
    session_ids: SessionIds = None,
    reason: Annotated[str, typer.Option(help="Why.")] = "",
    author: Annotated[str, typer.Option(help="Who says so. Default: the user's name.")] = "",
    as_json: AsJson = False,
) -> None:
    """Tag sessions, by id or by what they have in common."""
    from instar.cli.tags import run_tag

    run_tag(run_dir, tag_name, session_ids or [], chosen, reason=reason, author=author, as_json=as_json)


@sessions_app.command("untag")
@filtered
def sessions_untag(
    run_dir: RunDir,
    tag_name: Annotated[str, typer.Argument(metavar="NAME", help="The tag to take away.")],
    chosen: dict[str, Any],
    session_ids: SessionIds = None,
    as_json: AsJson = False,
) -> None:
    """Take a tag away from sessions. Without ids or filters: from all that have it."""
    from instar.cli.tags import run_untag

    run_untag(run_dir, tag_name, session_ids or [], chosen, as_json=as_json)


@sessions_app.command("show")
def sessions_show(
    run_dir: RunDir,
    session_id: Annotated[str, typer.Argument(help="The session, or the beginning of its id.")],
    as_json: AsJson = False,
) -> None:
    """Show one session: its messages, and reward → advantage → claim."""
    from instar.cli.sessions import run_show

    run_show(run_dir, session_id, as_json=as_json)


class FeedbackAction(StrEnum):
    ls = "ls"


@app.command()
def feedback(
    run_dir: RunDir,
    action: Annotated[FeedbackAction | None, typer.Argument(help="ls: list what was given.")] = None,
    session: Annotated[str | None, typer.Option(help="The session that it is about.")] = None,
    call: Annotated[str | None, typer.Option(help="Or one call of it.")] = None,
    response: Annotated[str | None, typer.Option(help="Or an answer, by the id that it came with.")] = None,
    thumbs: Annotated[bool | None, typer.Option("--up/--down", help="Good (reward 1) or bad (0).")] = None,
    score: Annotated[float | None, typer.Option(help="The reward, in numbers.")] = None,
    text: Annotated[str, typer.Option(help="In words.")] = "",
    correction: Annotated[str | None, typer.Option(help="What should have been answered.")] = None,
    correction_file: Annotated[Path | None, typer.Option(help="The same, from a file.")] = None,
    author: Annotated[str, typer.Option(help="Who says so.")] = "",
    feedback_id: Annotated[
        str | None, typer.Option("--id", help="The same one again is the same feedback again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what you think of a session or an answer; a corrected answer is trained on."""
    from instar.cli.feedback import correction_of, run_give, run_ls
    from instar.gateway.feedback import FeedbackBody

    if action is not None:
        run_ls(run_dir, session, as_json=as_json)
        return
    asked = FeedbackBody(
        session_id=session,
        call_id=call,
        response_id=response,
        feedback_id=feedback_id,
        thumbs=None if thumbs is None else ("up" if thumbs else "down"),
        score=score,
        text=text,
        correction=correction_of(correction, correction_file),
        author=author,
    )
    run_give(run_dir, asked, as_json=as_json)


@keys_app.command("create")
def keys_create(
    run_dir: RunDir,
    agent: Annotated[str | None, typer.Option(help="Whose key. Default: the run's agent.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="A key that may do everything.")] = False,
    name: Annotated[str, typer.Option(help="To revoke it by.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, once: only its hash is kept."""
    from instar.cli.keys import run_create

    run_create(run_dir, agent=agent, admin=admin, name=name, as_json=as_json)


@keys_app.command("ls")
def keys_ls(run_dir: RunDir, as_json: AsJson = False) -> None:
    """List keys: whose, since when, revoked or not."""
    from instar.cli.keys import run_ls

    run_ls(run_dir, as_json=as_json)


@keys_app.command("revoke")
def keys_revoke(
    run_dir: RunDir,
    key: Annotated[str, typer.Argument(help="The key, its name, or the beginning of its hash.")],
    as_json: AsJson = False,
) -> None:
    """End a key: a gateway that runs refuses it within 5 seconds."""
    from instar.cli.keys import run_revoke

    run_revoke(run_dir, key, as_json=as_json)


@backends_app.callback(invoke_without_command=True)
def backends(context: typer.Context, as_json: AsJson = False) -> None:
    """Where gradients are computed: installed or not, what `backend: auto` would take and why, and what each
    of them can do."""
    if context.invoked_subcommand is None:
        from instar.cli.backends import run_backends

        run_backends(as_json=as_json)


@backends_app.command("check")
def backends_check(
    name: Annotated[str, typer.Argument(help="local, tinker, mint, weaver or verl.")],
    url: Annotated[
        str | None, typer.Option(help="A server to check against. Default: one of our own.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter that has the backend's package.")] = None,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Compared to 1e-5, or to 2e-2.")] = "fp32",
    as_json: AsJson = False,
) -> None:
    """Hold a backend to the conformance suite: the same numbers as the local one, step by step."""
    from instar.conformance.check import run_check

    run_check(name, url=url, python=python, dtype=dtype, as_json=as_json)


@backends_app.command("serve")
def backends_serve(
    model: Annotated[str, typer.Option(help="The base model, as `model.name` of a run.")],
    protocol: Annotated[Protocol, typer.Option(help="Whose clients are served.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where checkpoints are kept.")] = None,
    dtype: Annotated[Literal["auto", "bf16", "fp32"], typer.Option(help="Of the base weights.")] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")] = "auto",
    context: Annotated[int, typer.Option(min=1, help="Longest sequence, in tokens.")] = 2048,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch. Default: all.")] = None,
    max_models: Annotated[int, typer.Option(min=1, help="Models in training at once.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Serve the local backend to programs that were written for Tinker, MinT or Weaver."""
    from instar.cli.backends_serve import run_serve_protocol
    from instar.config import ModelConfig

    run_serve_protocol(
        protocol=protocol.value,
        model=ModelConfig(name=model, dtype=dtype, device=device, max_context=context),
        host=host,
        port=port,
        folder=folder,
        threads=threads,
        max_models=max_models,
        as_json=as_json,
    )


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"instar {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Options of every verb."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a failure that we have a word for is one message, not a traceback."""
    from instar.errors import InstarError

    try:
        app(arguments)
    except InstarError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
