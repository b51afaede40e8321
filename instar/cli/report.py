"""`instar report`: reward curves as PNG, and one self-contained HTML page."""

from __future__ import annotations

import asyncio
import base64
import html
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from instar.cli.options import AsJson, RunDir
from instar.cluster.layout import RunFolder, public_settings
from instar.config import RunConfig
from instar.errors import InstarError
from instar.rewards.judge.agreement import JudgeAgreement, measure_run_agreement
from instar.store.base import SessionRow
from instar.store.factory import open_store
from instar.trainer.monitor import read_metrics, read_steps, read_warnings
from instar.types import Call, Channel, Json, Message

BLUE, ORANGE, GREY = "#2f6fde", "#e07b39", "#8a8f98"


def report(run_dir: RunDir, as_json: AsJson = False) -> None:
    page = write_report(run_dir)
    typer.echo(json.dumps({"report": str(page)}) if as_json else f"Report: {page}")


def write_report(run_dir: Path) -> Path:
    """Write `report/reward.png` and `report/index.html`, and return the path of the page."""
    folder = RunFolder(run_dir)
    config = folder.read_config()
    steps = read_steps(run_dir)
    evaluations = latest_evaluations(run_dir)
    if not steps and not evaluations:
        raise InstarError(
            f"{run_dir} has nothing to report yet: no training step and no evaluation has finished."
        )
    folder.report.mkdir(exist_ok=True)
    picture = folder.report / "reward.png"
    _draw(picture, steps, evaluations)
    examples = asyncio.run(_load_examples(config))
    judges = asyncio.run(_load_agreement(config))
    page = folder.report / "index.html"
    page.write_text(
        _render_page(config, steps, evaluations, picture, examples, judges, read_warnings(run_dir)),
        encoding="utf-8",
    )
    return page


def latest_evaluations(run_dir: Path) -> list[Json]:
    """Return the last evaluation of each label and mode, in order."""
    records = [record for record in read_metrics(run_dir) if record["kind"] == "eval"]
    return list({(record["label"], record["mode"]): record for record in records}.values())


def _draw(path: Path, steps: list[Json], evaluations: list[Json]) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise InstarError(
            "The report needs matplotlib; install it with: pip install 'instar[local]'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curve, bars) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=[3, 2], dpi=130)
    rewarded = [step for step in steps if step.get("reward_mean") is not None]
    minutes = [step["elapsed"] / 60 for step in rewarded]
    rewards = [step["reward_mean"] for step in rewarded]
    curve.plot(minutes, rewards, color=GREY, linewidth=1, marker="o", markersize=3, label="each step")
    curve.plot(minutes, _smooth(rewards), color=BLUE, linewidth=2.5, label="moving average")
    curve.set(xlabel="minutes of training", ylabel="mean reward", title="Training reward")
    curve.set_ylim(min([-0.02, *rewards]), max([1.02, *rewards]))
    curve.legend(frameon=False, loc="best")
    modes = list(dict.fromkeys(record["mode"] for record in evaluations))
    labels = list(dict.fromkeys(record["label"] for record in evaluations))
    values = {(record["label"], record["mode"]): record["accuracy"] for record in evaluations}
    width = 0.8 / max(1, len(labels))
    colours = [GREY, BLUE, ORANGE, "#4c9f70", "#9467bd"]
    for offset, label in enumerate(labels):
        places = [place + offset * width for place in range(len(modes))]
        heights = [values.get((label, mode), 0.0) for mode in modes]
        drawn = bars.bar(places, heights, width * 0.92, color=colours[offset % len(colours)], label=label)
        bars.bar_label(drawn, fmt="%.2f", fontsize=9)
    centre = width * (len(labels) - 1) / 2
    bars.set_xticks([place + centre for place in range(len(modes))], modes)
    bars.set(title="Held-out tasks", ylabel="mean reward")
    bars.set_ylim(min([0.0, *values.values()]), 1.1 * max([1.0, *values.values()]))
    if labels:
        bars.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(labels))
    for axes in (curve, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _smooth(values: list[float], window: int = 5) -> list[float]:
    return [
        sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - window + 1) : i + 1])
    ]


async def _load_examples(config: RunConfig, limit: int = 3) -> list[tuple[str, list[Call], float | None]]:
    """Return the held-out tasks whose reward improved most, each before and after training."""
    if config.eval is None:
        return []
    mode = next(iter(config.eval.modes))
    store = open_store(config, read_only=True)
    try:
        by_label: dict[str, dict[str, SessionRow]] = {"before": {}, "after": {}}
        for row in await store.sessions(config.name, channel=Channel.VAL):
            for label, rows in by_label.items():
                # The evaluator's group ids are <run>/val/<label>-<mode>-v<version>/<place>.
                if row.calls and f"/val/{label}-{mode}-v" in (row.session.group_id or ""):
                    rows[row.session.task_id or ""] = row
        tried = by_label["before"].keys() & by_label["after"].keys()
        changed = sorted(tried, key=lambda task: (-_gain(by_label, task), task))[:limit]
        return [
            (label, await store.calls(row.session.session_id), row.reward)
            for task in changed
            for label in by_label
            if (row := by_label[label][task])
        ]
    finally:
        await store.close()


def _gain(by_label: dict[str, dict[str, SessionRow]], task: str) -> float:
    return (by_label["after"][task].reward or 0.0) - (by_label["before"][task].reward or 0.0)


async def _load_agreement(config: RunConfig) -> list[JudgeAgreement]:
    store = open_store(config, read_only=True)
    try:
        # Computing agreement reads every reward, so skip it if no judge scored anything.
        judged = any(scorer.startswith("judge:") for scorer in await store.score_counts(config.name))
        return await measure_run_agreement(store, config.name) if judged else []
    finally:
        await store.close()


STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem;color:#1c2024}
h1{margin-bottom:.2rem}.sub{color:#60646c;margin-top:0}img{width:100%}
table{border-collapse:collapse;margin:1rem 0;font-size:.9rem}
td,th{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #e4e6e9}
th{color:#60646c;font-weight:600}td:first-child,th:first-child{text-align:left}
.big td{font-size:1.2rem}.talk{background:#f6f7f9;border-radius:8px;padding:.6rem 1rem;margin:.5rem 0}
.talk{font-size:.9rem}.role{color:#2f6fde;display:inline-block;width:5.5rem}
pre{background:#f6f7f9;padding:1rem;border-radius:8px;
overflow:auto;font-size:.8rem}.warn{background:#fff3d6;color:#5c4400;padding:.6rem 1rem;border-radius:8px}
.good{color:#1f7a3d}.bad{color:#b3261e}
@media(prefers-color-scheme:dark){body{background:#16181b;color:#e6e8eb}.talk,pre{background:#22262b}
td,th{border-color:#33383e}img{background:#fff;border-radius:8px}}
"""


def _render_page(
    config: RunConfig,
    steps: list[Json],
    evaluations: list[Json],
    picture: Path,
    examples: list[tuple[str, list[Call], float | None]],
    judges: list[JudgeAgreement],
    warnings: list[str],
) -> str:
    image = base64.b64encode(picture.read_bytes()).decode()
    elapsed = steps[-1]["elapsed"] if steps else 0.0
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        f"<title>Instar · {html.escape(config.name)}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(config.name)}</h1>",
        f"<p class=sub>{html.escape(config.model.name)} · {len(steps)} steps · "
        f"{elapsed / 60:.1f} minutes of training</p>",
        *(f"<p class=warn>{html.escape(warning)}</p>" for warning in warnings),
        _evaluation_table(evaluations),
        f"<img alt='reward curves' src='data:image/png;base64,{image}'>",
    ]
    if examples:
        parts.append("<h2>Examples before and after training</h2>")
        parts += [_render_example(*example) for example in examples]
    parts += [
        "<h2>Steps</h2>",
        _step_table(steps),
        *_staleness_section(steps),
        *_agreement_section(judges),
        "<h2>Settings</h2>",
    ]
    settings = html.escape(json.dumps(public_settings(config), indent=2))
    parts.append(f"<details><summary>config.json</summary><pre>{settings}</pre></details>")
    return "\n".join(parts)


def _evaluation_table(evaluations: list[Json]) -> str:
    modes = list(dict.fromkeys(record["mode"] for record in evaluations))
    values = {(record["label"], record["mode"]): record for record in evaluations}
    rows: list[str] = []
    for mode in modes:
        before, after = values.get(("before", mode)), values.get(("after", mode))
        cells = "".join(
            f"<td>{record['accuracy']:.3f}</td>" if record else "<td>–</td>" for record in (before, after)
        )
        change = f"{after['accuracy'] - before['accuracy']:+.3f}" if before and after else "–"
        tasks = (after or before or {}).get("n", "–")
        rows.append(f"<tr><td>{html.escape(mode)}</td>{cells}<td>{change}</td><td>{tasks}</td></tr>")
    if not rows:
        return ""
    head = "<tr><th>held-out tasks</th><th>before</th><th>after</th><th>change</th><th>tasks</th></tr>"
    return f"<table class=big>{head}{''.join(rows)}</table>"


def _step_table(steps: list[Json]) -> str:
    columns = (
        "reward_mean",
        "version",
        "staleness_mean",
        "zero_signal",
        "grad_norm",
        "ratio_mean",
        "clipped",
        "importance_p99",
        "ess",
        "step_seconds",
    )
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in ("step", *columns))
    rows = [
        "<tr>" + "".join(f"<td>{_cell(step.get(name))}</td>" for name in ("step", *columns)) + "</tr>"
        for step in steps
    ]
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _staleness_section(steps: list[Json]) -> list[str]:
    """Return tables of the staleness of trained tokens and of dropped samples over the run."""
    behind, dropped = _sum_counts(steps, "staleness_tokens"), _sum_counts(steps, "dropped")
    parts: list[str] = []
    if behind:
        rows = [
            (f"{versions} behind", f"{count:,}", f"{count / sum(behind.values()):.1%}")
            for versions, count in sorted(behind.items(), key=lambda item: int(item[0]))
        ]
        parts += ["<h2>Staleness</h2>", _table(("versions", "trained tokens", "share"), rows)]
    if dropped:
        rows = [(reason, f"{count:,}") for reason, count in sorted(dropped.items())]
        parts += ["<h2>Not trained on</h2>", _table(("reason", "samples"), rows)]
    return parts


def _agreement_section(judges: list[JudgeAgreement]) -> list[str]:
    """Return a table of each judge's agreement with itself and with rules. docs/judge.md explains the
    table."""
    head = (
        "judge",
        "rewards",
        "mean",
        "dollars",
        "votes",
        "orders",
        "sessions with a rule",
        "same side",
        "r",
    )
    rows = [
        (
            *(one.judge, f"{one.rewards:,}", f"{one.mean:.3f}", f"{one.dollars:.2f}", _cell(one.votes)),
            *(_cell(one.orders), f"{one.rule_sessions:,}"),
            *(_cell(one.rule_same_side), _cell(one.rule_correlation)),
        )
        for one in judges
    ]
    return ["<h2>Judges</h2>", _table(head, rows)] if rows else []


def _sum_counts(steps: list[Json], name: str) -> Counter[str]:
    summed: Counter[str] = Counter()
    for step in steps:
        summed.update(step.get(name, {}))
    return summed


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    named = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{named}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else html.escape(str(value))


def _conversation_from_question(calls: list[Call]) -> list[Message]:
    """Return the conversation starting at the last question of the first prompt, without few-shot
    examples."""
    first, last = calls[0].messages, calls[-1].messages
    opening = first if last[: len(first)] == first else last
    question = max((i for i, message in enumerate(opening) if message["role"] == "user"), default=0)
    return [*last[question:], calls[-1].reply]


def _render_example(label: str, calls: list[Call], reward: float | None) -> str:
    lines: list[str] = []
    for message in _conversation_from_question(calls):
        text = message["content"]
        for call in message.get("tool_calls", []):
            text += f" {call['name']}({call['arguments']})"
        lines.append(f"<div><span class=role>{message['role']}</span>{html.escape(text)}</div>")
    verdict = "good" if reward is not None and reward > 0 else "bad"
    shown = "no reward" if reward is None else f"reward {reward:g}"
    return f"<div class=talk><b>{label}</b> · <span class={verdict}>{shown}</span>{''.join(lines)}</div>"
