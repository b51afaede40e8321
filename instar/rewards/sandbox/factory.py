"""Chooses the sandbox that works on this machine."""

from __future__ import annotations

import sys

from instar.errors import ConfigError, ScoreError
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits
from instar.rewards.sandbox.bubblewrap import BubblewrapSandbox
from instar.rewards.sandbox.landlock import LandlockSandbox

KINDS: dict[str, type[Sandbox]] = {"bubblewrap": BubblewrapSandbox, "landlock": LandlockSandbox}
TRIAL_JOB = SandboxJob([sys.executable, "-c", "print('in')"])


async def create_sandbox(kind: str = "auto") -> Sandbox:
    """Return the first sandbox that passes a trial run. Raises ConfigError, listing the failures."""
    problems: list[str] = []
    for name in KINDS if kind == "auto" else [kind]:
        try:
            return await _create_and_try(KINDS[name])
        except ConfigError as error:
            problems.append(f"{name}: {error}")
    raise ConfigError(
        "reward.sandbox: this machine has no working sandbox for code that a model wrote. "
        + "; ".join(problems)
    )


async def _create_and_try(sandbox_type: type[Sandbox]) -> Sandbox:
    sandbox = sandbox_type()
    try:
        result = await sandbox.run(TRIAL_JOB, SandboxLimits(seconds=60.0))
    except (ScoreError, OSError) as error:
        raise ConfigError(f"it does not work here: {error}") from error
    if not result.ok or result.output != "in\n":
        raise ConfigError(f"it does not work here: {result.reason}; {result.output.strip()[-300:]}")
    return sandbox
