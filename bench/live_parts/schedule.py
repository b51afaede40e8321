"""The days of the simulated time: when sessions take place, how users behave, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass

from live_parts.users import Phase

START = 1_793_577_600.0
"""The first midnight of the simulated time: Monday, 2 November 2026, UTC."""
DAY_SECONDS, HOUR_SECONDS = 86_400.0, 3600.0
WEEKS = (Phase.GOOD, Phase.INVERTED, Phase.GOOD, Phase.SILENT)
BATCHES_PER_DAY = 4
BATCH_HOURS = (8.0, 11.0, 14.0, 17.0)
"""The hours of the day at which a batch of sessions starts. The sessions of a batch run at the same time."""
NIGHT_HOUR = 22.5
"""The hour at which the day ends. Training, evaluation and the owner's review take place then."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong before the second batch of a day."""

    kill: str | None = None
    """The role that is killed with SIGKILL, or `all`."""
    restart: bool = False
    """Stop the run with Ctrl-C, and resume it."""
    clock_error: float | None = None
    """The seconds by which the clock is wrong from now on."""

    def describe(self) -> str:
        if self.kill is not None:
            return f"SIGKILL: {self.kill}"
        return "stop and resume" if self.restart else f"clock error of {self.clock_error:+.0f} s"


FAULTS = {
    1: Fault(restart=True),
    2: Fault(kill="trainer"),
    3: Fault(clock_error=-HOUR_SECONDS),
    4: Fault(kill="gateway"),
    5: Fault(clock_error=0.0),
    8: Fault(kill="all"),
    10: Fault(kill="engine"),
    12: Fault(clock_error=HOUR_SECONDS),
    13: Fault(kill="trainer"),
    15: Fault(clock_error=-2 * DAY_SECONDS),
    16: Fault(clock_error=0.0),
    17: Fault(restart=True),
    19: Fault(kill="all"),
    22: Fault(kill="gateway"),
    24: Fault(restart=True),
}
"""The faults by day, from 0."""


@dataclass(frozen=True)
class Plan:
    """The size of a measurement."""

    agents: tuple[str, ...]
    weeks: tuple[Phase, ...]
    days_per_week: int = 7
    sessions_per_day: int = 16
    held_out: int = 200
    sanity_items: int | None = None
    """The number of items of the sanity set, or None for all."""

    @property
    def days(self) -> int:
        return len(self.weeks) * self.days_per_week

    def get_phase(self, day: int) -> Phase:
        return self.weeks[day // self.days_per_week]

    def list_batches(self, day: int) -> list[list[str]]:
        """Return the names of the slots in each batch of a day, such as `editor-3-07`."""
        numbers = range(self.sessions_per_day)
        return [
            [
                f"{agent}-{day}-{number:02}"
                for number in numbers[batch::BATCHES_PER_DAY]
                for agent in self.agents
            ]
            for batch in range(BATCHES_PER_DAY)
        ]


def parse_slot(slot: str) -> tuple[str, int]:
    """Return the agent and the day of a slot."""
    agent, day, _ = slot.split("-")
    return agent, int(day)


def is_inverted(slot: str, plan: Plan) -> bool:
    return plan.get_phase(parse_slot(slot)[1]) is Phase.INVERTED


def get_time(day: int, hour: float) -> float:
    return START + day * DAY_SECONDS + hour * HOUR_SECONDS
