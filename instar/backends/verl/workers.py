"""The ranks as processes on Ray: begun, called with a deadline, ended. Everything here blocks."""

# verl and Ray live in an environment of their own.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from instar.backends.verl.settings import WorkerSettings
from instar.errors import BackendError, BackendLost, BackendUnavailable, ConfigError

STORE_BYTES = 256 * 2**20
"""Of Ray's object store: tokens and logprobs pass through it, never weights."""
CONNECT_TIMEOUT = 10.0
"""Seconds for a Ray cluster to take a connection."""
PEER_FAILURE_GRACE = 5.0
"""Seconds to learn whether a rank failed by itself or because another one died."""


class RayWorkers:
    """A rank failing, dying or being late ends all: FSDP cannot go on with fewer."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._group: Any = None
        self._started_ray = False

    @property
    def alive(self) -> bool:
        return self._group is not None

    def begin(self) -> None:
        """Raises BackendUnavailable when Ray cannot be reached or has no room within the deadline."""
        self._start_ray()
        self._wait_for_resources()
        if self._settings.device == "cpu":
            from instar.backends.verl.cpu import use_cpu

            use_cpu()
        from instar.backends.verl.worker import ray_group

        self._group = ray_group(self._settings, self._environment())

    def call(self, method: str, *arguments: Any, shares: Sequence[Any] | None = None) -> list[Any]:
        """Call a method on every rank, with the rank's own share before what all are given; their results by
        rank. Raises BackendLost, the ranks ended, when one died or was late."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        if self._group is None:
            raise BackendLost("verl's workers are gone")
        ranks = self._settings.ranks
        given = [[argument] * ranks for argument in arguments]
        if shares is not None:
            given = [list(shares), *given]
        references = self._group.execute_all_async(method, *given)
        waiting, end = list(references), time.monotonic() + self._settings.deadline
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                self.end()
                raise BackendLost(
                    f"verl's workers did not finish {method} within {self._settings.deadline:.0f} s"
                )
            try:
                ray.get(ready)
            except RayActorError as error:
                self.end()
                if error.actor_init_failed:
                    # Another try would fail alike. The reason is at the end of the traceback in its text.
                    reason = str(error).strip().splitlines()[-1]
                    raise BackendError(f"a worker of verl does not start: {reason}") from error
                raise BackendLost(f"a worker of verl died in {method}: {_first_line(error)}") from error
            except RayTaskError as error:
                died = self._has_dead_peer(waiting)
                self.end()
                text = f"verl failed in {method}: {_first_line(error.cause or error)}"
                raise (BackendLost if died else BackendError)(text) from error
        return ray.get(references)

    def end(self) -> None:
        """The processes are killed: what they hold is saved, or given up."""
        if self._group is None:
            return
        import ray
        from ray.util import remove_placement_group

        group, self._group = self._group, None
        if not ray.is_initialized():
            return
        for worker in group.workers:
            ray.kill(worker, no_restart=True)
        for placement in group.resource_pool.pgs:
            remove_placement_group(placement)

    def close(self) -> None:
        """End the ranks, and Ray where it was begun here."""
        self.end()
        if self._started_ray:
            import ray

            self._started_ray = False
            ray.shutdown()

    def _start_ray(self) -> None:
        address = os.environ.get("RAY_ADDRESS")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not address:
            # Ray's servers then listen on loopback alone. Read when Ray is imported.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        if ray.is_initialized():
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if address:
            _check_reachable(address)
        else:
            cuda = self._settings.device == "cuda"
            options |= {
                "address": "local",
                "num_cpus": self._settings.ranks,
                "num_gpus": None if cuda else 0,
                "include_dashboard": False,
                "object_store_memory": STORE_BYTES,
                # By default Ray lets its workers run only when nothing else wants a core.
                "_system_config": {"worker_niceness": 0},
            }
        try:
            ray.init(**options)
        except (RuntimeError, OSError) as error:
            where = f"the Ray cluster at {address} cannot be joined" if address else "Ray does not start"
            raise BackendUnavailable(f"{where}: {_first_line(error)}") from error
        self._started_ray = True

    def _wait_for_resources(self) -> None:
        import ray

        resource = "GPU" if self._settings.device == "cuda" else "CPU"
        ranks = self._settings.ranks
        if (whole := ray.cluster_resources().get(resource, 0)) < ranks:
            raise ConfigError(
                f"backend.ranks: {ranks} ranks need {ranks} {resource}s, and Ray has {whole:.0f}"
            )
        end = time.monotonic() + self._settings.deadline
        while (free := ray.available_resources().get(resource, 0)) < ranks:
            if time.monotonic() > end:
                raise BackendUnavailable(
                    f"Ray has {free:.0f} of the {ranks} {resource}s free that verl needs"
                )
            time.sleep(0.2)

    def _environment(self) -> dict[str, str]:
        env = {
            # verl's checkpoints are torch files: load tensors and plain values from them, nothing that runs.
            "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
            "INSTAR_VERL_DEVICE": self._settings.device,
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self._settings.device == "cpu":
            # verl registers its FSDP engine for GPUs, and lets the environment choose another device's.
            env["VERL_ENGINE_DEVICE"] = "cuda"
        return env

    def _has_dead_peer(self, waiting: Sequence[Any]) -> bool:
        """A rank whose peer died fails too, and may be seen to fail first."""
        import ray
        from ray.exceptions import RayActorError

        ready, _ = (
            ray.wait(list(waiting), num_returns=len(waiting), timeout=PEER_FAILURE_GRACE)
            if waiting
            else ([], [])
        )
        for reference in ready:
            try:
                ray.get(reference)
            except RayActorError:
                return True
            except Exception:  # noqa: BLE001 - any other failure of a peer is told by the first one
                continue
        return False


def _check_reachable(address: str) -> None:
    """Ray itself would wait for minutes. Addresses such as `auto` are left to it."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        raise BackendUnavailable(f"the Ray cluster at {address} cannot be reached: {error}") from error


def _first_line(error: BaseException) -> str:
    """What went wrong, without the traceback that Ray puts around it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
