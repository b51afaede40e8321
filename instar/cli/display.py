"""The live display of a run: a panel in a terminal, or one line per event if the output is not a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from instar.trainer.monitor import read_metrics, read_steps
from instar.types import Endpoint, Json

if TYPE_CHECKING:
    from instar.cluster.live_run import LiveRun
    from instar.engines.base import EngineStatus

BARS = " ▁▂▃▄▅▆▇█"
REFRESH_SECONDS = 0.5
ROLE_ORDER = ("gateway", "engine", "rollout", "rewards", "trainer", "teacher")


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return the last ``width`` values as bars, on a scale from 0 to 1 or to the largest value above 1."""
    last_values = values[-width:]
    top = max([1.0, *last_values])
    return "".join(BARS[max(0, min(8, round(value / top * 8)))] for value in last_values)


class Display:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.events: list[str] = []
        self._run: LiveRun | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_token_sample: tuple[float, int] | None = None
        """The time of the last poll, and the number of tokens generated until then."""
        self._tokens_per_second = 0.0

    def log_event(self, text: str) -> None:
        self.events.append(f"{time.strftime('%H:%M:%S')} {text}")
        if self._run is None or not self.console.is_terminal:
            self.console.print(text, highlight=False)

    def attach(self, run: LiveRun) -> None:
        self._run = run
        show = self._show_panel() if self.console.is_terminal else self._print_lines()
        self._task = asyncio.create_task(show)
        run.watchers.append(self._task)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _show_panel(self) -> None:
        assert self._run is not None
        with Live(console=self.console, auto_refresh=False, transient=False) as live:
            try:
                while True:
                    live.update(await self._render(self._run), refresh=True)
                    await asyncio.sleep(REFRESH_SECONDS)
            except asyncio.CancelledError:
                # Show the final state; the run's store is still open.
                live.update(await self._render(self._run), refresh=True)
                raise

    async def _render(self, run: LiveRun) -> RenderableType:
        steps = read_steps(run.folder.path)
        endpoints = await run.store.endpoints(run.run_id)
        status = await self._read_status(run)
        progress = await run.store.progress(run.run_id)
        total = run.config.trainer.steps
        head = Table.grid(padding=(0, 2))
        head.add_row("phase", Text(run.phase, style="bold"))
        head.add_row("step", f"{len(steps)} of {total}", ProgressBar(total, len(steps), width=30))
        rewards = [float(step["reward_mean"]) for step in steps if step.get("reward_mean") is not None]
        if rewards:
            head.add_row("reward", f"{rewards[-1]:.2f}", Text(sparkline(rewards), style="green"))
        head.add_row("policy version", str(status.version if status else progress.head_version))
        if steps:
            ess = steps[-1].get("ess")
            head.add_row(
                "staleness",
                f"{steps[-1].get('staleness_mean', 0):.1f} versions",
                "" if ess is None else f"{ess:.0%} effective samples",
            )
        head.add_row("tokens/s", f"{self._tokens_per_second:.0f}")
        head.add_row("elapsed", f"{time.monotonic() - run.started:.0f} s")
        accuracies: dict[str, list[float]] = {}
        for record in read_metrics(run.folder.path):
            if record["kind"] == "eval":
                accuracies.setdefault(record["mode"], []).append(float(record["accuracy"]))
        for mode, values in accuracies.items():
            head.add_row(f"held-out {mode}", " → ".join(f"{value:.2f}" for value in values[-6:]))
        body: list[RenderableType] = [head, Text(), roles_table(endpoints)]
        if self.events:
            body += [Text(), Text("\n".join(self.events[-4:]), style="dim")]
        return Panel(Group(*body), title=f"instar · {run.run_id}", border_style="cyan", padding=(1, 2))

    async def _read_status(self, run: LiveRun) -> EngineStatus | None:
        from instar.cluster.live_run import engine_status

        status = await engine_status(run)
        if status is not None:
            now = time.monotonic()
            if self._last_token_sample is not None and now > self._last_token_sample[0]:
                rate = (status.generated_tokens - self._last_token_sample[1]) / (
                    now - self._last_token_sample[0]
                )
                self._tokens_per_second = 0.7 * self._tokens_per_second + 0.3 * max(0.0, rate)
            self._last_token_sample = (now, status.generated_tokens)
        return status

    async def _print_lines(self) -> None:
        assert self._run is not None
        # The earlier steps of a resumed run were printed when they were trained.
        printed_count = len(list(read_metrics(self._run.folder.path)))
        phases: list[str] = []

        def print_new_records(run: LiveRun) -> None:
            nonlocal printed_count
            records = list(read_metrics(run.folder.path))
            for record in records[printed_count:]:
                self.console.print(format_record(record), highlight=False)
            printed_count = len(records)
            if run.phase not in phases[-1:]:
                phases.append(run.phase)
                self.console.print(f"{run.phase} ...", highlight=False)

        try:
            while True:
                print_new_records(self._run)
                await asyncio.sleep(REFRESH_SECONDS)
        except asyncio.CancelledError:
            print_new_records(self._run)
            raise


def format_record(record: Json) -> str:
    if record["kind"] == "eval":
        return (
            f"held-out tasks, {record['label']}, {record['mode']}: {record['accuracy']:.3f} "
            f"({record['n']} tasks, version {record['version']}, {record['seconds']:.0f} s)"
        )
    if record["kind"] == "warning":
        return f"warning: {record['text']}"
    reward = record.get("reward_mean")
    return (
        f"step {record['step']:>3}  reward {'–' if reward is None else f'{reward:.3f}'}  "
        f"version {record['version']}  staleness {record.get('staleness_mean', 0):.1f}  "
        f"{record['step_seconds']:.1f} s (waited {record['wait_seconds']:.1f} s)  "
        f"elapsed {record['elapsed']:.0f} s"
    )


def roles_table(endpoints: Sequence[Endpoint]) -> Table:
    table = Table.grid(padding=(0, 2))
    for role in ROLE_ORDER:
        for endpoint in endpoints:
            if endpoint.role == role:
                table.add_row(Text(endpoint.name, style="cyan"), Text(endpoint.doing))
    return table
