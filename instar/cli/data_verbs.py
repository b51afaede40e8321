"""The verbs that take data out of a run and bring it in. They parse here, as those of `main` do there."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from instar.cli.filters import filtered, session_filter

datasets_app = typer.Typer(help="Exported data, known by name and version.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
RunDir = Annotated[Path, typer.Argument(help="The run's folder, runs/<name>.")]
Where = Annotated[
    Path, typer.Option("--runs", help="The folder that runs are in; or one of the runs, to use its store.")
]
Named = Annotated[str, typer.Argument(help="NAME or NAME@VERSION.")]
RUNS = Path("runs")


class Format(StrEnum):
    jsonl = "jsonl"
    parquet = "parquet"
    hf = "hf"
    sft = "sft"
    dpo = "dpo"


@filtered
def sessions_export(
    run_dir: RunDir,
    chosen: dict[str, Any],
    to: Annotated[Path | None, typer.Option(help="The folder to write. It must not be there yet.")] = None,
    format: Annotated[
        Format,
        typer.Option(
            help="jsonl, parquet, hf: everything, as JSON lines, Parquet, or a Hugging Face folder. "
            "sft, dpo: conversations and pairs, as TRL reads them."
        ),
    ] = Format.jsonl,
    name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Know it as dataset:NAME, the next version.")
    ] = None,
    samples: Annotated[bool, typer.Option("--samples", help="Write the flat samples beside it.")] = False,
    margin: Annotated[float, typer.Option(min=0, help="dpo: how far the rewards must be apart.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Write sessions that have ended to a folder: everything, or what another trainer reads. For sft,
    --reward-min is what a session must have been worth to be imitated; by default, more than 0."""
    from instar.cli.datasets import run_export
    from instar.datasets.export import Wanted

    least = None
    if format is Format.sft:
        least, chosen = chosen["reward_min"], {**chosen, "reward_min": None}
    wanted = Wanted(
        format=format.value,
        where=session_filter(chosen),
        samples=samples,
        min_reward=least,
        margin=margin,
    )
    run_export(run_dir, to, wanted, name=name, as_json=as_json)


def sessions_import(
    folder: Annotated[Path, typer.Argument(help="What `instar sessions export` wrote.")],
    into: Annotated[
        Path | None,
        typer.Option(help="A run's folder. Default: runs/ and the run's name; made where needed."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run. Default: the one it had.")] = None,
    as_json: AsJson = False,
) -> None:
    """Bring exported sessions back as they were. What is there already, the same, is left alone."""
    from instar.cli.datasets import run_import

    run_import(folder, into, run, as_json=as_json)


@datasets_app.command("ls")
def datasets_ls(runs: Where = RUNS, as_json: AsJson = False) -> None:
    """List datasets: name and version, sessions, hash, folder."""
    from instar.cli.datasets import run_ls

    run_ls(runs, as_json=as_json)


@datasets_app.command("add")
def datasets_add(
    name: Annotated[str, typer.Argument(help="The name.")],
    folder: Annotated[Path, typer.Argument(help="What `instar sessions export` wrote.")],
    runs: Where = RUNS,
    as_json: AsJson = False,
) -> None:
    """Give exported data a name; the same content again is the same version."""
    from instar.cli.datasets import run_add

    run_add(runs, name, folder, as_json=as_json)


@datasets_app.command("show")
def datasets_show(name: Named, runs: Where = RUNS, as_json: AsJson = False) -> None:
    """Show where a dataset is and what its manifest says."""
    from instar.cli.datasets import run_show

    run_show(runs, name, as_json=as_json)


@datasets_app.command("rm")
def datasets_rm(
    name: Named,
    files: Annotated[bool, typer.Option("--files", help="Remove the folder too.")] = False,
    runs: Where = RUNS,
    as_json: AsJson = False,
) -> None:
    """Forget a dataset, or one version of it. Its files stay."""
    from instar.cli.datasets import run_rm

    run_rm(runs, name, files=files, as_json=as_json)


def add_verbs(app: typer.Typer, sessions_app: typer.Typer) -> None:
    app.add_typer(datasets_app, name="datasets")
    sessions_app.command("export")(sessions_export)
    sessions_app.command("import")(sessions_import)
