"""The ways to serve policies with vLLM: as adapters next to the base weights, or merged into them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.command import MAX_LOADED_ADAPTERS
from instar.engines.vllm.merge import check_same_shapes, merge_adapter
from instar.engines.vllm.transfer import prefetch_adapter
from instar.engines.vllm.weights import ServerWeights
from instar.errors import EngineError, EngineUnavailable
from instar.types import ArtifactKind, Policy

CLOSE_SECONDS = 10.0
"""The deadline for a server to unload its adapters."""


@dataclass(frozen=True, slots=True)
class PolicyLease:
    model: str | None
    """The adapter's name on the server; None for the server's own weights."""
    version: Callable[[], int]
    """Returns the version of the tokens that are sampled now."""


class PolicyServing(ABC):
    artifacts: tuple[ArtifactKind, ...]
    switches_mid_reply: bool
    """True if replies in progress continue under a newly loaded policy."""

    @property
    @abstractmethod
    def version(self) -> int: ...

    @abstractmethod
    async def load(self, policy: Policy) -> None:
        """Serve the policy, as Engine.load does. Calls must not overlap."""

    def set_policy(self, policy: Policy) -> None:  # noqa: B027 - optional
        """Record that the server's weights are now this policy's, loaded by a live route."""

    @abstractmethod
    def lease(self) -> AbstractContextManager[PolicyLease]:
        """Return the adapter and version that a request samples with. They are reserved while the request
        runs."""

    @abstractmethod
    def reset(self) -> None:
        """Record that the server has just started and serves the base model."""

    async def close(self) -> None:  # noqa: B027 - optional
        """Unload what was loaded into the server."""


class BaseServing(PolicyServing):
    """The serving mode of a server that cannot load policies. ``requirements`` says what the server would
    need."""

    artifacts = ("base",)
    switches_mid_reply = False

    def __init__(self, requirements: str) -> None:
        self._requirements = requirements
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    async def load(self, policy: Policy) -> None:
        if policy.artifact.kind != "base":
            kind = policy.artifact.kind
            raise EngineError(f"The vLLM server loads base only, not {kind}: {self._requirements}")
        self._version = policy.version

    @contextmanager
    def lease(self) -> Generator[PolicyLease]:
        version = self._version
        yield PolicyLease(None, lambda: version)

    def reset(self) -> None:
        self._version = 0


@dataclass(eq=False, slots=True)
class _LoadedAdapter:
    name: str | None
    version: int
    users: int = 0
    retired: bool = False
    may_be_gone: bool = False
    """True if the server may have restarted, in which case it no longer has the adapter."""


class AdapterServing(PolicyServing):
    """Serves each version as an adapter with a unique name. vLLM separates its caches by that name, and a
    request finishes under the adapter it began with. An old adapter is unloaded when its last request has
    finished."""

    artifacts = ("adapter", "base")
    switches_mid_reply = False

    def __init__(self, client: VllmClient, max_rank: int | None, report: Callable[[str], None]) -> None:
        """``max_rank`` is the largest rank that the server accepts, or None if it is unknown."""
        self._client = client
        self._max_rank = max_rank
        self._report = report
        self._current = _LoadedAdapter(None, 0)
        self._loaded: set[_LoadedAdapter] = set()
        self._unloading: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        return self._current.version

    async def load(self, policy: Policy) -> None:
        adapter = _LoadedAdapter(None, policy.version)
        if policy.artifact.kind == "adapter":
            adapter.name = await self._upload(policy)
        elif policy.artifact.kind != "base":
            raise EngineError(f"vLLM with adapters loads adapter and base, not {policy.artifact.kind}.")
        before, self._current = self._current, adapter
        before.retired = True
        if adapter.name is not None:
            self._loaded.add(adapter)
        self._drop_unused(before)

    async def _upload(self, policy: Policy) -> str:
        folder = Path(policy.artifact.path)
        _check_rank(folder, self._max_rank)
        if len(self._loaded) >= MAX_LOADED_ADAPTERS:
            raise EngineUnavailable(f"Requests still run under {len(self._loaded)} versions of the policy.")
        # The same version may be loaded again from different files, or by a later process.
        name = f"{policy.policy_id}-v{policy.version}-{secrets.token_hex(4)}"
        await prefetch_adapter(self._client, str(folder))
        await self._client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        return name

    @contextmanager
    def lease(self) -> Generator[PolicyLease]:
        adapter = self._current
        adapter.users += 1
        try:
            yield PolicyLease(adapter.name, lambda: adapter.version)
        finally:
            adapter.users -= 1
            self._drop_unused(adapter)

    def reset(self) -> None:
        self._current = _LoadedAdapter(None, 0)
        for adapter in [*self._loaded]:
            adapter.retired = adapter.may_be_gone = True
            self._drop_unused(adapter)

    async def close(self) -> None:
        for adapter in [*self._loaded]:
            self._drop(adapter)
        if self._unloading:
            await asyncio.wait(self._unloading, timeout=CLOSE_SECONDS)

    def _drop_unused(self, adapter: _LoadedAdapter) -> None:
        if adapter.retired and adapter.users == 0 and adapter in self._loaded:
            self._drop(adapter)

    def _drop(self, adapter: _LoadedAdapter) -> None:
        self._loaded.remove(adapter)
        task = asyncio.get_running_loop().create_task(self._unload(adapter))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _unload(self, adapter: _LoadedAdapter) -> None:
        try:
            await self._client.post("/v1/unload_lora_adapter", {"lora_name": adapter.name})
        except EngineUnavailable:
            pass  # the server is gone, and so are its adapters
        except EngineError as error:
            if not adapter.may_be_gone:
                self._report(f"{adapter.name} was not unloaded: {error}")


class MergedServing(PolicyServing):
    """Serves a policy by replacing the server's own weights. Requests in flight continue under the new
    weights."""

    switches_mid_reply = True

    def __init__(
        self,
        weights: ServerWeights,
        base: Path,
        served_base: str,
        dtype: str,
        *,
        is_remote: bool,
        has_extension: bool,
        on_cpu: bool,
    ) -> None:
        """``served_base`` is the path of the base model on the server. ``is_remote`` is true if the server
        runs on another machine and can read only the folders of policies. ``has_extension`` is true if the
        server has our worker extension; without the extension, vLLM on a CPU does not update an output layer
        that is tied to the embedding."""
        self.artifacts = (
            ("adapter", "weights", "base") if has_extension or not on_cpu else ("adapter", "base")
        )
        self._weights = weights
        self._base = base
        self._served_base = served_base
        self._dtype = dtype
        self._is_remote = is_remote
        self._has_extension = has_extension
        self._policy: Policy | None = None

    @property
    def version(self) -> int:
        return self._weights.version

    async def load(self, policy: Policy) -> None:
        async with self._folder(policy) as folder:
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
    async def _folder(self, policy: Policy) -> AsyncGenerator[str]:
        """Provide a folder with the policy's full weights that the server can read."""
        kind, path = policy.artifact.kind, Path(policy.artifact.path)
        if kind == "base":
            yield self._served_base
        elif kind == "weights":
            await asyncio.to_thread(check_same_shapes, path, self._base)
            yield str(path)
        elif kind == "adapter":
            merging = merge_adapter(self._base, path, self._dtype, beside_adapter=self._is_remote)
            folder = await asyncio.to_thread(merging.__enter__)
            try:
                yield str(folder)
            finally:
                await asyncio.to_thread(merging.__exit__, None, None, None)
        else:
            raise EngineError(f"vLLM with merged weights loads adapter, weights and base, not {kind}.")

    async def _reload(self, folder: str, version: int) -> None:
        async with self._weights.paused() as change:
            change.start()
            if self._has_extension:
                await self._weights.client.call_workers("instar_reload", {"path": folder})
            else:
                await self._weights.client.rpc("reload_weights", {"weights_path": folder})
            change.finish(version)

    async def _restore(self) -> None:
        """Load the previous policy from its files. If the files are gone, nothing is served."""
        with contextlib.suppress(EngineError):
            if self._policy is None:
                await self._reload(self._served_base, 0)
            else:
                async with self._folder(self._policy) as folder:
                    await self._reload(folder, self._policy.version)

    @contextmanager
    def lease(self) -> Generator[PolicyLease]:
        self._weights.require_served()
        yield PolicyLease(None, lambda: self._weights.version)

    def reset(self) -> None:
        self._weights.reset()
        self._policy = None


def _check_rank(folder: Path, max_rank: int | None) -> None:
    try:
        rank = int(msgspec.json.decode((folder / "adapter_config.json").read_bytes())["r"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"The adapter in {folder} cannot be read: {error}") from error
    if max_rank is not None and rank > max_rank:
        raise EngineError(
            f"engine.lora_rank: the adapter in {folder} has rank {rank}, but the vLLM server was started for "
            f"at most {max_rank}"
        )
