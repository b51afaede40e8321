"""Run many schedules in several processes.

A chunk is a range of crash points or of random seeds, or one planted bug. An interrupted campaign skips the
chunks that are already in its state file.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from torture_parts.bugs import BUGS
from torture_parts.schedules import Outcome, Schedule, Simulator, disable_logging, make_temporary_folder
from torture_parts.state import StateFile

RANDOM_SCHEDULES = 20_000
CHUNK_SIZE = 100
BUG_SCHEDULES = 600
"""The maximum number of schedules that are tried to find a planted bug."""
MAX_REPORTED = 20
"""The maximum number of violations or problems in the output."""


@dataclass(frozen=True, slots=True)
class Chunk:
    kind: Literal["crash", "random", "bug"]
    start: int
    stop: int


@dataclass
class ChunkResult:
    kind: str
    start: int
    stop: int
    schedules: int = 0
    decisions: int = 0
    crashes: int = 0
    violations: list[str] = field(default_factory=list[str])
    """Each violation, preceded by the name of the schedule that reproduces it."""
    found_after: int | None = None
    """The number of schedules until the planted bug was found, or None if it was not found."""


@dataclass
class Campaign:
    """The results of all chunks so far."""

    total_schedules: int
    crash_points: int
    results: list[ChunkResult] = field(default_factory=list[ChunkResult])

    def count_schedules(self, kind: str) -> int:
        return sum(result.schedules for result in self.results if result.kind == kind)

    @property
    def interleavings(self) -> int:
        return self.count_schedules("crash") + self.count_schedules("random")

    @property
    def violations(self) -> list[str]:
        return [text for result in self.results if result.kind != "bug" for text in result.violations]

    @property
    def bugs(self) -> dict[str, int | None]:
        """The number of schedules until each planted bug was found, or None if it was not found."""
        return {BUGS[r.start].name: r.found_after for r in self.results if r.kind == "bug"}

    @property
    def coverage(self) -> float:
        return self.interleavings / self.total_schedules


class _Worker:
    """The state of a worker process."""

    simulator: Simulator
    folder: Path
    crash_schedules: list[Schedule]


def _start_worker(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.nice(5)
    disable_logging()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # a schedule leaves little garbage
    _Worker.folder = folder / str(os.getpid())
    _Worker.simulator = Simulator(_Worker.folder)
    _Worker.crash_schedules = list(_Worker.simulator.make_crash_schedules())


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker must have a parent"
    parent.join()
    os._exit(1)


def _count_crash_points() -> int:
    return len(_Worker.crash_schedules)


def _run_chunk(chunk: Chunk) -> ChunkResult:
    if chunk.kind == "bug":
        return _find_bug(chunk)
    simulator = _Worker.simulator
    result = ChunkResult(chunk.kind, chunk.start, chunk.stop)
    for number in range(chunk.start, chunk.stop):
        is_crash = chunk.kind == "crash"
        outcome = simulator.run(
            _Worker.crash_schedules[number] if is_crash else simulator.make_random_schedule(number)
        )
        result.schedules += 1
        result.decisions += outcome.decisions
        result.crashes += len(outcome.crashes)
        result.violations += [f"{chunk.kind} {number}: {violation}" for violation in outcome.violations]
    return result


def _find_bug(chunk: Chunk) -> ChunkResult:
    """Alternate between random and crash schedules until one of them reveals the planted bug.

    Give up after BUG_SCHEDULES.
    """
    simulator = Simulator(_Worker.folder / "bug", BUGS[chunk.start].components)
    result = ChunkResult(chunk.kind, chunk.start, chunk.stop)
    # A prime step visits the crash points in an order that mixes the scenarios.
    crash_schedules = (
        _Worker.crash_schedules[601 * n % len(_Worker.crash_schedules)] for n in range(BUG_SCHEDULES)
    )
    pairs = ((simulator.make_random_schedule(seed), crash) for seed, crash in enumerate(crash_schedules))
    for schedule in islice(chain.from_iterable(pairs), BUG_SCHEDULES):
        outcome = simulator.run(schedule)
        result.schedules += 1
        if outcome.violations:
            result.found_after = result.schedules
            result.violations = outcome.violations
            break
    return result


def run_campaign(
    *,
    random_schedules: int,
    timeout_seconds: float | None,
    processes: int,
    state: StateFile,
    on_progress: Callable[[Campaign, float], None],
) -> Campaign:
    """Run all planted bugs, crash points and random schedules that are not in the state file.

    After ``timeout_seconds``, no further chunk is started.
    """
    started_at = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with (
        make_temporary_folder() as folder,
        ProcessPoolExecutor(processes, context, _start_worker, (Path(folder),)) as pool,
    ):
        crash_points = pool.submit(_count_crash_points).result()
        campaign = Campaign(crash_points + random_schedules, crash_points)
        campaign.results += [ChunkResult(**row) for row in state.rows]
        done = {(result.kind, result.start, result.stop) for result in campaign.results}
        chunks = (
            chunk
            for chunk in _list_chunks(crash_points, random_schedules)
            if (chunk.kind, chunk.start, chunk.stop) not in done
        )
        running: set[Future[ChunkResult]] = set()
        while True:
            has_timed_out = timeout_seconds is not None and time.monotonic() - started_at > timeout_seconds
            for chunk in islice(chunks, 0 if has_timed_out else processes + 1 - len(running)):
                running.add(pool.submit(_run_chunk, chunk))
            if not running:
                return campaign
            try:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:
                for worker in multiprocessing.active_children():
                    worker.terminate()
                raise
            for future in finished:
                campaign.results.append(future.result())
                state.append(asdict(campaign.results[-1]))
            on_progress(campaign, time.monotonic() - started_at)


def _list_chunks(crash_points: int, random_schedules: int) -> Iterator[Chunk]:
    # Bugs first, because each of them may take a long time.
    yield from (Chunk("bug", number, number + 1) for number in range(len(BUGS)))
    sizes: Sequence[tuple[Literal["crash", "random"], int]] = (
        ("crash", crash_points),
        ("random", random_schedules),
    )
    for kind, count in sizes:
        for start in range(0, count, CHUNK_SIZE):
            yield Chunk(kind, start, min(start + CHUNK_SIZE, count))


def repeat_schedule(name: str) -> Outcome:
    """Run the schedule with this name, such as ``random 17`` or ``crash 230``, again.

    The name precedes each violation in the output.
    """
    kind, _, number = name.partition(" ")
    disable_logging()
    with make_temporary_folder() as folder:
        simulator = Simulator(Path(folder))
        if kind == "random":
            return simulator.run(simulator.make_random_schedule(int(number)))
        return simulator.run(next(islice(simulator.make_crash_schedules(), int(number), None)))
