"""The entry point of a role process: ``python -m instar.cluster.role ROLE RUN_DIR``.

The supervisor starts this process. A role reads the config from the run's folder, announces itself in the
store, stops gracefully on SIGTERM, drains on SIGUSR1, and exits immediately when its supervisor exits. Keys
are passed in the environment, never on the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from instar.cluster.base import DRAIN_SIGNAL, EXIT_FATAL, EXIT_STOPPED
from instar.cluster.context import RoleContext
from instar.cluster.layout import RunFolder
from instar.errors import EngineUnavailable, InstarError, StoreFull, StoreUnavailable
from instar.logs import configure_logging
from instar.registry import load_object
from instar.umask import USER_UMASK

ROLES = {
    "engine": "instar.cluster.roles.engine:run_engine",
    "teacher": "instar.cluster.roles.engine:run_teacher",
    "gateway": "instar.cluster.roles.gateway:run_gateway",
    "trainer": "instar.cluster.roles.trainer:run_trainer",
    "rollout": "instar.cluster.roles.rollout:run_rollout",
    "rewards": "instar.cluster.roles.rewards:run_rewards",
    "gate": "instar.cluster.roles.gate:run_gate",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m instar.cluster.role")
    parser.add_argument("role", choices=sorted(ROLES))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", help="the name of this process, unique within the run")
    parser.add_argument("--lifeline", type=int, required=True, help="descriptor of a pipe to the supervisor")
    parser.add_argument("--fd", type=int, help="descriptor of the listening socket")
    parser.add_argument("--evaluate", metavar="LABEL", help="run only this evaluation (role rollout)")
    arguments = parser.parse_args()
    os.umask(USER_UMASK)  # files written by agents, rules and model servers belong to the user
    configure_logging()
    threading.Thread(target=_watch_lifeline, args=(arguments.lifeline,), daemon=True).start()
    folder = RunFolder(arguments.run_dir)
    try:
        lock = folder.lock(arguments.name or arguments.role)
        code = uvloop.run(_run(arguments.role, folder, arguments))
        os.close(lock)
    except (EngineUnavailable, StoreFull, StoreUnavailable):
        # These errors may be temporary. Exit code 1 makes the supervisor restart the role.
        traceback.print_exc()
        code = 1
    except InstarError as error:
        traceback.print_exc()
        # Not through the logger, because the supervisor reports the last line of the log as the cause.
        sys.stderr.write(str(error).replace("\n", " ") + "\n")
        sys.stderr.flush()
        code = EXIT_FATAL
    sys.exit(code)


async def _run(role: str, folder: RunFolder, arguments: argparse.Namespace) -> int:
    run_role: Callable[[RoleContext], Awaitable[None]] = load_object(ROLES[role])
    context = RoleContext(role, folder, arguments)
    loop = asyncio.get_running_loop()
    role_task = asyncio.ensure_future(run_role(context))

    def stop() -> None:
        context.stop.set()
        if not context.is_started:
            role_task.cancel()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)
    loop.add_signal_handler(DRAIN_SIGNAL, context.drain.set)
    await asyncio.wait({role_task})
    if not role_task.cancelled():
        role_task.result()
    # Return EXIT_STOPPED after any signal; the supervisor can tell whether it sent the signal itself.
    return EXIT_STOPPED if context.stop.is_set() or context.drain.is_set() else 0


def _watch_lifeline(lifeline: int) -> None:
    """Exit when the pipe from the supervisor closes, because nothing would stop the role afterwards."""
    os.read(lifeline, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
