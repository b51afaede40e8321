"""`instar simulate`: predict a run's throughput from its YAML file and measured or assumed times."""

from __future__ import annotations

import asyncio
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from instar.cli.config_file import load_config
from instar.cli.options import AsJson, ConfigFile, Overrides
from instar.cli.output import print_json, select_fields
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
from instar.simulate.bound import ThroughputBound, compute_upper_bound
from instar.simulate.measure import measure
from instar.simulate.pipeline import MAX_FAILED_GROUPS
from instar.simulate.recommend import Recommendation, recommend
from instar.simulate.sessions import draw_sessions, read_workload
from instar.trainer.monitor import read_steps
from instar.types import Json

DRAWN_SESSIONS = 20_000
"""Number of random sessions to draw if none are measured or read from a file. They are reused if needed."""
DEFAULT_MAX_BATCH = 1024
"""The assumed maximum number of concurrent replies for engines without a configured limit."""


def simulate(
    file: ConfigFile,
    engines: Annotated[int | None, typer.Option(min=1, help="Number of engines. Default: the run's.")] = None,
    max_staleness: Annotated[
        int | None, typer.Option(min=0, help="Maximum staleness in steps. Default: the run's.")
    ] = None,
    workload_path: Annotated[
        Path | None, typer.Option("--workload", help="File with sessions to replay.")
    ] = None,
    measured_run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_DIR", help="Use sessions and timings from this run.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed. Default: the run's seed.")] = None,
    sweep: Annotated[bool, typer.Option(help="Search for a better engine count and max_staleness.")] = True,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    config = load_config(file, overrides or ())
    if config.simulate is None and workload_path is None and measured_run is None:
        raise ConfigError(
            "The simulation needs timings: use --from RUN_DIR with a similar run, --workload FILE, or a "
            "`simulate` section in the YAML file (see docs/simulate.md)."
        )
    cluster = cluster_from_config(config, engines=engines, max_staleness=max_staleness)
    seed = config.seed if seed is None else seed
    workload = asyncio.run(
        load_workload(config, workload_path=workload_path, measured_run=measured_run, seed=seed)
    )
    settings = config.simulate or SimulateConfig()
    recommendation = None
    with Console(stderr=True).status("simulating") as status:
        result = pipeline.simulate(
            workload,
            cluster,
            seed=seed,
            on_step=lambda done: status.update(f"simulating: step {done} of {cluster.steps}"),
        )
        if sweep:
            recommendation = recommend(
                workload,
                cluster,
                max_engines=max(settings.max_engines, cluster.engines),
                max_staleness=max(settings.max_staleness, cluster.max_staleness),
                sync=config.trainer.mode == "sync",
                seed=seed,
                on_trial=status.update,
            )
    bound = compute_upper_bound(workload, cluster)
    if as_json:
        print_json(result_json(result, bound, recommendation, cluster))
    else:
        _print_result(Console(), result, bound, recommendation, cluster)


def cluster_from_config(
    config: RunConfig, *, engines: int | None = None, max_staleness: int | None = None
) -> ClusterSpec:
    """Return the cluster to simulate. ``engines`` and ``max_staleness`` override the run's settings."""
    rollout = config.rollout
    if rollout is None:
        raise ConfigError("rollout: this section is missing; add it with `tasks` and `agent`")
    if max_staleness and config.trainer.mode == "sync":
        raise ConfigError(f"--max-staleness: must be 0 if trainer.mode is sync, got {max_staleness}")
    if config.sync.every > 1:
        raise ConfigError(
            f"sync.every: only 1 can be simulated, got {config.sync.every}; use `--set sync.every=1` to "
            "simulate engines that are updated in every step"
        )
    if not config.count_rollout_groups(config.trainer.steps):
        raise ConfigError("data: the run has no rollouts to simulate; add the source `rollout`")
    return ClusterSpec(
        engines=engines or count_engines(config),
        max_batch=_get_max_batch(config),
        concurrency=rollout.concurrency,
        group_size=rollout.group_size,
        groups_per_step=config.trainer.groups_per_step,
        steps=config.trainer.steps,
        max_staleness=config.max_staleness if max_staleness is None else max_staleness,
        group_policy=rollout.group_policy,
        refills=rollout.refills,
        retries=rollout.retries,
        timeout=rollout.timeout,
        trains_on_failed=rollout.failed_reward is not None,
        masks_stale=config.trainer.stale == "mask",
        versions_per_token=switches_policy_mid_reply(config),
        rollout_group_counter=config.count_rollout_groups,
    )


def count_engines(config: RunConfig) -> int:
    return int(getattr(config.engine, "count", 1))


def switches_policy_mid_reply(config: RunConfig) -> bool:
    """Return True if a reply in progress continues under a newly loaded policy, on all engines of the run.
    For vLLM with `policy: auto`, a CPU is assumed only if `model.device` is `cpu`."""
    match config.engine:
        case CloudEngineConfig():
            return False
        case LocalEngineConfig():
            return not isinstance(config.backend, CloudConfig)  # a cloud backend samples with its own sampler
        case VllmEngineConfig() as engine:
            policy = resolve_vllm_config(engine, config).policy
            return policy == "merged" or (policy == "auto" and config.model.device == "cpu")
        case MixedEngineConfig(parts=parts):
            return all(
                switches_policy_mid_reply(config.model_copy(update={"engine": part})) for part in parts
            )
        case _:
            return True


def _get_max_batch(config: RunConfig) -> int:
    match config.engine:
        case LocalEngineConfig() | VllmEngineConfig() as engine:
            return engine.max_batch
        case MixedEngineConfig(parts=parts):
            return min(int(getattr(part, "max_batch", DEFAULT_MAX_BATCH)) for part in parts)
        case CloudEngineConfig() as engine:
            return engine.max_in_flight
        case _:
            return DEFAULT_MAX_BATCH


async def load_workload(
    config: RunConfig, *, workload_path: Path | None = None, measured_run: Path | None = None, seed: int = 0
) -> Workload:
    """Return the workload to simulate. With ``measured_run``, sessions and timings come from that run, but
    pauses and crashes from the config's `simulate` section. Otherwise, everything comes from that section.
    The sessions of a workload file take precedence."""
    settings = config.simulate or SimulateConfig()
    path = workload_path or settings.workload
    if measured_run is not None:
        async with open_run_store(measured_run, read_only=True) as (measured_config, store):
            result = await measure(
                store,
                measured_config.name,
                read_steps(measured_run),
                engines=count_engines(measured_config),
                max_batch=_get_max_batch(config),
            )
        result = replace(result, **select_fields(settings, "pause", "crashes_per_hour", "restart_seconds"))
    else:
        sessions = [] if path else draw_sessions(settings, random.Random(seed), DRAWN_SESSIONS)
        assumed = select_fields(settings, *(field.name for field in fields(Workload)[1:]))
        assumed["speed"] = EngineSpeed(settings.speed)
        result = Workload(sessions, **assumed)
    return replace(result, sessions=read_workload(path)) if path else result


def result_json(
    result: SimulationResult,
    bound: ThroughputBound,
    recommendation: Recommendation | None,
    cluster: ClusterSpec,
) -> Json:
    rate, bound_rate = result.samples_per_hour, bound.samples_per_hour
    record: Json = {
        **select_fields(cluster, "engines", "max_staleness"),
        "seconds": round(result.seconds, 3),
        **select_fields(result, "steps", "finished", "given_up", "samples", "data_samples"),
        "samples_per_hour": round(rate, 1),
        "bound": round(bound_rate, 1),
        "bound_by": bound.bottleneck,
        "fraction_of_bound": round(rate / bound_rate, 4) if bound_rate else None,
        "engines_idle": round(result.engines_idle, 4),
        "engines_used": round(result.engines_used, 4),
        "trainer_idle": round(result.trainer_idle, 4),
        "concurrent_sessions": round(result.in_flight, 2),
        "staleness": {str(steps): result.staleness[steps] for steps in sorted(result.staleness)},
        "staleness_mean": round(result.staleness_mean, 3),
        "dropped": dict(result.dropped),
        "crashes": result.crashes,
    }
    if recommendation is not None:
        record["recommended"] = select_fields(recommendation, "engines", "max_staleness", "reason")
    return record


def _print_result(
    console: Console,
    result: SimulationResult,
    bound: ThroughputBound,
    recommendation: Recommendation | None,
    cluster: ClusterSpec,
) -> None:
    title = f"{cluster.engines} engine(s), max_staleness {cluster.max_staleness}"
    table = Table(title=title, show_header=False)
    rate, bound_rate = result.samples_per_hour, bound.samples_per_hour
    table.add_row("samples per hour", f"{rate:,.0f}")
    reached = f" ({bound.bottleneck}); the run reaches {rate / bound_rate:.0%} of it" if bound_rate else ""
    table.add_row("upper bound for any schedule", f"{bound_rate:,.0f}{reached}")
    data = f", including {result.data_samples:,} from exported data" if result.data_samples else ""
    table.add_row("steps", f"{result.steps} in {result.seconds:,.1f} s, {result.samples:,} samples{data}")
    if not result.samples:
        table.add_row("", "[red]No sample would be trained on; see the reasons below.[/]")
    if result.given_up:
        warning = f"The run stops: every session of {MAX_FAILED_GROUPS} groups in a row failed."
        table.add_row("", f"[red]{warning}[/]")
    elif not result.finished:
        table.add_row("", "[red]The run stalls: no further step can be filled.[/]")
    table.add_row("engines idle", f"{result.engines_idle:.0%}")
    table.add_row("engine throughput used", f"{result.engines_used:.0%}")
    table.add_row("trainer idle", f"{result.trainer_idle:.0%}")
    table.add_row("concurrent sessions", f"{result.in_flight:.1f} of {cluster.concurrency}")
    staleness = ", ".join(
        f"{steps}: {count / result.staleness.total():.0%}"
        for steps, count in sorted(result.staleness.items())
    )
    table.add_row("staleness in steps", staleness or "–")
    dropped = ", ".join(f"{reason} {count}" for reason, count in result.dropped.most_common())
    table.add_row("not trained on", dropped or "none")
    console.print(table)
    if recommendation is not None:
        _print_recommendation(console, recommendation)


def _print_recommendation(console: Console, recommendation: Recommendation) -> None:
    table = Table("engines", "max_staleness", "samples/hour", "stale samples", "engines idle", "trainer idle")
    recommended = (recommendation.engines, recommendation.max_staleness)
    for trial in recommendation.trials:
        result = trial.result
        table.add_row(
            str(trial.engines),
            str(trial.max_staleness),
            f"{result.samples_per_hour:,.0f}",
            f"{result.stale_fraction:.1%}",
            f"{result.engines_idle:.0%}",
            f"{result.trainer_idle:.0%}",
            style="bold" if (trial.engines, trial.max_staleness) == recommended else None,
        )
    console.print(table)
    console.print(
        f"Recommended: {recommendation.engines} engine(s), "
        f"trainer.max_staleness {recommendation.max_staleness}. {recommendation.reason}.",
        highlight=False,
    )
