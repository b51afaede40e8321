"""Start the ranks as Ray processes, call them with a timeout, and stop them. All functions block."""

# verl and Ray are installed in a separate environment.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from instar.backends.verl.sharding import WorkerSettings
from instar.errors import BackendError, BackendLost, BackendUnavailable, ConfigError

OBJECT_STORE_BYTES = 256 * 2**20
"""The size of the object store for tokens, logprobs and exported weights, if this process starts Ray."""
CONNECT_TIMEOUT_SECONDS = 10.0
PEER_FAILURE_TIMEOUT_SECONDS = 5.0
"""How long to wait for the other ranks to fail, to find out whether a rank died."""
NO_WORKERS = "verl's workers are not running; call start or load_state first"


class RayWorkers:
    """The processes of all ranks. If one fails or times out, all are stopped, because FSDP needs them all."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._group: Any = None
        self._has_initialized_ray = False

    @property
    def is_alive(self) -> bool:
        return self._group is not None

    def start(self) -> None:
        """Start the ranks. Raises ConfigError if Ray has fewer CPUs or GPUs in total than ranks, and
        BackendUnavailable if Ray is unreachable or its resources do not become free within the timeout."""
        self._start_ray()
        self._wait_for_resources()
        if self._settings.device == "cpu":
            from instar.backends.verl.cpu import use_cpu

            use_cpu()
        import ray
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        from instar.backends.verl.worker import InstarWorker

        settings = self._settings
        environment = {
            # verl's checkpoints are pickled, so torch must not load code from them.
            "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
            "INSTAR_VERL_DEVICE": settings.device,
            "TOKENIZERS_PARALLELISM": "false",
        }
        if settings.device == "cpu":
            # verl registers its FSDP engine only for GPUs. This variable selects the engine on a CPU.
            environment["VERL_ENGINE_DEVICE"] = "cuda"
        use_gpu = settings.device == "cuda"
        self._group = RayWorkerGroup(
            resource_pool=RayResourcePool([settings.ranks], use_gpu=use_gpu, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(InstarWorker), settings=settings),
            device_name=settings.device,
            worker_env=environment,
        )

    def call(self, method: str, *arguments: Any, per_rank: Sequence[Any] | None = None) -> list[Any]:
        """Call a method on every rank and return the results by rank. ``per_rank`` contains a first argument
        for each rank; all ranks receive the same ``arguments``. A failure stops all ranks. Raises BackendLost
        if a rank dies or times out, and BackendError if a rank cannot start or its method fails."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        if self._group is None:
            raise BackendLost(NO_WORKERS)
        ranks = self._settings.ranks
        arguments_by_rank = [[argument] * ranks for argument in arguments]
        if per_rank is not None:
            arguments_by_rank = [list(per_rank), *arguments_by_rank]
        references = self._group.execute_all_async(method, *arguments_by_rank)
        waiting, deadline = list(references), time.monotonic() + self._settings.call_timeout
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop_ranks()
                seconds = f"{self._settings.call_timeout:.0f} s (backend.deadline)"
                raise BackendLost(f"verl's workers did not finish {method} within {seconds}")
            try:
                ray.get(ready)
            except RayActorError as error:
                self.stop_ranks()
                if error.actor_init_failed:
                    # BackendLost would cause a retry, which would fail too.
                    reason = str(error).strip().splitlines()[-1]
                    raise BackendError(f"a verl worker failed to start: {reason}") from error
                raise BackendLost(f"a verl worker died during {method}: {_describe_error(error)}") from error
            except RayTaskError as error:
                error_class = BackendLost if self._has_dead_peer(waiting) else BackendError
                self.stop_ranks()
                raise error_class(
                    f"verl failed during {method}: {_describe_error(error.cause or error)}"
                ) from error
        return ray.get(references)

    def stop_ranks(self) -> None:
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
        self.stop_ranks()
        if self._has_initialized_ray:
            import ray

            self._has_initialized_ray = False
            ray.shutdown()

    def _start_ray(self) -> None:
        address = os.environ.get("RAY_ADDRESS")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not address:
            # Make Ray's servers listen on loopback only. Ray reads this variable when it is imported.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        if ray.is_initialized():
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if address:
            _check_reachable(address)
        else:
            uses_cuda = self._settings.device == "cuda"
            options |= {
                "address": "local",
                "num_cpus": self._settings.ranks,
                "num_gpus": None if uses_cuda else 0,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                # By default, Ray gives its workers a lower priority than other processes.
                "_system_config": {"worker_niceness": 0},
            }
        try:
            ray.init(**options)
        except (RuntimeError, OSError) as error:
            problem = f"cannot join the Ray cluster at {address}" if address else "cannot start Ray"
            raise BackendUnavailable(f"{problem}: {_describe_error(error)}") from error
        self._has_initialized_ray = True

    def _wait_for_resources(self) -> None:
        import ray

        resource = "GPU" if self._settings.device == "cuda" else "CPU"
        ranks = self._settings.ranks
        if (total := ray.cluster_resources().get(resource, 0)) < ranks:
            raise ConfigError(
                f"backend.ranks: {ranks} ranks need {ranks} {resource}s, but Ray has only {total:.0f}"
            )
        deadline = time.monotonic() + self._settings.call_timeout
        while (available := ray.available_resources().get(resource, 0)) < ranks:
            if time.monotonic() > deadline:
                raise BackendUnavailable(
                    f"verl needs {ranks} free {resource}s, but Ray still had only {available:.0f} after "
                    f"{self._settings.call_timeout:.0f} s (backend.deadline)"
                )
            time.sleep(0.2)

    def _has_dead_peer(self, waiting: Sequence[Any]) -> bool:
        """Return True if another rank died. Its failure may arrive later than the failures of the surviving
        ranks, so this method waits up to PEER_FAILURE_TIMEOUT_SECONDS for the calls in ``waiting``."""
        import ray
        from ray.exceptions import RayActorError

        if not waiting:
            return False
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=PEER_FAILURE_TIMEOUT_SECONDS)
        for reference in ready:
            try:
                ray.get(reference)
            except RayActorError:
                return True
            except Exception:  # noqa: BLE001 - any other failure is a consequence of the first one
                continue
        return False


def _check_reachable(address: str) -> None:
    """Raise BackendUnavailable if an address with a port is unreachable. Ray would wait for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise BackendUnavailable(f"the Ray cluster at {address} is unreachable: {error}") from error


def _describe_error(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
