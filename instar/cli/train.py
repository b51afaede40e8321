"""`instar train` and `instar demo`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from instar.backends.factory import check_run
from instar.cli.config_file import DEMO_FILE, load_config
from instar.cli.display import Display
from instar.cli.model import fetch_model
from instar.cli.options import AsJson, ConfigFile, Overrides
from instar.cli.output import print_json
from instar.cli.run_store import open_run_store
from instar.cluster import run as cluster_run
from instar.cluster.interrupts import EXIT_INTERRUPTED
from instar.cluster.live_run import LiveRun
from instar.cluster.versions import find_policy
from instar.config import RunConfig
from instar.errors import ConfigError
from instar.trainer.monitor import read_metrics, read_steps, read_warnings
from instar.types import Json, Policy


def train(
    file: ConfigFile,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its folder.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    config = load_config(file, overrides or ())
    console = Console(stderr=as_json)
    run = _run(config, console, resume=resume, as_json=as_json)
    if not as_json:
        resume_command = ["instar", "train", str(file), "--resume"]
        for override in overrides or ():
            path, _, value = override.partition("=")
            resume_command += ["--set", f"{path}={'…' if path.endswith('api_key') else value}"]
        extra = [(resume_command, "continue the run")] if run.is_stopped_by_user else []
        _print_next_commands(console, run, extra)
    if run.is_stopped_by_user:
        raise typer.Exit(EXIT_INTERRUPTED)


def demo(
    seed: Annotated[int, typer.Option(help="Seed for the tasks, sampling and the adapter.")] = 0,
    run_dir: Annotated[
        Path | None, typer.Option("--dir", help="Folder of the run. Default: runs/demo-TIME.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    name = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    overrides = [f"name={name}", f"seed={seed}", f"rollout.tasks.args.seed={seed}", *(overrides or ())]
    if run_dir is not None:
        overrides.append(f"dir={json.dumps(str(run_dir))}")
    config = load_config(DEMO_FILE, overrides)
    console = Console(stderr=as_json)
    console.print(
        "[bold]Instar demo[/]: a calculator agent talks to a small model through the gateway, "
        "and the model learns from its own attempts."
    )
    run = _run(config, console, resume=False, as_json=as_json)
    if not as_json:
        extra = [
            (["instar", "config", "show"], "show the YAML file of this demo"),
            (["instar", "train", "run.yaml"], "train on your own tasks (docs/concepts.md)"),
        ]
        _print_next_commands(console, run, extra)
    if run.is_stopped_by_user:
        raise typer.Exit(EXIT_INTERRUPTED)


def _run(config: RunConfig, console: Console, *, resume: bool, as_json: bool) -> LiveRun:
    """Train, write the report if there is something to report, and print the summary."""
    config = cluster_run.add_default_groups(config)
    resolved, _ = check_run(config, os.environ)  # before downloading the model
    fetch_model(resolved, console)

    async def run_with_display() -> LiveRun:
        display = Display(console)
        try:
            return await cluster_run.train(
                config, resume=resume, on_started=display.attach, log=display.log_event
            )
        finally:
            await display.close()

    run = asyncio.run(run_with_display())
    if any(record["kind"] in ("train", "eval") for record in read_metrics(run.folder.path)):
        from instar.cli.report import write_report

        write_report(run.folder.path)
    if as_json:
        print_json(summarize(run))
    else:
        _print_summary(console, summarize(run))
    return run


def summarize(run: LiveRun) -> Json:
    steps = read_steps(run.folder.path)
    summary: Json = {
        "name": run.run_id,
        "steps": len(steps),
        "seconds": round(max((float(step["elapsed"]) for step in steps), default=0.0), 1),
        "version": steps[-1]["version"] if steps else 0,
        "run_dir": str(run.folder.path),
        "report": str(run.folder.report / "index.html"),
        "stopped": run.is_stopped_by_user,
        "warnings": read_warnings(run.folder.path),
    }
    if run.config.trained_agents:
        summary["version"] = {step["agent"]: step["version"] for step in steps}
    for record in read_metrics(run.folder.path):
        if record["kind"] == "eval":
            summary[f"{record['mode']}_{record['label']}"] = record["accuracy"]
            seconds_key = f"eval_seconds_{record['label']}"
            summary[seconds_key] = round(summary.get(seconds_key, 0.0) + record["seconds"], 1)
    return summary


def _print_summary(console: Console, summary: Json) -> None:
    modes = [key.removesuffix("_after") for key in summary if key.endswith("_after") and "seconds" not in key]
    if modes:
        table = Table("mode", "before", "after", "change", title="Held-out tasks")
        for mode in modes:
            before, after = summary.get(f"{mode}_before"), summary[f"{mode}_after"]
            change = f"{after - before:+.2f}" if before is not None else ""
            table.add_row(mode, "" if before is None else f"{before:.2f}", f"{after:.2f}", change)
        console.print(table)
    console.print(f"{summary['steps']} steps in {summary['seconds']:.0f} s of training.")
    for warning in summary["warnings"]:
        console.print(f"[yellow]warning[/]: {escape(warning)}", highlight=False)


def _print_next_commands(
    console: Console, run: LiveRun, extra: Sequence[tuple[Sequence[str], str]] = ()
) -> None:
    """Print the path of the report, and commands for using the trained model, which work when pasted."""
    folder = _shorten(run.folder.path)
    if (run.folder.report / "index.html").is_file():
        console.print(f"Report: {folder}/report/index.html", style="bold", highlight=False, soft_wrap=True)
    commands: list[tuple[Sequence[str], str]] = [*extra]
    policy = asyncio.run(find_newest_policy(run.folder.path))
    if policy is not None:
        _, separator, agent = policy.policy_id.partition("/")
        run_and_agent = [folder, "--agent", agent] if separator else [folder]
        commands += [
            (["instar", "serve", *run_and_agent], f"serve version {policy.version} to your agents"),
            (["instar", "chat", *run_and_agent, "--compare", "base"], "compare it with the base model"),
        ]
        if policy.artifact.kind in ("adapter", "weights"):
            copy = f"{run.run_id}-v{policy.version}"
            commands.append(
                (["cp", "-r", _shorten(Path(policy.artifact.path)), copy], f"copy its {policy.artifact.kind}")
            )
    commands.append((["instar", "sessions", "ls", folder], "list the agent's attempts"))
    commands.append((["instar", "sessions", "export", folder, "--to", f"{run.run_id}-data"], "export them"))
    console.print("\nWhat to try next:")
    for command, purpose in commands:
        console.print(f"  {shlex.join(command)}  # {purpose}", highlight=False, markup=False, soft_wrap=True)


async def find_newest_policy(run_dir: Path) -> Policy | None:
    """Return the newest serving version, that of the first agent if there are several, or None if nothing was
    published or no new engine can load it."""
    async with open_run_store(run_dir, read_only=True) as (config, store):
        with contextlib.suppress(ConfigError):
            for policy_id in config.policy_ids:
                policy = await find_policy(store, policy_id)
                if policy.version:
                    return policy
    return None


def _shorten(path: Path) -> str:
    """Return the path relative to the working directory if it is inside, otherwise the absolute path."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
