"""The vLLM engine. It uses one vLLM server, which is either a child process or an external server."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from instar.config import DEFAULT_MAX_ADAPTERS, ModelConfig, VllmEngineConfig
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt, WeightTransfer, one_policy_error
from instar.engines.checks import check_artifact, check_request, check_score_request
from instar.engines.stopping import collect_eos_ids
from instar.engines.vllm import wire
from instar.engines.vllm.client import ADAPTER_REQUIREMENT, MERGED_REQUIREMENT, ServerCapabilities
from instar.engines.vllm.command import VllmLaunch, find_vllm, round_up_rank
from instar.engines.vllm.reply import VllmReply
from instar.engines.vllm.scoring import score_constrained, score_tokens
from instar.engines.vllm.servers import CHECK_INTERVAL_SECONDS, ExternalVllm, ServerCallbacks, VllmProcess
from instar.engines.vllm.serving import BASE_POLICY, NO_POLICY, AdapterServing, MergedServing, PolicyServing
from instar.engines.vllm.weights import NO_VERSION, ServerWeights, TransferReceiver, find_routes
from instar.errors import ConfigError, ConstraintError, EngineError, EngineUnavailable
from instar.models import device_and_dtype, load_tokenizer, resolve_model, usable_cores
from instar.types import Floats, Ids, Json, Policy, PolicyRef, SamplingParams, TokenChunk

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
RETRY_DELAY_SECONDS = 0.5
"""The delay before a failed request is retried. It is long enough to detect that the server exited."""


class VllmEngine(Engine):
    """Samples from one vLLM server. An external server is checked every ``check_interval`` seconds."""

    def __init__(
        self, model: ModelConfig, config: VllmEngineConfig, *, check_interval: float = CHECK_INTERVAL_SECONDS
    ) -> None:
        if len(config.servers) > 1:
            raise ConfigError(f"engine.servers: an engine uses only one server, got {len(config.servers)}.")
        self._check_interval = check_interval
        self._model = model
        self._config = config
        self._folder = resolve_model(model.name)
        config_json = _read_json(self._folder / "config.json")
        text_config = config_json.get("text_config", config_json)
        sources = (_read_json(self._folder / "generation_config.json"), config_json, text_config)
        self._eos_ids = collect_eos_ids(*(source.get("eos_token_id") for source in sources))
        self._vocab_size: int = text_config["vocab_size"]
        max_positions = text_config.get("max_position_embeddings") or model.context_length
        self._max_context: int = min(model.context_length, max_positions)
        self._tokenizer: Any = load_tokenizer(self._folder)
        self._server: VllmProcess | ExternalVllm | None = None
        self._serving = PolicyServing()
        self._weights: ServerWeights | None = None
        self._receiver: TransferReceiver | None = None
        self._send_seeds = True
        self._dtype = "fp32"  # for merged weights; every server can read it
        self._policy: Policy | None = None
        """The policy that the server must serve after a restart, or None for the base model."""
        self._has_pending_load = False
        """True if ``_policy`` arrived while the server was down."""
        self._process_start: str | None = None
        """The external server's ``fetch_process_start`` when it last became ready."""
        self._load_lock = asyncio.Lock()
        self._ready = asyncio.Event()
        self._down_reason = "it has not started yet"
        self._report: Callable[[str], None] = print
        self._status = EngineStatus(version=0)
        self.mislabelled_tokens = 0
        """The number of tokens whose version differs from the one that vLLM reports at the end of a reply."""

    async def start(self, log_path: Path, report: Callable[[str], None]) -> None:
        self._report = report
        callbacks = ServerCallbacks(self._on_ready, self._on_down, report)
        if self._config.servers:
            server = ExternalVllm(self._config, callbacks, check_interval=self._check_interval)
        else:
            launch = self._create_launch()
            self._dtype = launch.dtype
            vllm_log = log_path.with_name(f"{log_path.stem}-vllm.log")
            report(f"starting vLLM {launch.vllm.version}; its log is {vllm_log}")
            server = VllmProcess(launch, vllm_log, callbacks)
        self._server = server
        try:
            await server.start()
        except BaseException:  # including cancellation: the child process would keep running
            await server.close()
            raise

    def _create_launch(self) -> VllmLaunch:
        vllm = find_vllm(self._config.python)
        if self._model.device == "cuda" and vllm.is_cpu_build:
            raise ConfigError(
                f"model.device: cuda needs a GPU build of vLLM, but {vllm.python} has a CPU build; set "
                "model.device to cpu, or engine.python to an environment with a GPU build."
            )
        model = self._model.model_copy(update={"device": "cpu"}) if vllm.is_cpu_build else self._model
        policy = self._config.policy
        return VllmLaunch(
            config=self._config,
            vllm=vllm,
            model=self._folder,
            dtype=device_and_dtype(model)[1] if vllm.is_cpu_build or self._model.dtype != "auto" else "bf16",
            max_context=self._max_context,
            enable_lora=policy == "adapter" or (policy == "auto" and not vllm.is_cpu_build),
            core_count=max(1, usable_cores() // self._config.count),
        )

    async def _on_ready(self) -> None:
        assert self._server is not None
        if self._info is None:
            await self._connect()
        if isinstance(self._server, ExternalVllm):
            await self._sync_external(await self._server.fetch_process_start())
        else:
            self._serving.reset()
            if self._serving.can_switch_mid_reply and self._weights is not None:
                await self._weights.store_version(0)
            if self._policy is not None:
                await self._restore(self._policy)
        self._ready.set()

    async def _sync_external(self, process_start: str | None) -> None:
        """Make an external server that has become ready serve the policy, or the base model if there is none.
        The weights of a new process are unknown, so they are always replaced. Merged weights keep their
        version until then, because replies may still be in progress. The same process loads only a policy
        that arrived while it was down."""
        is_same_process = process_start is not None and process_start == self._process_start
        if not is_same_process and not self._serving.can_switch_mid_reply:
            self._serving.reset()
        if self._policy is not None and (self._has_pending_load or not is_same_process):
            await self._restore(self._policy, fallback=None if is_same_process else BASE_POLICY)
        elif not is_same_process:
            await self._serving.load(BASE_POLICY)
        self._process_start, self._has_pending_load = process_start, False

    async def _restore(self, policy: Policy, fallback: Policy | None = None) -> None:
        try:
            await self._serving.load(policy)
        except EngineUnavailable:
            raise
        except EngineError as error:
            if self._model.adapter is not None:
                fallback = NO_POLICY  # the base model is not a version of this run
            if fallback is not None:
                await self._serving.load(fallback)
            served = self._serving.version
            self._report(f"cannot restore version {policy.version}, serving version {served}: {error}")

    def _on_down(self, reason: str) -> None:
        self._down_reason = reason
        self._ready.clear()

    async def _connect(self) -> None:
        assert self._server is not None
        client = self._server.client
        capabilities = await ServerCapabilities.query(client)
        capabilities.check(self._config, self._max_context)
        self._send_seeds = isinstance(self._server, VllmProcess) or self._model.device != "cpu"
        if not self._send_seeds:
            self._report("seeds are not sent, because they can crash an external vLLM server on a CPU")
        self._weights = ServerWeights(client)
        self._receiver = TransferReceiver(self._weights, self._folder)
        self._weights.can_store_version = capabilities.can_store_version
        routes = await find_routes(client) if capabilities.can_replace_weights else ()
        self._serving = self._choose_serving(capabilities, self._weights, has_extension=bool(routes))
        self._info = EngineInfo(
            kind="vllm",
            model=self._model.name,
            vocab_size=self._vocab_size,
            max_context=self._max_context,
            artifacts=self._serving.artifacts,
            versions_per_token=self._serving.can_switch_mid_reply,
            can_score=True,
            constrains_output=True,
            serves_several_policies=isinstance(self._serving, AdapterServing),
            routes=routes if self._serving.can_switch_mid_reply else (),
        )

    def _choose_serving(
        self, capabilities: ServerCapabilities, weights: ServerWeights, *, has_extension: bool
    ) -> PolicyServing:
        is_own_server = isinstance(self._server, VllmProcess)
        policy = self._config.policy
        if policy == "auto" and (capabilities.can_load_adapters or capabilities.can_replace_weights):
            policy = "adapter" if capabilities.can_load_adapters else "merged"
        if policy == "adapter":
            rank = round_up_rank(self._config.lora_rank or 16) if is_own_server else None
            max_adapters = self._config.max_adapters or DEFAULT_MAX_ADAPTERS
            return AdapterServing(
                weights.client, rank, max_adapters, self._report, serves_base=self._model.adapter is None
            )
        if self._config.max_adapters is not None:
            raise ConfigError(
                f"engine.max_adapters: {self._config.max_adapters} is not possible, because the server does "
                "not serve adapters; remove the setting, or set engine.policy to adapter."
            )
        if policy == "merged":
            host = urlsplit(weights.client.url).hostname or ""
            return MergedServing(
                weights,
                self._folder,
                capabilities.base_path,
                self._dtype,
                is_remote=not is_own_server and host not in LOOPBACK_HOSTS,
                has_extension=has_extension,
                is_on_cpu=self._model.device == "cpu",
            )
        self._report(
            "policies cannot be loaded: for `engine.policy: adapter` the server must be "
            f"{ADAPTER_REQUIREMENT}, for `merged` it must be {MERGED_REQUIREMENT}"
        )
        return PolicyServing()

    async def _wait_until_ready(self) -> None:
        if not self._ready.is_set():
            if self._server is not None and self._server.failure is not None:
                raise self._server.failure
            try:
                async with asyncio.timeout(self._config.start_timeout):
                    await self._ready.wait()
            except TimeoutError as error:
                raise self._not_ready_error() from error

    def _check_ready(self) -> None:
        if not self._ready.is_set():
            raise self._not_ready_error()

    def _not_ready_error(self) -> EngineError:
        if self._server is not None and self._server.failure is not None:
            return self._server.failure
        return EngineUnavailable(f"The vLLM server is not ready: {self._down_reason}")

    async def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        prompt = check_request(self.info, prompt_ids, params, policy)
        self._status.waiting += 1
        is_waiting = True
        try:
            while is_waiting:
                await self._wait_until_ready()
                try:
                    async with aclosing(self._sample(prompt, params, policy)) as chunks:
                        async for chunk in chunks:
                            if is_waiting:
                                is_waiting = False
                                self._status.waiting -= 1
                                self._status.running += 1
                            self._status.generated_tokens += len(chunk.token_ids)
                            yield chunk
                except EngineUnavailable:
                    if not is_waiting or self._serving.version == NO_VERSION:
                        raise
                    # The server is shutting down. Retry the request when it has restarted.
                    await asyncio.sleep(RETRY_DELAY_SECONDS)
        finally:
            if is_waiting:
                self._status.waiting -= 1
            else:
                self._status.running -= 1

    async def _sample(
        self, prompt: Ids, params: SamplingParams, policy: PolicyRef | None
    ) -> AsyncGenerator[TokenChunk, None]:
        assert self._server is not None
        assert self._weights is not None
        client = self._server.client
        with self._serving.lease(policy) as lease:
            body = wire.encode_generate_request(
                prompt,
                params,
                context_left=self._max_context - len(prompt),
                eos_ids=self._eos_ids,
                model=lease.model,
                send_seed=self._send_seeds,
            )
            try:
                response = await client.stream(wire.GENERATE_PATH, body)
            except EngineError as error:
                if params.constraint is None or isinstance(error, EngineUnavailable):
                    raise
                raise ConstraintError(str(error)) from error
            reply = VllmReply(
                response,
                params,
                client=client,
                get_version=lease.get_version,
                end_ids={*self._eos_ids, *params.stop_token_ids},
                tokenizer=self._tokenizer,
            )
            self._weights.replies.add(reply)
            try:
                async with aclosing(reply.stream_chunks()) as chunks:
                    if params.constraint is not None:
                        yield await score_constrained(
                            client, prompt, params, lease, [c async for c in chunks]
                        )
                    async for chunk in chunks:
                        yield chunk
            finally:
                self._weights.replies.discard(reply)
                self._status.prompt_tokens += len(prompt)
                if reply.mislabelled_tokens and self._serving.can_switch_mid_reply:
                    self.mislabelled_tokens += (count := reply.mislabelled_tokens)
                    self._report(f"{count} tokens of a reply were labelled with the wrong version")
                if reply.usage is not None and (details := reply.usage.prompt_tokens_details) is not None:
                    self._status.cached_tokens += details.cached_tokens or 0

    async def logprobs(self, token_ids: Prompt, policy: PolicyRef | None = None) -> Floats:
        ids = check_score_request(self.info, token_ids, policy)
        if len(ids) == 1:
            return np.full(1, np.nan, np.float32)
        await self._wait_until_ready()
        assert self._server is not None
        self._status.running += 1
        try:
            with self._serving.lease(policy) as lease:
                return await score_tokens(self._server.client, ids, lease.model)
        finally:
            self._status.running -= 1

    async def load(self, policy: Policy) -> None:
        check_artifact(self.info, policy)
        async with self._load_lock:
            if not self._ready.is_set():
                # The server will load the policy when it responds again.
                self._policy, self._has_pending_load = policy, True
            self._check_ready()
            await self._serving.load(policy)
            self._policy = policy

    async def keep(self, policy: Policy) -> None:
        """Make a policy available, until it is unloaded or the server restarts."""
        check_artifact(self.info, policy)
        async with self._load_lock:
            self._check_ready()
            await self._require_adapters().keep(policy)

    async def unload(self, policy: PolicyRef) -> None:
        self._require_adapters().unload(policy)

    def _require_adapters(self) -> AdapterServing:
        if not isinstance(self._serving, AdapterServing):
            raise one_policy_error(self.info)
        return self._serving

    async def stage(self, transfer: WeightTransfer) -> Json:
        if self._receiver is None or transfer.route not in self.info.routes:
            return await super().stage(transfer)
        self._check_ready()
        return await self._receiver.stage(transfer)

    async def commit(self, policy: Policy) -> None:
        if self._receiver is None or not self.info.routes:
            return await super().commit(policy)
        async with self._load_lock:
            self._check_ready()
            await self._receiver.commit(policy)
            self._serving.set_policy(policy)
            self._policy = policy

    async def status(self) -> EngineStatus:
        self._check_ready()
        self._status.version, self._status.policies = self._serving.version, self._serving.policies
        return copy.copy(self._status)

    async def close(self) -> None:
        self._on_down("it was closed")
        if isinstance(self._server, ExternalVllm):
            await self._serving.close()
        if self._server is not None:
            await self._server.close()


def _read_json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
