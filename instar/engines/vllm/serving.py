"""How policies are served by vLLM: as adapters beside the base weights, or merged into them."""

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
from instar.types import ArtifactKind, Json, Policy

CLOSE_SECONDS = 10.0
"""For a server to forget what it was given."""


@dataclass(frozen=True, slots=True)
class PolicyLease:
    """What one request is sampled with."""

    model: str | None
    """The adapter's name at the server; None: the weights themselves."""
    version: Callable[[], int]
    """Of what is sampled at the moment."""


class PolicyServing(ABC):
    artifacts: tuple[ArtifactKind, ...]
    switches_mid_reply: bool
    """Whether a reply goes on under a policy that is loaded meanwhile."""

    @property
    @abstractmethod
    def version(self) -> int: ...

    @abstractmethod
    async def load(self, policy: Policy) -> None:
        """As Engine.load. One at a time."""

    def set_policy(self, policy: Policy) -> None:  # noqa: B027 - where weights are never replaced
        """The server's weights are this policy's now; others have put them in place."""

    @abstractmethod
    def lease(self) -> AbstractContextManager[PolicyLease]:
        """For as long as a request runs."""

    @abstractmethod
    def reset(self) -> None:
        """The server has just come up: it serves the base model."""

    async def close(self) -> None:  # noqa: B027 - most leave nothing that would be in the way
        """Take away from the server what nobody will use any more."""


class BaseServing(PolicyServing):
    """A server that cannot be given anything. ``lacks`` says what that would take."""

    artifacts = ("base",)
    switches_mid_reply = False

    def __init__(self, lacks: str) -> None:
        self._lacks = lacks
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    async def load(self, policy: Policy) -> None:
        if policy.artifact.kind != "base":
            raise EngineError(f"the vLLM server takes no policies, not {policy.artifact.kind}: {self._lacks}")
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
    doubtful: bool = False
    """Whether its server may have been started again without it."""


class AdapterServing(PolicyServing):
    """Every version is an adapter with a name of its own: vLLM keeps what it has computed apart by that name,
    and a request ends under the one it began with. An old one goes when its last request has ended."""

    artifacts = ("adapter", "base")
    switches_mid_reply = False

    def __init__(self, client: VllmClient, max_rank: int | None, say: Callable[[str], None]) -> None:
        """``max_rank``: the largest that the server takes, where it is known."""
        self._client = client
        self._max_rank = max_rank
        self._say = say
        self._current = _LoadedAdapter(None, 0)
        self._held: set[_LoadedAdapter] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        return self._current.version

    async def load(self, policy: Policy) -> None:
        adapter = _LoadedAdapter(None, policy.version)
        if policy.artifact.kind == "adapter":
            adapter.name = await self._upload(policy)
        elif policy.artifact.kind != "base":
            raise EngineError(f"vLLM with adapters loads adapter and base, not {policy.artifact.kind}")
        before, self._current = self._current, adapter
        before.retired = True
        if adapter.name is not None:
            self._held.add(adapter)
        self._drop_unused(before)

    async def _upload(self, policy: Policy) -> str:
        folder = Path(policy.artifact.path)
        _check_rank(folder, self._max_rank)
        if len(self._held) >= MAX_LOADED_ADAPTERS:
            raise EngineUnavailable(f"requests still run under {len(self._held)} versions of the policy")
        # The same version may be loaded again, from other files, and by another process after this one.
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
        for adapter in [*self._held]:
            adapter.retired = adapter.doubtful = True
            self._drop_unused(adapter)

    async def close(self) -> None:
        for adapter in [*self._held]:
            self._drop(adapter)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=CLOSE_SECONDS)

    def _drop_unused(self, adapter: _LoadedAdapter) -> None:
        if adapter.retired and adapter.users == 0 and adapter in self._held:
            self._drop(adapter)

    def _drop(self, adapter: _LoadedAdapter) -> None:
        self._held.remove(adapter)
        task = asyncio.get_running_loop().create_task(self._unload(adapter))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _unload(self, adapter: _LoadedAdapter) -> None:
        try:
            await self._client.post("/v1/unload_lora_adapter", {"lora_name": adapter.name})
        except EngineUnavailable:
            pass  # gone with its server
        except EngineError as error:
            if not adapter.doubtful:
                self._say(f"{adapter.name} was not unloaded: {error}")


class MergedServing(PolicyServing):
    """The server's own weights are replaced; requests in flight go on under the new ones."""

    switches_mid_reply = True

    def __init__(
        self,
        weights: ServerWeights,
        base: Path,
        served_base: str,
        dtype: str,
        *,
        shared: bool,
        extended: bool,
        on_cpu: bool,
    ) -> None:
        """``served_base``: where the server finds the base model. ``shared``: whether it runs on another
        machine, and sees the folders of policies alone. ``extended``: whether it has our worker extension,
        without which vLLM on a CPU does not renew an output layer that is tied to the embedding."""
        self.artifacts = ("adapter", "weights", "base") if extended or not on_cpu else ("adapter", "base")
        self._weights = weights
        self._base = base
        self._served_base = served_base
        self._dtype = dtype
        self._shared = shared
        self._extended = extended
        self._policy: Policy | None = None
        """What was loaded last."""

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
        """Where the server finds the policy's full weights."""
        kind, path = policy.artifact.kind, Path(policy.artifact.path)
        if kind == "base":
            yield self._served_base
        elif kind == "weights":
            await asyncio.to_thread(check_same_shapes, path, self._base)
            yield str(path)
        elif kind == "adapter":
            merging = merge_adapter(self._base, path, self._dtype, beside=self._shared)
            folder = await asyncio.to_thread(merging.__enter__)
            try:
                yield str(folder)
            finally:
                await asyncio.to_thread(merging.__exit__, None, None, None)
        else:
            raise EngineError(f"vLLM with merged weights loads adapter, weights and base, not {kind}")

    async def _reload(self, folder: str, version: int) -> None:
        async with self._weights.paused() as change:
            change.start()
            if self._extended:
                await _tell_workers(self._weights.client, "instar_reload", {"path": folder})
            else:
                await self._weights.client.rpc("reload_weights", {"weights_path": folder})
            change.finish(version)

    async def _restore(self) -> None:
        """What was served before, from its files. Where they are gone, nothing is served."""
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


async def _tell_workers(client: VllmClient, method: str, body: Json) -> None:
    """Raises EngineError with what the first worker says that fails."""
    for answer in await client.rpc(method, {"text": msgspec.json.encode(body).decode()}):
        if "error" in answer:
            raise EngineError(f"vLLM's worker: {answer['error']}")


def _check_rank(folder: Path, most: int | None) -> None:
    try:
        rank = int(msgspec.json.decode((folder / "adapter_config.json").read_bytes())["r"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"cannot read the adapter in {folder}: {error}") from error
    if most is not None and rank > most:
        raise EngineError(
            f"engine.lora_rank: the adapter in {folder} is of rank {rank}, and the vLLM server was started "
            f"for {most} at most"
        )
