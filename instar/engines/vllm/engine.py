"""The vLLM engine. It uses one vLLM server, started here as a child process or by someone else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from instar.config import ModelConfig, VllmEngineConfig
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt, WeightTransfer
from instar.engines.checks import check_request, check_score_request, to_ids
from instar.engines.vllm.capabilities import ServerCapabilities
from instar.engines.vllm.command import VllmLaunch, find_vllm, round_up_rank
from instar.engines.vllm.external import CHECK_PERIOD, ExternalVllm
from instar.engines.vllm.process import ServerCallbacks, VllmProcess
from instar.engines.vllm.reply import VllmReply
from instar.engines.vllm.serving import AdapterServing, BaseServing, MergedServing, PolicyLease, PolicyServing
from instar.engines.vllm.transfer import TransferReceiver, find_routes
from instar.engines.vllm.weights import NO_VERSION, ServerWeights
from instar.engines.vllm.wire import (
    GENERATE_PATH,
    choice_logprobs,
    clean_logprob,
    decode_scores,
    encode_generate_request,
    encode_score_request,
)
from instar.errors import ConfigError, EngineError, EngineUnavailable
from instar.models import device_and_dtype, load_tokenizer, resolve_model, usable_cores
from instar.types import Artifact, Floats, Ids, Json, Policy, SamplingParams, TokenChunk

BASE = Policy("", 0, Artifact("base"))
LOOPBACK = ("localhost", "127.0.0.1", "::1")
RETRY_SECONDS = 0.5
"""The delay before a request that did not begin is sent again. By then, an exit of the server is detected."""


class VllmEngine(Engine):
    """Samples from one vLLM server. Call ``bring_up`` first. ``config.servers`` has at most one address."""

    def __init__(
        self, model: ModelConfig, config: VllmEngineConfig, *, check_period: float = CHECK_PERIOD
    ) -> None:
        """``check_period`` is the time between two health checks of a server started by someone else."""
        if len(config.servers) > 1:
            raise ConfigError(f"engine.servers: an engine uses one server, not {len(config.servers)}")
        self._check_period = check_period
        self._model = model
        self._config = config
        self._folder = resolve_model(model.name)
        self._properties = _ModelProperties.read(self._folder, model)
        self._tokenizer: Any = load_tokenizer(self._folder)
        self._server: VllmProcess | ExternalVllm | None = None
        self._serving: PolicyServing = BaseServing("it has not started")
        self._weights: ServerWeights | None = None
        self._receiver: TransferReceiver | None = None
        self._send_seeds = True
        self._dtype = "fp32"  # which any server can read
        self._info: EngineInfo | None = None
        self._policy: Policy | None = None
        """The policy that a restarted server must serve."""
        self._load_pending = False
        """True if ``_policy`` arrived while the server was down."""
        self._process_start: str | None = None
        """Identifies the process of an external server that has the loaded policy."""
        self._loading = asyncio.Lock()
        self._ready = asyncio.Event()
        self._down_reason = "it has not started yet"
        self._report: Callable[[str], None] = print
        self._running = self._waiting = 0
        self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0
        self.mislabelled_tokens = 0
        """Tokens that got a wrong version, according to vLLM's own report at the end of a reply."""

    async def bring_up(self, log_path: Path, report: Callable[[str], None]) -> None:
        self._report = report
        callbacks = ServerCallbacks(self._on_ready, self._on_down, report)
        if self._config.servers:
            server = ExternalVllm(self._config, callbacks, check_period=self._check_period)
        else:
            launch = self._launch()
            self._dtype = launch.dtype
            vllm_log = log_path.with_name(f"{log_path.stem}-vllm.log")
            report(f"starting vLLM {launch.vllm.version}; its log is {vllm_log}")
            server = VllmProcess(launch, vllm_log, callbacks)
        self._server = server
        try:
            await server.start()
        except BaseException:  # also when cancelled: the child process would keep running
            await server.close()
            raise

    def _launch(self) -> VllmLaunch:
        vllm = find_vllm(self._config.python)
        if self._model.device == "cuda" and vllm.on_cpu:
            raise ConfigError(f"model.device: cuda is set, but the vLLM of {vllm.python} is built for CPUs")
        cpu = self._model.model_copy(update={"device": "cpu"}) if vllm.on_cpu else self._model
        policy = self._config.policy
        return VllmLaunch(
            config=self._config,
            vllm=vllm,
            model=self._folder,
            dtype=device_and_dtype(cpu)[1] if vllm.on_cpu or self._model.dtype != "auto" else "bf16",
            max_context=self._properties.max_context,
            serves_adapters=policy == "adapter" or (policy == "auto" and not vllm.on_cpu),
            cores=max(1, usable_cores() // self._config.count),
        )

    # --- the server's lifetime -----------------------------------------------------------------------

    async def _on_ready(self) -> None:
        """Query the server's capabilities the first time, then restore the policy it must serve."""
        assert self._server is not None
        if self._info is None:
            await self._connect()
        if isinstance(self._server, ExternalVllm):
            await self._sync_external(await self._server.process_start())
        else:
            self._serving.reset()
            if self._serving.switches_mid_reply and self._weights is not None:
                await self._weights.store_version(0)
            if self._policy is not None:
                await self._restore(self._policy)
        self._ready.set()

    async def _sync_external(self, process_start: str | None) -> None:
        """Restore the policy of an external server when it responds. If the server may be a new process, its
        weights are unknown and replies may continue under them. So they are replaced in a pause, which
        separates the versions of those replies."""
        is_same = process_start is not None and process_start == self._process_start
        if not is_same and not self._serving.switches_mid_reply:
            self._serving.reset()
        if self._policy is not None and (self._load_pending or not is_same):
            await self._restore(self._policy, fallback=None if is_same else BASE)
        elif not is_same:
            await self._serving.load(BASE)
        self._process_start, self._load_pending = process_start, False

    async def _restore(self, policy: Policy, fallback: Policy | None = None) -> None:
        try:
            await self._serving.load(policy)
        except EngineUnavailable:
            raise
        except EngineError as error:
            if fallback is not None:
                await self._serving.load(fallback)
            self._report(
                f"version {self._serving.version} is served, because version {policy.version} could not be "
                f"restored: {error}"
            )

    def _on_down(self, reason: str) -> None:
        self._down_reason = reason
        self._ready.clear()

    async def _connect(self) -> None:
        assert self._server is not None
        client = self._server.client
        capabilities = await ServerCapabilities.query(client)
        capabilities.check(self._config, self._properties.max_context)
        self._send_seeds = isinstance(self._server, VllmProcess) or self._model.device != "cpu"
        if not self._send_seeds:
            self._report(
                "seeds are not sent: on a CPU they can crash a vLLM server that Instar did not start"
            )
        self._weights = ServerWeights(client)
        self._receiver = TransferReceiver(self._weights, self._folder)
        self._weights.stores_version = capabilities.stores_version
        routes = await find_routes(client) if capabilities.replaces_weights else ()
        self._serving = self._choose_serving(capabilities, self._weights, has_extension=bool(routes))
        self._info = EngineInfo(
            kind="vllm",
            model=self._model.name,
            vocab_size=self._properties.vocab_size,
            max_context=self._properties.max_context,
            artifacts=self._serving.artifacts,
            versions_per_token=self._serving.switches_mid_reply,
            scores=True,
            routes=routes if self._serving.switches_mid_reply else (),
        )

    def _choose_serving(
        self, capabilities: ServerCapabilities, weights: ServerWeights, *, has_extension: bool
    ) -> PolicyServing:
        own = isinstance(self._server, VllmProcess)
        policy = capabilities.choose_policy_mode(self._config)
        if policy == "adapter":
            rank = round_up_rank(self._config.lora_rank or 16) if own else None
            return AdapterServing(weights.client, rank, self._report)
        if policy == "merged":
            host = urlsplit(weights.client.url).hostname or ""
            return MergedServing(
                weights,
                self._folder,
                capabilities.root,
                self._dtype,
                is_remote=not own and host not in LOOPBACK,
                has_extension=has_extension,
                on_cpu=self._model.device == "cpu",
            )
        self._report(f"policies cannot be loaded: {capabilities.requirements}")
        return BaseServing(capabilities.requirements)

    async def _wait_until_ready(self) -> None:
        if not self._ready.is_set():
            self._raise_failure()
            try:
                async with asyncio.timeout(self._config.start_timeout):
                    await self._ready.wait()
            except TimeoutError as error:
                raise self._unavailable() from error

    def _check_ready(self) -> None:
        if not self._ready.is_set():
            self._raise_failure()
            raise self._unavailable()

    def _raise_failure(self) -> None:
        if self._server is not None and self._server.failure is not None:
            raise self._server.failure

    def _unavailable(self) -> EngineUnavailable:
        return EngineUnavailable(f"The vLLM server is not ready: {self._down_reason}")

    # --- requests ------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise self._unavailable()
        return self._info

    async def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        prompt = to_ids(prompt_ids)
        check_request(self.info, prompt, params)
        self._waiting += 1
        is_waiting = True
        try:
            while is_waiting:
                await self._wait_until_ready()
                try:
                    async with aclosing(self._sample(prompt, params)) as chunks:
                        async for chunk in chunks:
                            if is_waiting:
                                is_waiting = False
                                self._waiting -= 1
                                self._running += 1
                            self._generated_tokens += len(chunk.token_ids)
                            yield chunk
                except EngineUnavailable:
                    if not is_waiting or self._serving.version == NO_VERSION:
                        raise
                    # The server is shutting down, so the request waits until it has restarted.
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            if is_waiting:
                self._waiting -= 1
            else:
                self._running -= 1

    async def _sample(self, prompt: Ids, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        with self._serving.lease() as lease:
            reply = await self._start_reply(prompt, params, lease)
            assert self._weights is not None
            self._weights.replies.add(reply)
            try:
                async with aclosing(reply.chunks()) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                self._weights.replies.discard(reply)
                self._count(reply, len(prompt))

    async def _start_reply(self, prompt: Ids, params: SamplingParams, lease: PolicyLease) -> VllmReply:
        server = self._server
        assert server is not None
        body = encode_generate_request(
            prompt,
            params,
            context_left=self._properties.max_context - len(prompt),
            eos_ids=self._properties.eos_ids,
            model=lease.model,
            send_seed=self._send_seeds,
        )
        return VllmReply(
            await server.client.stream(GENERATE_PATH, body),
            params,
            client=server.client,
            version=lease.version,
            end_ids={*self._properties.eos_ids, *params.stop_token_ids},
            tokenizer=self._tokenizer,
        )

    def _count(self, reply: VllmReply, prompt_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        if reply.mislabelled_tokens and self._serving.switches_mid_reply:
            self.mislabelled_tokens += reply.mislabelled_tokens
            self._report(f"{reply.mislabelled_tokens} tokens of a reply got the wrong version")
        if reply.usage is not None and (details := reply.usage.prompt_tokens_details) is not None:
            self._cached_tokens += details.cached_tokens or 0

    async def logprobs(self, token_ids: Prompt) -> Floats:
        ids = to_ids(token_ids)
        check_score_request(self.info, ids)
        scores = np.full(len(ids), np.nan, np.float32)
        if len(ids) == 1:
            return scores
        await self._wait_until_ready()
        assert self._server is not None
        self._running += 1
        try:
            with self._serving.lease() as lease:
                response = decode_scores(
                    await self._server.client.post_bytes(
                        GENERATE_PATH, encode_score_request(ids, lease.model)
                    )
                )
        except msgspec.DecodeError as error:
            raise EngineError(f"vLLM's logprobs of a prompt cannot be read: {error}") from error
        finally:
            self._running -= 1
        for position, logprobs in enumerate(response.prompt_logprobs[1:], start=1):
            entry = (logprobs or {}).get(str(ids[position]))
            scores[position] = np.nan if entry is None else clean_logprob(entry.logprob)
        scores[-1] = choice_logprobs(response.choices[0])[0]
        return scores

    async def load(self, policy: Policy) -> None:
        if policy.artifact.kind not in self.info.artifacts:
            kinds = ", ".join(self.info.artifacts)
            raise EngineError(f"The vLLM engine loads {kinds}, not {policy.artifact.kind}.")
        async with self._loading:
            if not self._ready.is_set():
                # The server loads the policy when it responds again; the caller does not have to wait for
                # that.
                self._policy, self._load_pending = policy, True
            self._check_ready()
            await self._serving.load(policy)
            self._policy = policy

    async def stage(self, transfer: WeightTransfer) -> Json:
        if self._receiver is None or transfer.route not in self.info.routes:
            return await super().stage(transfer)
        self._check_ready()
        return await self._receiver.stage(transfer)

    async def commit(self, policy: Policy) -> None:
        if self._receiver is None or not self.info.routes:
            return await super().commit(policy)
        async with self._loading:
            self._check_ready()
            await self._receiver.commit(policy)
            self._serving.set_policy(policy)
            self._policy = policy

    async def status(self) -> EngineStatus:
        self._check_ready()
        return EngineStatus(
            version=self._serving.version,
            running=self._running,
            waiting=self._waiting,
            generated_tokens=self._generated_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )

    async def close(self) -> None:
        self._on_down("it was closed")
        if isinstance(self._server, ExternalVllm):
            await self._serving.close()
        if self._server is not None:
            await self._server.close()


class _ModelProperties(msgspec.Struct, frozen=True):
    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, folder: Path, model: ModelConfig) -> _ModelProperties:
        config = _read_json(folder / "config.json")
        text = config.get("text_config", config)
        eos_ids: set[int] = set()
        for source in (_read_json(folder / "generation_config.json"), config, text):
            ids = source.get("eos_token_id")
            eos_ids.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        positions = text.get("max_position_embeddings") or model.max_context
        return cls(text["vocab_size"], min(model.max_context, positions), frozenset(eos_ids))


def _read_json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
