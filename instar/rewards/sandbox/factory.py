"""The sandbox that this machine has."""

from __future__ import annotations

import sys

from instar.errors import ConfigError, ScoreError
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits
from instar.rewards.sandbox.bubblewrap import BubblewrapSandbox
from instar.rewards.sandbox.landlock import LandlockSandbox

KINDS: dict[str, type[Sandbox]] = {"bubblewrap": BubblewrapSandbox, "landlock": LandlockSandbox}
TRIAL = SandboxJob([sys.executable, "-c", "print('in')"])


async def create_sandbox(kind: str = "auto") -> Sandbox:
    """The first that really works here. Raises ConfigError, which says for each why it does not."""
    problems: list[str] = []
    for name in KINDS if kind == "auto" else [kind]:
        try:
            return await _tried(KINDS[name])
        except ConfigError as error:
            problems.append(f"{name}: {error}")
    raise ConfigError(
        f"reward.sandbox: this machine cannot run code that a model wrote safely. {'; '.join(problems)}"
    )


async def _tried(kind: type[Sandbox]) -> Sandbox:
    sandbox = kind()
    try:
        outcome = await sandbox.run(TRIAL, SandboxLimits(seconds=60.0))
    except (ScoreError, OSError) as error:
        raise ConfigError(f"it does not work here: {error}") from error
    if not outcome.ok or outcome.output != "in\n":
        raise ConfigError(f"it does not work here: {outcome.reason}; {outcome.output.strip()[-300:]}")
    return sandbox
