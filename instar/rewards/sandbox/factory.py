"""Chooses a sandbox that works on this machine."""

from __future__ import annotations

import asyncio
import sys

from instar.errors import ConfigError, ScoreError
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits
from instar.rewards.sandbox.bubblewrap import BubblewrapSandbox
from instar.rewards.sandbox.landlock import LandlockSandbox, remove_leftover_folders

SANDBOX_TYPES: dict[str, type[Sandbox]] = {"bubblewrap": BubblewrapSandbox, "landlock": LandlockSandbox}
TRIAL_JOB = SandboxJob([sys.executable, "-c", "print('ok')"])


async def create_sandbox(kind: str = "auto") -> Sandbox:
    """Return a sandbox of this kind or, with `auto`, of the first kind that passes a trial run. Raises
    ConfigError if none does."""
    await asyncio.to_thread(remove_leftover_folders)
    problems: list[str] = []
    for name in SANDBOX_TYPES if kind == "auto" else [kind]:
        try:
            sandbox = SANDBOX_TYPES[name]()
            result = await sandbox.run(TRIAL_JOB, SandboxLimits(seconds=60.0))
        except (ConfigError, ScoreError, OSError) as error:
            problems.append(f"{name}: {error}")
            continue
        if result.ok and result.output == "ok\n":
            return sandbox
        problems.append(f"{name}: the trial run failed: {result.reason} {result.output.strip()[-300:]}")
    raise ConfigError(
        "reward.sandbox: model-written code requires a sandbox, but none works on this machine "
        f"(kind: {kind}): {'; '.join(problems)}"
    )
