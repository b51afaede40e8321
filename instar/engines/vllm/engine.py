"""The vLLM engine: one vLLM server, our own child or one that runs already, as an Engine."""

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
from instar.engines.vllm.external import ExternalVllm
from instar.engines.vllm.process import VllmProcess
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
"""Before a request that was not begun is sent again; by then it is known whether the server has ended."""


class VllmEngine(Engine):
    """Call ``bring_up`` first. ``config.servers`` holds one address at most: every address has an engine of
    its own."""

    def __init__(self, model: ModelConfig, config: VllmEngineConfig) -> None:
        if len(config.servers) > 1:
            raise ConfigError(f"engine.servers: one engine is for one server, not for {len(config.servers)}")
        self._model = model
        self._config = config
        self._folder = resolve_model(model.name)
        self._facts = _ModelProperties.read(self._folder, model)
        self._tokenizer: Any = load_tokenizer(self._folder)
        self._server: VllmProcess | ExternalVllm | None = None
        self._serving: PolicyServing = BaseServing("it has not come up")
        self._weights: ServerWeights | None = None
        self._receiver: TransferReceiver | None = None
        self._seeds = True
        self._dtype = "fp32"  # which any server can read
        self._info: EngineInfo | None = None
        self._policy: Policy | None = None
        """What is to be served by a server that comes up again."""
        self._owed = False
        """Whether that was brought while it was away."""
        self._life: str | None = None
        """Which process of a given server has what was loaded."""
        self._loading = asyncio.Lock()
        self._ready = asyncio.Event()
        self._away = "it has not come up yet"
        self._say: Callable[[str], None] = print
        self._running = self._waiting = 0
        self._generated = self._prompted = self._cached = 0
        self.mislabelled_tokens = 0
        """Tokens whose version was told wrong, as far as vLLM says so in the end."""

    async def bring_up(self, log_path: Path, say: Callable[[str], None]) -> None:
        if self._config.servers:
            server = self._server = ExternalVllm(self._config, up=self._up, down=self._down, say=say)
        else:
            launch = self._launch()
            self._dtype = launch.dtype
            beside = log_path.with_name(f"{log_path.stem}-vllm.log")
            say(f"starting vLLM {launch.vllm.version}; its log is {beside}")
            server = self._server = VllmProcess(launch, beside, up=self._up, down=self._down, say=say)
        self._say = say
        try:
            await server.start()
        except BaseException:  # cancelled too: the child would stay
            await server.close()
            raise

    def _launch(self) -> VllmLaunch:
        vllm = find_vllm(self._config.python)
        if self._model.device == "cuda" and vllm.on_cpu:
            raise ConfigError(f"model.device: cuda was asked for, and {vllm.python} has vLLM for CPUs")
        cpu = self._model.model_copy(update={"device": "cpu"}) if vllm.on_cpu else self._model
        policy = self._config.policy
        return VllmLaunch(
            config=self._config,
            vllm=vllm,
            model=self._folder,
            dtype=device_and_dtype(cpu)[1] if vllm.on_cpu or self._model.dtype != "auto" else "bf16",
            max_context=self._facts.max_context,
            serves_adapters=policy == "adapter" or (policy == "auto" and not vllm.on_cpu),
            cores=max(1, usable_cores() // self._config.count),
        )

    # --- the server comes and goes -------------------------------------------------------------------

    async def _up(self) -> None:
        """It answers: find out what it is, and have it serve what it did before."""
        assert self._server is not None
        if self._info is None:
            await self._meet()
        if isinstance(self._server, ExternalVllm):
            await self._found(await self._server.process_start())
        else:
            self._serving.reset()
            if self._serving.switches_mid_reply and self._weights is not None:
                await self._weights.store_version(0)
            if self._policy is not None:
                await self._resume(self._policy)
        self._ready.set()

    async def _found(self, life: str | None) -> None:
        """A given server answers, or answers again. Where it may be another process than before, what it
        serves is not known, and replies may go on under that: weights are replaced in a pause, which divides
        those, and never just taken for the base model's."""
        same = life is not None and life == self._life
        if not same and not self._serving.switches_mid_reply:
            self._serving.reset()
        if self._policy is not None and (self._owed or not same):
            await self._resume(self._policy, otherwise=None if same else BASE)
        elif not same:
            await self._serving.load(BASE)
        self._life, self._owed = life, False

    async def _resume(self, policy: Policy, otherwise: Policy | None = None) -> None:
        try:
            await self._serving.load(policy)
        except EngineUnavailable:
            raise
        except EngineError as error:
            if otherwise is not None:
                await self._serving.load(otherwise)
            self._say(
                f"version {policy.version} was to be served, now it is {self._serving.version}: {error}"
            )

    def _down(self, reason: str) -> None:
        self._away = reason
        self._ready.clear()

    async def _meet(self) -> None:
        assert self._server is not None
        client = self._server.client
        offers = await ServerCapabilities.query(client)
        offers.check(self._config, self._facts.max_context)
        self._seeds = isinstance(self._server, VllmProcess) or self._model.device != "cpu"
        if not self._seeds:
            self._say("seeds are not passed on: on a CPU, vLLM may die of them unless Instar has started it")
        self._weights = ServerWeights(client)
        self._receiver = TransferReceiver(self._weights, self._folder)
        self._weights.stores_version = offers.stores_version
        routes = await find_routes(client) if offers.replaces_weights else ()
        self._serving = self._choose(offers, self._weights, extended=bool(routes))
        self._info = EngineInfo(
            kind="vllm",
            model=self._model.name,
            vocab_size=self._facts.vocab_size,
            max_context=self._facts.max_context,
            artifacts=self._serving.artifacts,
            versions_per_token=self._serving.switches_mid_reply,
            scores=True,
            routes=routes if self._serving.switches_mid_reply else (),
        )

    def _choose(self, offers: ServerCapabilities, weights: ServerWeights, *, extended: bool) -> PolicyServing:
        own = isinstance(self._server, VllmProcess)
        policy = offers.choose_policy_mode(self._config)
        if policy == "adapter":
            rank = round_up_rank(self._config.lora_rank or 16) if own else None
            return AdapterServing(weights.client, rank, self._say)
        if policy == "merged":
            host = urlsplit(weights.client.url).hostname or ""
            return MergedServing(
                weights,
                self._folder,
                offers.root,
                self._dtype,
                shared=not own and host not in LOOPBACK,
                extended=extended,
                on_cpu=self._model.device == "cpu",
            )
        self._say(f"policies cannot be loaded: {offers.requirements}")
        return BaseServing(offers.requirements)

    async def _until_ready(self) -> None:
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
        return EngineUnavailable(f"the vLLM server is not ready: {self._away}")

    # --- the engine ----------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise self._unavailable()
        return self._info

    async def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        prompt = to_ids(prompt_ids)
        check_request(self.info, prompt, params)
        self._waiting += 1
        waiting = True
        try:
            while waiting:
                await self._until_ready()
                try:
                    async with aclosing(self._sample(prompt, params)) as chunks:
                        async for chunk in chunks:
                            if waiting:
                                waiting = False
                                self._waiting -= 1
                                self._running += 1
                            self._generated += len(chunk.token_ids)
                            yield chunk
                except EngineUnavailable:
                    if not waiting or self._serving.version == NO_VERSION:
                        raise
                    # It is going down: the request waits for its return.
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            if waiting:
                self._waiting -= 1
            else:
                self._running -= 1

    async def _sample(self, prompt: Ids, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        with self._serving.lease() as lease:
            reply = await self._begin(prompt, params, lease)
            assert self._weights is not None
            self._weights.replies.add(reply)
            try:
                async with aclosing(reply.chunks()) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                self._weights.replies.discard(reply)
                self._count(reply, len(prompt))

    async def _begin(self, prompt: Ids, params: SamplingParams, lease: PolicyLease) -> VllmReply:
        server = self._server
        assert server is not None
        body = encode_generate_request(
            prompt,
            params,
            room=self._facts.max_context - len(prompt),
            eos_ids=self._facts.eos_ids,
            model=lease.model,
            seeds=self._seeds,
        )
        return VllmReply(
            await server.client.stream(GENERATE_PATH, body),
            params,
            client=server.client,
            version=lease.version,
            end_ids={*self._facts.eos_ids, *params.stop_token_ids},
            tokenizer=self._tokenizer,
        )

    def _count(self, reply: VllmReply, prompt_tokens: int) -> None:
        self._prompted += prompt_tokens
        if reply.mislabelled_tokens and self._serving.switches_mid_reply:
            self.mislabelled_tokens += reply.mislabelled_tokens
            self._say(
                f"{reply.mislabelled_tokens} tokens of a reply are of another version than was said of them"
            )
        if reply.usage is not None and (details := reply.usage.prompt_tokens_details) is not None:
            self._cached += details.cached_tokens or 0

    async def logprobs(self, token_ids: Prompt) -> Floats:
        ids = to_ids(token_ids)
        check_score_request(self.info, ids)
        scores = np.full(len(ids), np.nan, np.float32)
        if len(ids) == 1:
            return scores
        await self._until_ready()
        assert self._server is not None
        self._running += 1
        try:
            with self._serving.lease() as lease:
                answer = decode_scores(
                    await self._server.client.post_bytes(
                        GENERATE_PATH, encode_score_request(ids, lease.model)
                    )
                )
        except msgspec.DecodeError as error:
            raise EngineError(f"vLLM's answer about given tokens cannot be read: {error}") from error
        finally:
            self._running -= 1
        for place, found in enumerate(answer.prompt_logprobs[1:], start=1):
            entry = (found or {}).get(str(ids[place]))
            scores[place] = np.nan if entry is None else clean_logprob(entry.logprob)
        scores[-1] = choice_logprobs(answer.choices[0])[0]
        return scores

    async def load(self, policy: Policy) -> None:
        if policy.artifact.kind not in self.info.artifacts:
            taken = ", ".join(self.info.artifacts)
            raise EngineError(f"the vLLM engine loads {taken}, not {policy.artifact.kind}")
        async with self._loading:
            if not self._ready.is_set():
                # It is given that when it returns; whoever brings it need not wait.
                self._policy, self._owed = policy, True
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
        """Its version is -1 while it serves nothing, for a change of its weights has failed."""
        self._check_ready()
        return EngineStatus(
            version=self._serving.version,
            running=self._running,
            waiting=self._waiting,
            generated_tokens=self._generated,
            prompt_tokens=self._prompted,
            cached_tokens=self._cached,
        )

    async def close(self) -> None:
        self._down("it was closed")
        if isinstance(self._server, ExternalVllm):
            await self._serving.close()
        if self._server is not None:
            await self._server.close()


class _ModelProperties(msgspec.Struct, frozen=True):
    """What a model's files say of it."""

    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, folder: Path, model: ModelConfig) -> _ModelProperties:
        config = _json(folder / "config.json")
        text = config.get("text_config", config)
        ends: set[int] = set()
        for said in (_json(folder / "generation_config.json"), config, text):
            ids = said.get("eos_token_id")
            ends.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        positions = text.get("max_position_embeddings") or model.max_context
        return cls(text["vocab_size"], min(model.max_context, positions), frozenset(ends))


def _json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
