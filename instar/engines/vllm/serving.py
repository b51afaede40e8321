"""Serve policies with vLLM, either as adapters or merged into the base weights."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from instar.engines.policies import BASE_REF, LoadedPolicy, PolicyTable
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.command import MAX_DRAINING_ADAPTERS
from instar.engines.vllm.merge import check_same_shapes, merge_adapter
from instar.engines.vllm.weights import NO_VERSION, ServerWeights, require_served
from instar.errors import EngineError, EngineUnavailable
from instar.types import Artifact, ArtifactKind, Json, Policy, PolicyRef

BASE_POLICY = Policy(BASE_REF.policy_id, BASE_REF.version, Artifact("base"))
NO_POLICY = Policy("", NO_VERSION, Artifact("base"))
"""The base model in a run that starts from an adapter, in which no request may be served with it."""
UNLOAD_TIMEOUT_SECONDS = 10.0
PREFETCH_TIMEOUT_SECONDS = 60.0
POLL_INTERVAL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class PolicyLease:
    model: str | None
    """The name of the adapter on the server, or None for the server's own weights."""
    get_version: Callable[[], int]
    """Returns the version that is currently sampled from."""


class PolicyServing:
    """Serves only the base model. Subclasses also load policies into the server."""

    artifacts: tuple[ArtifactKind, ...] = ("base",)
    can_switch_mid_reply: bool = False
    """True if replies in progress continue under a newly loaded policy."""
    _version = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def policies(self) -> tuple[PolicyRef, ...]:
        """The loaded policies that requests can name."""
        return ()

    async def load(self, policy: Policy) -> None:
        """Serve the policy, as Engine.load does. Calls must not overlap."""
        self._version = policy.version

    def set_policy(self, policy: Policy) -> None:
        """Record that a live weight transfer has loaded this policy's weights."""

    @contextmanager
    def lease(self, policy: PolicyRef | None = None) -> Generator[PolicyLease]:
        """Yield ``policy``, or the served one if it is None, for one request. If it is an adapter, it stays
        loaded during the block. Only AdapterServing can yield other policies than the served one."""
        version = self._version
        require_served(version)
        yield PolicyLease(None, lambda: version)

    def reset(self) -> None:
        """Record that the server was restarted and serves the base model."""
        self._version = 0

    async def close(self) -> None:
        """Unload this engine's adapters, if any, from the server."""


@dataclass(eq=False, slots=True)
class _ServerAdapter:
    name: str | None
    """The name on the server, or None for the base model."""
    may_be_missing: bool = False
    """True if the server may have restarted since the adapter was loaded."""


class AdapterServing(PolicyServing):
    """Serves each version as an adapter with a unique name, which keeps vLLM's caches for the versions
    separate. A request finishes under its adapter. Adapters beyond ``max_adapters`` are unloaded after their
    last request. ``max_rank`` is the largest rank that the server accepts, or None if it is unknown.
    ``serves_base`` is False if version 0 is an adapter."""

    artifacts = ("adapter", "base")

    def __init__(
        self,
        client: VllmClient,
        max_rank: int | None,
        max_adapters: int,
        report: Callable[[str], None],
        *,
        serves_base: bool,
    ) -> None:
        self._client = client
        self._max_rank = max_rank
        self._max_adapters = max_adapters
        self._report = report
        self._table = PolicyTable(_ServerAdapter(None), max_adapters, self._free, serves_base=serves_base)
        self._loaded: set[_ServerAdapter] = set()
        """The adapters on the server, including those that only requests in flight use."""
        self._unload_tasks: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        return self._table.head.ref.version

    @property
    def policies(self) -> tuple[PolicyRef, ...]:
        return self._table.refs

    async def load(self, policy: Policy) -> None:
        if policy.ref == BASE_REF:
            self._table.replace_all(_ServerAdapter(None))
        else:
            self._table.set_head(policy.ref, await self._load_adapter(policy))

    async def keep(self, policy: Policy) -> None:
        """Make the policy available, as Engine.keep does. Calls of this and ``load`` must not overlap."""
        if policy.ref not in self._table:
            self._table.make_room(policy.ref)
            self._table.keep(policy.ref, await self._load_adapter(policy))

    def unload(self, policy: PolicyRef) -> None:
        self._table.unload(policy)

    async def _load_adapter(self, policy: Policy) -> _ServerAdapter:
        if policy.artifact.kind == "base":
            return _ServerAdapter(None)
        folder = Path(policy.artifact.path)
        try:
            rank = int(msgspec.json.decode((folder / "adapter_config.json").read_bytes())["r"])
        except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"The adapter in {folder} cannot be read: {error}") from error
        if self._max_rank is not None and rank > self._max_rank:
            raise EngineError(
                f"engine.lora_rank: the adapter in {folder} has rank {rank}, but the vLLM server was started "
                f"with a maximum rank of {self._max_rank}; set it to at least {rank}."
            )
        if len(self._loaded) >= self._max_adapters + MAX_DRAINING_ADAPTERS:
            raise EngineUnavailable(
                f"{len(self._loaded)} policy versions are still in use, which is the maximum; wait until "
                "requests under older versions have finished."
            )
        # The suffix is random, because a version may be loaded again from different files.
        adapter = _ServerAdapter(f"{policy.policy_id}-v{policy.version}-{secrets.token_hex(4)}")
        await prefetch_adapter(self._client, str(folder))
        body = {"lora_name": adapter.name, "lora_path": str(folder)}
        await self._client.post("/v1/load_lora_adapter", body)
        self._loaded.add(adapter)
        return adapter

    @contextmanager
    def lease(self, policy: PolicyRef | None = None) -> Generator[PolicyLease]:
        if policy is None:
            require_served(self.version)
        loaded = self._table.acquire_head() if policy is None else self._table.acquire(policy)
        try:
            yield PolicyLease(loaded.content.name, lambda: loaded.ref.version)
        finally:
            self._table.release(loaded)

    def reset(self) -> None:
        for adapter in self._loaded:
            adapter.may_be_missing = True
        self._table.replace_all(_ServerAdapter(None))

    async def close(self) -> None:
        for adapter in [*self._loaded]:
            self._start_unload(adapter)
        if self._unload_tasks:
            await asyncio.wait(self._unload_tasks, timeout=UNLOAD_TIMEOUT_SECONDS)

    def _free(self, policy: LoadedPolicy[_ServerAdapter]) -> None:
        if policy.content in self._loaded:
            self._start_unload(policy.content)

    def _start_unload(self, adapter: _ServerAdapter) -> None:
        self._loaded.remove(adapter)
        task = asyncio.get_running_loop().create_task(self._unload(adapter))
        self._unload_tasks.add(task)
        task.add_done_callback(self._unload_tasks.discard)

    async def _unload(self, adapter: _ServerAdapter) -> None:
        try:
            await self._client.post("/v1/unload_lora_adapter", {"lora_name": adapter.name})
        except EngineUnavailable:
            pass  # a server that has exited has no adapters
        except EngineError as error:
            if not adapter.may_be_missing:
                self._report(f"the adapter {adapter.name} could not be unloaded: {error}")


async def prefetch_adapter(client: VllmClient, folder: str) -> None:
    """Make the workers read an adapter while they sample. If this fails, vLLM reads it when it is loaded."""
    try:
        async with asyncio.timeout(PREFETCH_TIMEOUT_SECONDS):
            while True:
                workers: list[Json] = await client.rpc("instar_read_adapter", {"path": folder})
                if all(worker.get("done") or "error" in worker for worker in workers):
                    return  # an error is raised again when the adapter is loaded
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
    except EngineUnavailable:
        raise
    except (EngineError, TimeoutError):
        return


@dataclass
class MergedServing(PolicyServing):
    """Replaces the server's own weights. Requests in flight continue under the new weights."""

    weights: ServerWeights
    base_folder: Path
    server_base_path: str
    """The path of the base model on the server's machine."""
    dtype: str
    is_remote: bool
    """True if the server runs on another machine and can read only the folders that contain policies."""
    has_extension: bool
    """True if the server has our worker extension. Without it, tied output layers are not updated on CPUs."""
    is_on_cpu: bool

    can_switch_mid_reply = True

    def __post_init__(self) -> None:
        can_load_weights = self.has_extension or not self.is_on_cpu
        self.artifacts = ("adapter", "weights", "base") if can_load_weights else ("adapter", "base")
        self._policy = BASE_POLICY

    @property
    def version(self) -> int:
        return self.weights.version

    async def load(self, policy: Policy) -> None:
        async with self._provide_weights(policy) as folder:
            try:
                await self._reload(folder, policy.version)
            except EngineUnavailable:
                raise
            except EngineError:
                await self._restore()
                raise
        self._policy = policy

    def set_policy(self, policy: Policy) -> None:
        self._policy = policy

    @asynccontextmanager
    async def _provide_weights(self, policy: Policy) -> AsyncGenerator[str]:
        """Yield a folder with the policy's full weights that the server can read."""
        kind, path = policy.artifact.kind, Path(policy.artifact.path)
        if kind == "base":
            yield self.server_base_path
        elif kind == "weights":
            await asyncio.to_thread(check_same_shapes, path, self.base_folder)
            yield str(path)
        elif kind == "adapter":
            merge_context = merge_adapter(self.base_folder, path, self.dtype, beside_adapter=self.is_remote)
            folder = await asyncio.to_thread(merge_context.__enter__)
            try:
                yield str(folder)
            finally:
                await asyncio.to_thread(merge_context.__exit__, None, None, None)
        else:
            raise EngineError(f"vLLM with merged weights can load adapter, weights and base, but not {kind}.")

    async def _reload(self, folder: str, version: int) -> None:
        async with self.weights.pause_sampling() as change:
            change.start()
            if self.has_extension:
                await self.weights.client.call_workers("instar_reload", {"path": folder})
            else:
                await self.weights.client.rpc("reload_weights", {"weights_path": folder})
            change.finish(version)

    async def _restore(self) -> None:
        """Load the previous policy from its files. If that fails, no policy is served."""
        with contextlib.suppress(EngineError):
            async with self._provide_weights(self._policy) as folder:
                await self._reload(folder, self._policy.version)

    @contextmanager
    def lease(self, policy: PolicyRef | None = None) -> Generator[PolicyLease]:
        require_served(self.weights.version)
        yield PolicyLease(None, lambda: self.weights.version)

    def reset(self) -> None:
        self.weights.version = 0
        self._policy = BASE_POLICY
