"""The local engine, which runs a scheduler in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import aclosing
from random import Random
from typing import Any

import numpy as np
import torch

from instar.config import LocalEngineConfig, ModelConfig
from instar.cpu import read_free_memory
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt, one_policy_error
from instar.engines.checks import check_artifact, check_request, check_score_request
from instar.engines.local.check import check_architecture
from instar.engines.local.determinism import choose_threads
from instar.engines.local.grammar import GrammarCompiler
from instar.engines.local.kv_cache import KVShape
from instar.engines.local.model import EngineModel, PolicyUpdate
from instar.engines.local.penalties import LogitPenalties
from instar.engines.local.requests import Emission, SchedulerRequest
from instar.engines.local.scheduler import Scheduler
from instar.engines.stopping import StopRule
from instar.errors import ConfigError, EngineError, EngineUnavailable, PolicyNotFound
from instar.models import load_tokenizer
from instar.types import Floats, Policy, PolicyRef, SamplingParams, TokenChunk

ReplyQueue = asyncio.Queue[TokenChunk | EngineError]


class LocalEngine(Engine):
    """An engine that samples with torch. ``shared_model`` comes from ``EngineModel.share``; without it, the
    engine loads the model. Benchmarks set ``stop_at_eos=False`` to get replies of ``max_tokens`` tokens."""

    def __init__(
        self,
        model: ModelConfig,
        config: LocalEngineConfig,
        *,
        tokenizer: Any = None,
        stop_at_eos: bool = True,
        shared_model: EngineModel | None = None,
    ) -> None:
        if shared_model is None:
            check_architecture(model)
        self._model = shared_model or EngineModel(model)
        self._tokenizer: Any = tokenizer or load_tokenizer(self._model.folder)
        self._eos_ids = self._model.get_eos_ids(self._tokenizer) if stop_at_eos else set[int]()
        self._threads = config.threads
        if config.deterministic:
            self._threads = choose_threads(model, config, self._model.kv_shape.kv_heads)
        context = self._model.max_context
        kv_tokens = config.kv_tokens or compute_kv_tokens(self._model.kv_shape, config.max_batch * context)
        if kv_tokens < context:
            raise ConfigError(
                f"engine.kv_tokens: {kv_tokens} is less than the model's context of {context} tokens; "
                "increase it, or decrease model.max_context."
            )
        self._scheduler = Scheduler(
            self._model,
            max_batch=config.max_batch,
            prefill_tokens=config.prefill_tokens,
            kv_tokens=kv_tokens,
            max_adapters=config.max_adapters if self._model.adapters.can_mix else 1,
            is_batch_invariant=bool(config.deterministic),
        )
        # The samplers of a training service, of which there are many, constrain no replies.
        self._grammars = None if shared_model else GrammarCompiler(self._tokenizer, self._eos_ids)
        self._info = EngineInfo(
            kind="local",
            model=model.name,
            vocab_size=self._model.vocab_size,
            max_context=context,
            artifacts=("adapter", "weights", "base"),
            can_score=True,
            constrains_output=self._grammars is not None and self._grammars.is_available,
            serves_several_policies=self._model.adapters.can_mix,
        )
        self._queues: dict[SchedulerRequest, tuple[asyncio.AbstractEventLoop, ReplyQueue]] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: EngineError | None = None
        self._load_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="local-engine", daemon=True)
        self._thread.start()

    def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        prompt = check_request(self.info, prompt_ids, params, policy)
        context_left = self.info.max_context - len(prompt)
        request = SchedulerRequest(
            prompt=prompt,
            params=params,
            stop_rule=StopRule(params, context_left, self._eos_ids, self._tokenizer),
            rng=Random(params.seed),
            length_limit=len(prompt) + min(params.max_tokens, context_left),
            policy=policy,
            penalties=LogitPenalties(params, prompt, self._model.device) if params.modifies_logits else None,
        )
        return self._run_request(request) if params.constraint is None else self._run_constrained(request)

    async def _run_constrained(self, request: SchedulerRequest) -> AsyncGenerator[TokenChunk, None]:
        constraint, stop_ids = request.params.constraint, request.params.stop_token_ids
        assert constraint is not None
        assert self._grammars is not None
        request.matcher = await asyncio.to_thread(self._grammars.start, constraint, stop_ids)
        async with aclosing(self._run_request(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def logprobs(self, token_ids: Prompt, policy: PolicyRef | None = None) -> Floats:
        ids = check_score_request(self.info, token_ids, policy)
        params = SamplingParams(max_tokens=1)
        stop_rule = StopRule(params, 1, (), self._tokenizer)
        scores = np.full(len(ids), np.nan, np.float32)
        request = SchedulerRequest(
            ids, params, stop_rule, Random(0), length_limit=len(ids), scores=scores, policy=policy
        )
        async with aclosing(self._run_request(request)) as chunks:
            async for _ in chunks:
                pass
        return scores

    async def _run_request(self, request: SchedulerRequest) -> AsyncGenerator[TokenChunk, None]:
        chunks: ReplyQueue = asyncio.Queue()
        # Register before posting: a failure wakes every registered queue, and _post raises for queues that
        # are registered later.
        self._queues[request] = (asyncio.get_running_loop(), chunks)
        self._post(lambda: self._add(request))
        is_finished = False
        try:
            while not is_finished:
                item = await chunks.get()
                is_finished = isinstance(item, EngineError) or item.finish_reason is not None
                if isinstance(item, EngineError):
                    raise item
                yield item
        finally:
            if not is_finished:
                self._commands.put(lambda: self._cancel(request))

    async def load(self, policy: Policy) -> None:
        check_artifact(self.info, policy)
        await asyncio.to_thread(self._load, policy)

    async def keep(self, policy: Policy) -> None:
        check_artifact(self.info, policy)
        if not self.info.serves_several_policies:
            raise one_policy_error(self.info)
        await asyncio.to_thread(self._keep, policy)

    async def unload(self, policy: PolicyRef) -> None:
        await asyncio.to_thread(self._call, lambda: self._scheduler.unload(policy))

    async def status(self) -> EngineStatus:
        self._check_alive()
        return self._scheduler.status()

    def use_cores(self, count: int) -> None:
        if self._threads is None:
            self._commands.put(lambda: torch.set_num_threads(count))

    def set_kv_tokens(self, count: int) -> None:
        """Set the maximum number of tokens in the KV cache. One request always fits."""
        self._commands.put(lambda: self._scheduler.set_kv_tokens(count))

    def release_memory(self) -> None:
        """Free the memory of the KV cache if there are no requests."""
        self._commands.put(self._scheduler.release_memory)

    async def close(self) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._check_alive()

    def _load(self, policy: Policy) -> None:
        with self._load_lock:  # reading a policy depends on the current weights
            update = self._model.read(policy)
            self._call(lambda: self._apply(update))

    def _keep(self, policy: Policy) -> None:
        with self._load_lock:
            if policy.artifact.kind == "weights" or self._model.serves_full_weights:
                raise EngineError(
                    f"{policy.ref} cannot be kept, because full weights can serve only one version; use "
                    "adapters, or load it instead of the served version."
                )
            if policy.ref not in self._scheduler.status().policies:
                update = self._model.read(policy)
                self._call(lambda: self._scheduler.keep(update))

    def _call(self, command: Callable[[], None]) -> None:
        """Run a command in the engine's thread, and wait for it."""
        done: Future[None] = Future()
        self._post(lambda: _complete(command, done))
        while not done.done():
            try:
                return done.result(timeout=1)
            except TimeoutError:
                self._check_alive()

    # --- methods that run in the engine's thread ---

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # OpenMP stores the number of threads per calling thread
        try:
            with torch.inference_mode():
                while self._run_commands():
                    if self._scheduler.is_busy:
                        self._deliver(self._scheduler.step())
            self._failure = EngineUnavailable("The engine is closed.")
        except Exception as error:  # noqa: BLE001 - any error must reach every caller
            self._failure = EngineError(f"The local engine stopped: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        for loop, chunks in list(self._queues.values()):
            _enqueue(loop, [(chunks, self._failure)])

    def _run_commands(self) -> bool:
        """Run the posted commands, and wait for more while there are no requests. Return False to stop."""
        while True:
            try:
                command = self._commands.get(block=not self._scheduler.is_busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, request: SchedulerRequest) -> None:
        try:
            self._scheduler.add(request)
        except PolicyNotFound as error:
            self._fail(request, error)

    def _fail(self, request: SchedulerRequest, error: EngineError) -> None:
        loop, chunks = self._queues.pop(request)
        _enqueue(loop, [(chunks, error)])

    def _cancel(self, request: SchedulerRequest) -> None:
        if self._queues.pop(request, None) is not None:
            self._scheduler.cancel(request)

    def _deliver(self, emissions: list[Emission]) -> None:
        """Put the sampled tokens into the requests' queues. Each event loop is woken only once per step."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[ReplyQueue, TokenChunk | EngineError]]] = {}
        for request, chunk in emissions:
            loop, chunks = self._queues[request]
            if request.is_finished:
                del self._queues[request]
            batches.setdefault(loop, []).append((chunks, chunk))
        for loop, batch in batches.items():
            _enqueue(loop, batch)

    def _apply(self, update: PolicyUpdate) -> None:
        for request in self._scheduler.load(update):
            message = f"{update.ref} has replaced the full weights of {request.policy} during the request."
            self._fail(request, EngineError(message))


def _complete(command: Callable[[], None], done: Future[None]) -> None:
    try:
        command()
    except EngineError as error:  # the command was rejected and has changed nothing
        done.set_exception(error)
    except BaseException as error:  # every error, because the caller is waiting for the result
        done.set_exception(EngineError(f"Failed to apply the policy, stopping the engine: {error}"))
        raise  # stop the engine, because its weights may be partially changed
    else:
        done.set_result(None)


def _enqueue(
    loop: asyncio.AbstractEventLoop, batch: list[tuple[ReplyQueue, TokenChunk | EngineError]]
) -> None:
    def put() -> None:
        for chunks, item in batch:
            chunks.put_nowait(item)

    # call_soon_threadsafe raises RuntimeError if the loop is closed. No caller is waiting in that case.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(put)


def compute_kv_tokens(shape: KVShape, batch_tokens: int) -> int:
    """Return the KV cache size in tokens: a third of the free memory, but at most two full batches."""
    free_bytes = read_free_memory() if shape.device == "cpu" else torch.cuda.mem_get_info()[0]
    return min(2 * batch_tokens, free_bytes // 3 // shape.token_bytes)
