"""`instar simulate`."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from instar.cli.config_file import load_config
from instar.cli.options import AsJson, ConfigFile, Overrides
from instar.cli.run_store import open_run_store
from instar.config import (
    CloudConfig,
    CloudEngineConfig,
    LocalEngineConfig,
    MixedEngineConfig,
    RunConfig,
    SimulateConfig,
    VllmEngineConfig,
)
from instar.engines.factory import resolve_vllm_config
from instar.errors import ConfigError
from instar.simulate import pipeline
from instar.simulate.base import ClusterSpec, EngineSpeed, SimulationResult, Workload
from instar.simulate.bound import ThroughputBound, upper_bound
from instar.simulate.measure import measure, with_sessions
from instar.simulate.pipeline import MAX_FAILED_GROUPS
from instar.simulate.recommend import Recommendation, recommend
from instar.simulate.sessions import draw_sessions, read_workload
from instar.trainer.monitor import read_steps
from instar.types import Json

DRAWN = 20_000
"""Sessions drawn, where none are given: they are played over again after that."""
UNLIMITED = 1024
"""Replies at once of an engine that does not say its limit."""


def simulate(
    file: ConfigFile,
    engines: Annotated[int | None, typer.Option(min=1, help="Default: as in the YAML file.")] = None,
    max_staleness: Annotated[int | None, typer.Option(min=0, help="Default: as in the YAML file.")] = None,
    workload: Annotated[Path | None, typer.Option(help="A file of sessions to replay.")] = None,
    measured: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_DIR", help="Use the times of a finished run.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default: the run's.")] = None,
    sweep: Annotated[bool, typer.Option(help="Search for a better number of engines and staleness.")] = True,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    config = load_config(file, overrides or ())
    if config.simulate is None and workload is None and measured is None:
        raise ConfigError(
            "The simulation needs times: give --from RUN_DIR of a similar run, --workload FILE, or a "
            "`simulate` section (see docs/simulate.md)."
        )
    plant = cluster_from_config(config, engines=engines, max_staleness=max_staleness)
    chosen = config.seed if seed is None else seed
    work = asyncio.run(load_workload(config, workload=workload, measured=measured, seed=chosen))
    console = Console(stderr=True)
    with console.status("simulating") as status:
        outcome = pipeline.simulate(
            work,
            plant,
            seed=chosen,
            on_step=lambda done: status.update(f"simulating: step {done} of {plant.steps}"),
        )
        advice = _advice(config, work, plant, chosen, status.update) if sweep else None
    limit = upper_bound(work, plant)
    if as_json:
        print(json.dumps(as_record(outcome, limit, advice, plant)), flush=True)
    else:
        _show(Console(), outcome, limit, advice, plant)


def cluster_from_config(
    config: RunConfig, *, engines: int | None = None, max_staleness: int | None = None
) -> ClusterSpec:
    """The parts of a run that are simulated."""
    rollout = config.rollout
    if rollout is None:
        raise ConfigError("rollout: needed to simulate; name its group_size and concurrency")
    if max_staleness and config.trainer.mode == "sync":
        raise ConfigError(f"--max-staleness: given {max_staleness}; it is 0 when trainer.mode is sync")
    if not config.count_live_groups(config.trainer.steps):
        raise ConfigError("data: no group of the run's steps is `live`, so there is no queueing to simulate")
    return ClusterSpec(
        engines=engines or engine_count(config),
        max_batch=_max_batch(config),
        concurrency=rollout.concurrency,
        group_size=rollout.group_size,
        groups_per_step=config.trainer.groups_per_step,
        steps=config.trainer.steps,
        max_staleness=config.max_staleness if max_staleness is None else max_staleness,
        group_policy=rollout.group_policy,
        refills=rollout.refills,
        retries=rollout.retries,
        timeout=rollout.timeout,
        failed_counts=rollout.failed_reward is not None,
        masks_stale=config.trainer.stale == "mask",
        versions_per_token=versions_per_token(config),
        live_groups=config.count_live_groups,
    )


def engine_count(config: RunConfig) -> int:
    engine = config.engine
    if isinstance(engine, VllmEngineConfig) and engine.servers:
        return len(engine.servers)
    return int(getattr(engine, "count", 1))


def versions_per_token(config: RunConfig) -> bool:
    """Whether a reply goes on under a policy that is loaded meanwhile. `policy: auto` of vLLM is taken for
    `merged` on a CPU only where `model.device` says so."""
    match config.engine:
        case CloudEngineConfig():
            return False
        case LocalEngineConfig():
            return not isinstance(config.backend, CloudConfig)  # which samples itself then
        case VllmEngineConfig() as engine:
            policy = resolve_vllm_config(engine, config).policy
            return policy == "merged" or (policy == "auto" and config.model.device == "cpu")
        case MixedEngineConfig(parts=parts):
            return all(versions_per_token(config.model_copy(update={"engine": part})) for part in parts)
        case _:
            return True


def _max_batch(config: RunConfig) -> int:
    match config.engine:
        case LocalEngineConfig() | VllmEngineConfig() as engine:
            return engine.max_batch
        case MixedEngineConfig(parts=parts):
            return min((int(getattr(part, "max_batch", UNLIMITED)) for part in parts), default=UNLIMITED)
        case CloudEngineConfig() as engine:
            return engine.max_in_flight
        case _:
            return UNLIMITED


async def load_workload(
    config: RunConfig, *, workload: Path | None = None, measured: Path | None = None, seed: int = 0
) -> Workload:
    """What the simulated run has to do: given by the section `simulate`, then by what was measured, then by
    a workload file."""
    given = config.simulate or SimulateConfig()
    path = workload or given.workload
    if measured is not None:
        async with open_run_store(measured, read_only=True) as (ran, store):
            work = await measure(
                store,
                ran.name,
                read_steps(measured),
                engines=engine_count(ran),
                max_batch=_max_batch(config),
            )
        work = replace(
            work, pause=given.pause, crashes_per_hour=given.crashes_per_hour, restart=given.restart
        )
    else:
        drawn = [] if path else draw_sessions(given, random.Random(seed), DRAWN)
        work = Workload(
            sessions=drawn,
            latency=given.latency,
            crowding=given.crowding,
            speed=EngineSpeed(given.speed),
            train_base=given.train_base,
            train_per_token=given.train_per_token,
            publish=given.publish,
            pause=given.pause,
            failures=given.failures,
            zero_signal=given.zero_signal,
            crashes_per_hour=given.crashes_per_hour,
            restart=given.restart,
        )
    return with_sessions(work, read_workload(path)) if path else work


def _advice(
    config: RunConfig, work: Workload, plant: ClusterSpec, seed: int, tell: Callable[[str], None]
) -> Recommendation | None:
    """None: nothing is trained, whatever is tried."""
    given = config.simulate or SimulateConfig()
    return recommend(
        work,
        plant,
        most_engines=max(given.most_engines, plant.engines),
        most_staleness=max(given.most_staleness, plant.max_staleness),
        sync=config.trainer.mode == "sync",
        seed=seed,
        on_trial=tell,
    )


def as_record(
    outcome: SimulationResult, limit: ThroughputBound, advice: Recommendation | None, plant: ClusterSpec
) -> Json:
    """The prediction as one JSON object."""
    rate, most = outcome.samples_per_hour, limit.samples_per_hour
    record: Json = {
        "engines": plant.engines,
        "max_staleness": plant.max_staleness,
        "seconds": round(outcome.seconds, 3),
        "steps": outcome.steps,
        "finished": outcome.finished,
        "given_up": outcome.given_up,
        "samples": outcome.samples,
        "data_samples": outcome.data_samples,
        "samples_per_hour": round(rate, 1),
        "bound": round(most, 1),
        "bound_by": limit.limit,
        "of_bound": round(rate / most, 4) if most else None,
        "engines_idle": round(outcome.engines_idle, 4),
        "engines_used": round(outcome.engines_used, 4),
        "trainer_idle": round(outcome.trainer_idle, 4),
        "sessions_at_once": round(outcome.in_flight, 2),
        "staleness": {str(version): outcome.staleness[version] for version in sorted(outcome.staleness)},
        "staleness_mean": round(outcome.staleness_mean, 3),
        "dropped": dict(outcome.dropped),
        "crashes": outcome.crashes,
    }
    if advice is not None:
        record["recommended"] = {
            "engines": advice.engines,
            "max_staleness": advice.max_staleness,
            "why": advice.reason,
        }
    return record


def _show(
    console: Console,
    outcome: SimulationResult,
    limit: ThroughputBound,
    advice: Recommendation | None,
    plant: ClusterSpec,
) -> None:
    table = Table(title=f"{plant.engines} engines, max_staleness {plant.max_staleness}", show_header=False)
    rate, most = outcome.samples_per_hour, limit.samples_per_hour
    table.add_row("samples per hour", f"{rate:,.0f}")
    share = f" ({limit.limit}); this is {rate / most:.0%} of it" if most else ""
    table.add_row("the most by any schedule", f"{most:,.0f}{share}")
    data = f", {outcome.data_samples:,} of them exported data" if outcome.data_samples else ""
    table.add_row("steps", f"{outcome.steps} in {outcome.seconds:,.1f} s, {outcome.samples:,} samples{data}")
    for warning in _warnings(outcome):
        table.add_row("", f"[red]{warning}[/]")
    table.add_row(
        "engines idle", f"{outcome.engines_idle:.0%}, at {outcome.engines_used:.0%} of their best speed"
    )
    table.add_row("trainer idle", f"{outcome.trainer_idle:.0%}")
    table.add_row("sessions at once", f"{outcome.in_flight:.1f} of {plant.concurrency}")
    staleness = ", ".join(
        f"{version}: {count / outcome.staleness.total():.0%}"
        for version, count in sorted(outcome.staleness.items())
    )
    table.add_row("staleness", staleness or "–")
    dropped = ", ".join(f"{reason} {count}" for reason, count in outcome.dropped.most_common())
    table.add_row("not trained on", dropped or "none")
    console.print(table)
    if advice is not None:
        _show_advice(console, advice)


def _warnings(outcome: SimulationResult) -> list[str]:
    said: list[str] = []
    if not outcome.samples:
        said.append("nothing would be trained on: every sample is lost, for the reasons below")
    if outcome.given_up:
        said.append(f"it is stopped: every session of {MAX_FAILED_GROUPS} groups in a row failed")
    elif not outcome.finished:
        said.append("it comes to a standstill: no step can be filled any more")
    return said


def _show_advice(console: Console, advice: Recommendation) -> None:
    tried = Table("engines", "max_staleness", "samples per hour", "stale", "engines idle", "trainer idle")
    for one in advice.trials:
        chosen = (one.engines, one.max_staleness) == (advice.engines, advice.max_staleness)
        tried.add_row(
            str(one.engines),
            str(one.max_staleness),
            f"{one.result.samples_per_hour:,.0f}",
            f"{one.result.dropped_share:.1%}",
            f"{one.result.engines_idle:.0%}",
            f"{one.result.trainer_idle:.0%}",
            style="bold" if chosen else None,
        )
    console.print(tried)
    console.print(
        f"Recommended: {advice.engines} engines, trainer.max_staleness {advice.max_staleness}. "
        f"{advice.reason}.",
        highlight=False,
    )
