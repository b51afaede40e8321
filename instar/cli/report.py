"""`instar report`: reward curves as a PNG file, and an HTML page that contains them."""

from __future__ import annotations

import asyncio
import base64
import html
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from instar.cli.options import AsJson, RunDir
from instar.cli.output import print_result
from instar.cli.run_store import open_run_store
from instar.cluster.layout import RunFolder, public_settings
from instar.config import RunConfig
from instar.errors import InstarError
from instar.rewards.judge.agreement import JudgeAgreement, measure_run_agreement
from instar.store.base import SessionRow, Store
from instar.trainer.monitor import read_metrics, read_steps, read_warnings
from instar.types import Call, Channel, Json
from instar.umask import PRIVATE_UMASK, use_umask

BLUE, ORANGE, GREY = "#2f6fde", "#e07b39", "#8a8f98"
COLORS = (GREY, BLUE, ORANGE, "#4c9f70", "#9467bd")


class ReportExample(NamedTuple):
    label: str
    calls: list[Call]
    reward: float | None


def report(run_dir: RunDir, as_json: AsJson = False) -> None:
    page = write_report(run_dir)
    print_result(as_json, {"report": str(page)}, f"Report: {page}")


def write_report(run_dir: Path) -> Path:
    """Write `report/reward.png` and `report/index.html`, and return the path of the page."""
    folder = RunFolder(run_dir)
    config = folder.read_config()
    steps = read_steps(run_dir)
    records = [record for record in read_metrics(run_dir) if record["kind"] == "eval"]
    evaluations = list({(record["label"], record["mode"]): record for record in records}.values())
    if not steps and not evaluations:
        raise InstarError(
            f"{run_dir} has nothing to report yet: no training step and no evaluation has finished."
        )
    chart, page = folder.report / "reward.png", folder.report / "index.html"
    examples, judges = asyncio.run(_load_from_store(run_dir))
    with use_umask(PRIVATE_UMASK):
        folder.report.mkdir(exist_ok=True)
        _draw_chart(chart, steps, evaluations)
        page.write_text(
            _render_page(config, steps, evaluations, chart, examples, judges, read_warnings(run_dir)),
            encoding="utf-8",
        )
    return page


def _draw_chart(path: Path, steps: list[Json], evaluations: list[Json]) -> None:
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
    rewards = [step["reward_mean"] for step in rewarded]
    for number, agent in enumerate(dict.fromkeys(step.get("agent") for step in rewarded)):
        own = [step for step in rewarded if step.get("agent") == agent]
        minutes, values = [step["elapsed"] / 60 for step in own], [step["reward_mean"] for step in own]
        label = "each step" if number == 0 else None
        curve.plot(minutes, values, color=GREY, linewidth=1, marker="o", markersize=3, label=label)
        label = "moving average" if agent is None else f"{agent}, moving average"
        color = COLORS[1 + number % (len(COLORS) - 1)]
        curve.plot(minutes, _moving_average(values), color=color, linewidth=2.5, label=label)
    curve.set(xlabel="minutes of training", ylabel="mean reward", title="Training reward")
    curve.set_ylim(min([-0.02, *rewards]), max([1.02, *rewards]))
    curve.legend(frameon=False, loc="best")
    modes = list(dict.fromkeys(record["mode"] for record in evaluations))
    labels = list(dict.fromkeys(record["label"] for record in evaluations))
    accuracies = {(record["label"], record["mode"]): record["accuracy"] for record in evaluations}
    width = 0.8 / max(1, len(labels))
    for offset, label in enumerate(labels):
        positions = [index + offset * width for index in range(len(modes))]
        heights = [accuracies.get((label, mode), 0.0) for mode in modes]
        container = bars.bar(
            positions, heights, width * 0.92, color=COLORS[offset % len(COLORS)], label=label
        )
        bars.bar_label(container, fmt="%.2f", fontsize=9)
    center = width * (len(labels) - 1) / 2
    bars.set_xticks([index + center for index in range(len(modes))], modes)
    bars.set(title="Held-out tasks", ylabel="mean reward")
    bars.set_ylim(min([0.0, *accuracies.values()]), 1.1 * max([1.0, *accuracies.values()]))
    if labels:
        bars.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(labels))
    for axes in (curve, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _moving_average(values: list[float], window: int = 5) -> list[float]:
    slices = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(values) / len(values) for values in slices]


async def _load_from_store(run_dir: Path) -> tuple[list[ReportExample], list[JudgeAgreement]]:
    async with open_run_store(run_dir, read_only=True) as (config, store):
        # Computing agreement reads every reward, so skip it if no judge scored anything.
        is_judged = any(scorer.startswith("judge:") for scorer in await store.score_counts(config.name))
        judges = await measure_run_agreement(store, config.name) if is_judged else []
        return await _load_examples(store, config), judges


async def _load_examples(store: Store, config: RunConfig, limit: int = 3) -> list[ReportExample]:
    """Return examples of the ``limit`` held-out tasks that improved most in the first evaluation mode."""
    if config.eval is None:
        return []
    mode = next(iter(config.eval.modes))
    before: dict[str, SessionRow] = {}
    after: dict[str, SessionRow] = {}
    rows_by_label = {"before": before, "after": after}
    for row in await store.sessions(config.name, channel=Channel.VAL):
        for label, rows in rows_by_label.items():
            # The evaluator's group ids are <run>/val/<label>-<mode>-v<version>/<index>.
            if row.call_count and f"/val/{label}-{mode}-v" in (row.session.group_id or ""):
                rows[row.session.task_id or ""] = row
    gains = {
        task: (after[task].reward or 0.0) - (before[task].reward or 0.0) for task in before if task in after
    }
    most_improved = sorted(gains, key=lambda task: (-gains[task], task))[:limit]
    return [
        ReportExample(label, await store.calls(rows[task].session.session_id), rows[task].reward)
        for task in most_improved
        for label, rows in rows_by_label.items()
    ]


STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem;color:#1c2024}
h1{margin-bottom:.2rem}.sub{color:#60646c;margin-top:0}img{width:100%}
table{border-collapse:collapse;margin:1rem 0;font-size:.9rem}
td,th{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #e4e6e9}
th{color:#60646c;font-weight:600}td:first-child,th:first-child{text-align:left}
.big td{font-size:1.2rem}.conversation{background:#f6f7f9;border-radius:8px;padding:.6rem 1rem;margin:.5rem 0}
.conversation{font-size:.9rem}.role{color:#2f6fde;display:inline-block;width:5.5rem}
pre{background:#f6f7f9;padding:1rem;border-radius:8px;
overflow:auto;font-size:.8rem}.warn{background:#fff3d6;color:#5c4400;padding:.6rem 1rem;border-radius:8px}
.good{color:#1f7a3d}.bad{color:#b3261e}
@media(prefers-color-scheme:dark){body{background:#16181b;color:#e6e8eb}.conversation,pre{background:#22262b}
td,th{border-color:#33383e}img{background:#fff;border-radius:8px}}
"""


def _render_page(
    config: RunConfig,
    steps: list[Json],
    evaluations: list[Json],
    chart: Path,
    examples: list[ReportExample],
    judges: list[JudgeAgreement],
    warnings: list[str],
) -> str:
    image = base64.b64encode(chart.read_bytes()).decode()
    elapsed = max((step["elapsed"] for step in steps), default=0.0)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        f"<title>Instar · {html.escape(config.name)}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(config.name)}</h1>",
        f"<p class=sub>{html.escape(config.model.name)} · {len(steps)} steps · "
        f"{elapsed / 60:.1f} minutes of training</p>",
        *(f"<p class=warn>{html.escape(warning)}</p>" for warning in warnings),
        _render_evaluations(evaluations),
        f"<img alt='reward curves' src='data:image/png;base64,{image}'>",
    ]
    if examples:
        parts.append("<h2>Examples before and after training</h2>")
        parts += [render_example(example) for example in examples]
    parts += [
        "<h2>Steps</h2>",
        _render_steps(steps),
        *_render_staleness(steps),
        *_render_agreement(judges),
        "<h2>Settings</h2>",
    ]
    settings = html.escape(json.dumps(public_settings(config), indent=2))
    parts.append(f"<details><summary>config.json</summary><pre>{settings}</pre></details>")
    return "\n".join(parts)


def _render_evaluations(evaluations: list[Json]) -> str:
    records = {(record["label"], record["mode"]): record for record in evaluations}
    rows: list[Sequence[str]] = []
    for mode in dict.fromkeys(record["mode"] for record in evaluations):
        before, after = records.get(("before", mode)), records.get(("after", mode))
        accuracies = (f"{record['accuracy']:.3f}" if record else "–" for record in (before, after))
        change = f"{after['accuracy'] - before['accuracy']:+.3f}" if before and after else "–"
        rows.append((mode, *accuracies, change, str((after or before or {}).get("n", "–"))))
    if not rows:
        return ""
    head = ("mode", "before", "after", "change", "tasks")
    return f"<h2>Held-out tasks</h2>{_render_table(head, rows, css_class='big')}"


def _render_steps(steps: list[Json]) -> str:
    columns = ("step", "reward_mean", "version", "staleness_mean", "zero_signal", "grad_norm", "ratio_mean")
    columns += ("clipped", "importance_p99", "ess", "step_seconds")
    if any("agent" in step for step in steps):
        columns = ("agent", *columns)
    rows = [tuple(_format_cell(step.get(name)) for name in columns) for step in steps]
    return _render_table([name.replace("_", " ") for name in columns], rows)


def _render_staleness(steps: list[Json]) -> list[str]:
    """Return the HTML tables of trained tokens by staleness and of dropped samples by reason."""
    tokens, dropped = _sum_counts(steps, "staleness_tokens"), _sum_counts(steps, "dropped")
    parts: list[str] = []
    if tokens:
        rows = [
            (staleness, f"{count:,}", f"{count / tokens.total():.1%}")
            for staleness, count in sorted(tokens.items(), key=lambda item: int(item[0]))
        ]
        parts += ["<h2>Staleness</h2>", _render_table(("steps", "trained tokens", "fraction"), rows)]
    if dropped:
        rows = [(reason, f"{count:,}") for reason, count in sorted(dropped.items())]
        parts += ["<h2>Not trained on</h2>", _render_table(("reason", "samples"), rows)]
    return parts


def _render_agreement(judges: list[JudgeAgreement]) -> list[str]:
    """Return the HTML table of each judge's agreement with itself and with rules (see docs/judge.md)."""
    rows = [
        {
            "judge": judge.judge,
            "rewards": f"{judge.reward_count:,}",
            "mean reward": f"{judge.mean_reward:.3f}",
            "cost ($)": f"{judge.dollars:.2f}",
            "vote agreement": _format_cell(judge.vote_agreement),
            "order agreement": _format_cell(judge.order_agreement),
            "sessions with rule rewards": f"{judge.rule_sessions:,}",
            "rule agreement": _format_cell(judge.rule_same_side),
            "rule correlation": _format_cell(judge.rule_correlation),
        }
        for judge in judges
    ]
    if not rows:
        return []
    return ["<h2>Judges</h2>", _render_table(list(rows[0]), [tuple(row.values()) for row in rows])]


def _sum_counts(steps: list[Json], name: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for step in steps:
        counts.update(step.get(name, {}))
    return counts


def _render_table(head: Sequence[str], rows: Sequence[Sequence[str]], css_class: str = "") -> str:
    attribute = f" class={css_class}" if css_class else ""
    header = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table{attribute}><tr>{header}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _format_cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def render_example(example: ReportExample) -> str:
    """Return the conversation as HTML. It starts at the last user message of the first prompt, or of the last
    prompt if that does not continue the first one. This skips few-shot examples."""
    label, calls, reward = example
    first, last = calls[0].messages, calls[-1].messages
    prompt = first if last[: len(first)] == first else last
    start = max((index for index, message in enumerate(prompt) if message["role"] == "user"), default=0)
    lines: list[str] = []
    for message in (*last[start:], calls[-1].reply):
        text = message["content"]
        for call in message.get("tool_calls", []):
            text += f" {call['name']}({call['arguments']})"
        lines.append(f"<div><span class=role>{message['role']}</span>{html.escape(text)}</div>")
    css_class = "good" if reward is not None and reward > 0 else "bad"
    reward_text = "no reward" if reward is None else f"reward {reward:g}"
    title = f"<b>{label}</b> · <span class={css_class}>{reward_text}</span>"
    return f"<div class=conversation>{title}{''.join(lines)}</div>"
