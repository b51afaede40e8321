"""`instar models check`: what a model's prompts, replies and architecture are supported by."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from instar.cli.options import AsJson, new_app
from instar.cli.output import print_json
from instar.clouds.base import SERVICES
from instar.config import LoraConfig, ModelConfig
from instar.errors import BackendError, ConfigError, InstarError
from instar.models import WEIGHT_PATTERNS, load_tokenizer, resolve_tokenizer
from instar.record.base import Renderer

app = new_app()


@dataclass(frozen=True)
class Support:
    supported: bool | None
    """None if it was not checked."""
    reason: str = ""
    """Why the model is not supported or was not checked, or the condition under which it is supported."""


@dataclass
class ModelReport:
    name: str
    family: str | None = None
    """The model type in its config."""
    renderer: str | None = None
    """`template`, or the family in the `renderers` package."""
    tools: str | None = None
    """The format of tool calls."""
    reasoning: str | None = None
    """The text that begins the reasoning of a reply, or None if the format has no reasoning."""
    linked: float | None = None
    trained: float | None = None
    exact_possible: float | None = None
    rewritten: int | None = None
    """The number of calls in which the format itself rewrites the history."""
    format_problem: str | None = None
    """Why prompts or replies are not exact, or why this was not measured."""
    engines: dict[str, Support] = field(default_factory=dict[str, Support])
    backends: dict[str, Support] = field(default_factory=dict[str, Support])
    not_checked: list[str] = field(default_factory=list[str])

    @property
    def is_exact(self) -> bool:
        is_complete = self.linked == self.trained == self.exact_possible == 1
        return self.format_problem is None and is_complete

    @property
    def is_servable(self) -> bool:
        return self.is_exact and any(engine.supported for engine in self.engines.values())


@app.callback()
def models() -> None:
    """Check models before a run uses them."""


@app.command()
def check(
    name: Annotated[str, typer.Argument(metavar="NAME|FOLDER", help="A model's name or folder.")],
    python: Annotated[str | None, typer.Option(help="Python interpreter that has vLLM.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the model's formats, whether conversations are recorded exactly, and which engines and backends
    support it. Only the config and the tokenizer are needed. The exit status is 1 unless an engine can serve
    the model exactly."""
    report = check_model(name, python=python)
    if as_json:
        print_json({**asdict(report), "is_servable": report.is_servable})
    else:
        _print_report(report, Console())
    raise typer.Exit(not report.is_servable)


def check_model(name: str, *, python: str | None = None) -> ModelReport:
    """Check a model by its config and tokenizer. Raises ConfigError if they do not exist."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    folder = _find_folder(name)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    report = ModelReport(name, config.get("model_type"))
    _check_format(report, folder)
    has_weights = any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS)
    report.not_checked.append(
        "the weights, which were not loaded" if has_weights else "the weights, which are not in the folder"
    )
    model = ModelConfig(name=str(folder))
    report.engines = {"local": _check_local_engine(model), "vllm": _check_vllm(config, python)}
    unknown = Support(None, "only the service knows its models")
    services = dict.fromkeys(SERVICES, unknown)
    report.engines |= services
    verl = Support(None, "verl runs in its own environment; run `instar backends check verl`")
    report.backends = {"local": _check_local_backend(model), "verl": verl, **services}
    return report


def _find_folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        files = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise ConfigError(
            f"model.name: the folder {name!r} has no config.json, only {files}; name the folder with "
            "config.json, tokenizer.json and the chat template"
        )
    return resolve_tokenizer(name)


def _check_format(report: ModelReport, folder: Path) -> None:
    from instar.record.render import load_renderer

    try:
        tokenizer = load_tokenizer(folder)
        renderer = load_renderer(folder, ModelConfig(name=str(folder)))
    except InstarError as error:
        report.format_problem = str(error)
        return
    except Exception as error:  # noqa: BLE001 - transformers raises many types for missing or damaged files
        report.format_problem = f"the tokenizer cannot be loaded ({type(error).__name__}: {error})"
        return
    check_renderer(report, renderer, tokenizer)


def check_renderer(report: ModelReport, renderer: Renderer, tokenizer: Any) -> None:
    """Add the formats of prompts and replies, and the exactness of a conversation, to the report."""
    from instar.cli.model_probe import hold_probe
    from instar.record.render import TemplateRenderer

    if isinstance(renderer, TemplateRenderer):
        report.renderer = "template"
        report.tools = "generic" if renderer.uses_generic_tools else renderer.tool_format.name
        report.reasoning = renderer.reasoning_format.begin.strip() if renderer.can_reason else None
    else:
        report.renderer = report.tools = "renderers"
        report.not_checked.append("the format of reasoning, which the `renderers` package parses")
    probe = hold_probe(renderer, tokenizer)
    report.linked, report.trained = probe.linked, probe.trained
    report.exact_possible, report.rewritten = probe.exact_possible, probe.rewritten
    if probe.problem is not None:
        report.format_problem = f"the conversation of the check failed: {probe.problem}"


def _check_local_engine(model: ModelConfig) -> Support:
    from instar.engines.local.check import check_architecture

    return _attempt(lambda: check_architecture(model))


def _check_local_backend(model: ModelConfig) -> Support:
    from transformers import AutoConfig

    from instar.architecture import create_random_copy
    from instar.backends.local.check import check_architecture
    from instar.backends.local.lora import add_adapter

    support = _attempt(lambda: check_architecture(model))
    if support.supported:
        copy = create_random_copy(AutoConfig.from_pretrained(model.name, local_files_only=True))
        try:
            add_adapter(copy, LoraConfig(), Path(model.name), seed=0)
        except BackendError as error:
            return Support(True, f"only with backend.lora: null ({error})")
    return support


def _attempt(run_check: Callable[[], None]) -> Support:
    try:
        run_check()
    except InstarError as error:
        return Support(False, str(error).partition(": ")[2] or str(error))
    return Support(True)


def _check_vllm(config: dict[str, Any], python: str | None) -> Support:
    from instar.engines.vllm.command import find_vllm, list_architectures

    try:
        supported = list_architectures(find_vllm(python))
    except ConfigError as error:
        return Support(None, str(error).removeprefix("engine.python: "))
    architectures: list[str] = config.get("architectures") or []
    if not architectures:
        return Support(None, "config.json does not name `architectures`, by which vLLM chooses its code")
    if missing := [name for name in architectures if name not in supported]:
        return Support(False, f"vLLM does not list {', '.join(missing)}")
    return Support(True)


def _print_report(report: ModelReport, console: Console) -> None:
    def show(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.0%}"

    rows = {
        "model": report.name,
        "family": report.family or "not in config.json",
        "renderer": report.renderer or "none",
        "tool calls": report.tools or "none",
        "reasoning": report.reasoning or "none",
        "linked": show(report.linked),
        "trained": show(report.trained),
        "exact_possible": show(report.exact_possible),
    }
    if report.rewritten:
        rows["exact_possible"] += f", without {report.rewritten} in which the format rewrites the history"
    rows |= {"problem": report.format_problem} if report.format_problem else {}
    for kind, parts in (("engine", report.engines), ("backend", report.backends)):
        for part, support in parts.items():
            state = {True: "yes", False: "no", None: "not checked"}[support.supported]
            rows[f"{kind} {part}"] = f"{state}: {support.reason}" if support.reason else state
    table = Table("check", "result")
    for name, result in rows.items():
        table.add_row(name, result)
    console.print(table, highlight=False, markup=False)
    for text in report.not_checked:
        console.print(f"Not checked: {text}", highlight=False, markup=False, soft_wrap=True)
