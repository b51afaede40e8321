"""The ``instar`` command. The module of a subcommand is imported only if the subcommand is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from instar import __version__
from instar.cli.options import new_app
from instar.umask import PRIVATE_UMASK, use_umask


class Command(NamedTuple):
    target: str
    """The function in ``instar.cli``, or the Typer app with subcommands, as ``module:name``."""
    summary: str


COMMANDS = {
    "demo": Command("train:demo", "Train a small model on this machine in minutes and watch it learn."),
    "train": Command("train:train", "Train an agent's model as described by a YAML file."),
    "serve": Command("serve:serve", "Serve a model, or a run's newest version, and record agents' calls."),
    "start": Command("service.commands:start", "Start the gateway as a background service."),
    "stop": Command("service.commands:stop", "Stop the background service."),
    "restart": Command("service.commands:restart", "Restart the background service with the same settings."),
    "status": Command("service.status:status", "Show the background service, or the processes of a run."),
    "logs": Command("service.commands:logs", "Print or follow the log of the background service."),
    "chat": Command("chat:chat", "Chat with the model of a run in the terminal."),
    "simulate": Command("simulate:simulate", "Predict a run's throughput, idle time and staleness."),
    "learn": Command("learn:app", "Open or close the training window of a run, whatever its settings."),
    "report": Command("report:report", "Write a run's report: reward curves and an HTML page."),
    "plan": Command("plan:plan", "Show what the next training step would train on, and why."),
    "curate": Command("curate:curate", "Find duplicates and signs of reward hacking; --apply tags them."),
    "rescore": Command("rescore:rescore", "Score stored sessions with a different rule or judge."),
    "roles": Command("roles:roles", "List, drain, stop, start or restart the processes of a run."),
    "doctor": Command("doctor:doctor", "Check this machine for missing packages and other problems."),
    "feedback": Command("feedback:feedback", "Rate or correct a session or a reply, or list feedback."),
    "forget": Command("forget:forget", "Delete the data of sessions, of an agent or of a user."),
    "config": Command("config:app", "Check and show the YAML file of a run."),
    "sessions": Command("sessions:app", "Inspect, tag, export and import recorded sessions."),
    "datasets": Command("datasets:app", "Manage exported data by name and version."),
    "versions": Command("versions:app", "List, promote, reject and roll back versions from live traffic."),
    "keys": Command("keys:app", "Create, list and revoke API keys."),
    "models": Command("models:app", "Check what supports a model, and whether it is recorded exactly."),
    "backends": Command("backends:app", "List, check and serve training backends."),
}


class LazyGroup(TyperGroup):
    """The root command. Lists all commands, but imports only the module of the command that is used."""

    # Some typer releases bundle click under a private name, so its types cannot be written here.
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in COMMANDS.items()])


def load_command(name: str) -> Any:
    module, _, attribute = COMMANDS[name].target.partition(":")
    target: Any = getattr(importlib.import_module(f"instar.cli.{module}"), attribute)
    if isinstance(target, typer.Typer):
        app = target
    else:
        app = new_app()
        app.command(name)(target)
    command = typer.main.get_command(app)
    command.name = name
    command.help = "\n\n".join(filter(None, [COMMANDS[name].summary, command.help]))
    return command


app = new_app()


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"instar {__version__}")
        raise typer.Exit


@app.callback(cls=LazyGroup)
def root_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Make the agent you already have learn from its own runs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Print an InstarError as one message without a traceback, and exit with code 1."""
    from instar.errors import InstarError

    try:
        with use_umask(PRIVATE_UMASK):
            app(arguments)
    except InstarError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
