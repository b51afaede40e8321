"""The local engine: a scheduler in its own thread behind an asyncio interface."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from instar.config import LocalEngineConfig, ModelConfig
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt
from instar.engines.checks import check_request, check_score_request, to_ids
from instar.engines.local.model import EngineModel
from instar.engines.local.rows import KVShape
from instar.engines.local.scheduler import Emission, Scheduler, SchedulerRequest
from instar.engines.stopping import StopRule
from instar.errors import ConfigError, EngineError, EngineUnavailable
from instar.models import load_tokenizer
from instar.types import Floats, Policy, SamplingParams, TokenChunk

ReplyQueue = asyncio.Queue[TokenChunk | EngineError]


class LocalEngine(Engine):
    """An engine that samples with torch. ``weights`` is an already loaded model, for engines that share one.
    With ``stop_at_eos=False`` replies run to their ``max_tokens``, for benchmarks."""

    def __init__(
        self,
        model: ModelConfig,
        config: LocalEngineConfig,
        *,
        tokenizer: Any = None,
        stop_at_eos: bool = True,
        weights: EngineModel | None = None,
    ) -> None:
        self._model = weights or EngineModel(model)
        self._tokenizer: Any = tokenizer or load_tokenizer(self._model.folder)
        self._eos = self._eos_ids() if stop_at_eos else set[int]()
        self._threads = config.threads
        context = self._model.max_context
        kv_tokens = config.kv_tokens or default_kv_tokens(self._model.kv_shape, config.max_batch * context)
        if kv_tokens < context:
            raise ConfigError(
                f"engine.kv_tokens: {kv_tokens} tokens do not fit one context of {context} tokens"
            )
        self._scheduler = Scheduler(
            self._model,
            max_batch=config.max_batch,
            prefill_tokens=config.prefill_tokens,
            kv_tokens=kv_tokens,
        )
        self._info = EngineInfo(
            kind="local",
            model=model.name,
            vocab_size=self._model.vocab_size,
            max_context=context,
            artifacts=("adapter", "weights", "base"),
            scores=True,
        )
        self._queues: dict[SchedulerRequest, tuple[asyncio.AbstractEventLoop, ReplyQueue]] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: EngineError | None = None
        self._loading = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="local-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        prompt = to_ids(prompt_ids)
        check_request(self._info, prompt, params)
        context_left = self._info.max_context - len(prompt)
        request = SchedulerRequest(
            prompt=prompt,
            params=params,
            stop=StopRule(params, context_left, self._eos, self._tokenizer),
            rng=Random(params.seed),
            length_limit=len(prompt) + min(params.max_tokens, context_left),
        )
        replies: ReplyQueue = asyncio.Queue()
        loop = asyncio.get_running_loop()
        # Register before posting: a failure wakes every registered queue, and _post raises for queues that
        # are registered later.
        self._queues[request] = (loop, replies)
        self._post(lambda: self._scheduler.add(request))
        finished = False
        try:
            while not finished:
                item = await replies.get()
                finished = isinstance(item, EngineError) or item.finish_reason is not None
                if isinstance(item, EngineError):
                    raise item
                yield item
        finally:
            if not finished:
                self._commands.put(lambda: self._cancel(request))

    async def logprobs(self, token_ids: Prompt) -> Floats:
        ids = to_ids(token_ids)
        check_score_request(self._info, ids)
        params = SamplingParams(max_tokens=1)
        scores = np.full(len(ids), np.nan, np.float32)
        request = SchedulerRequest(
            prompt=ids,
            params=params,
            stop=StopRule(params, 1, (), self._tokenizer),
            rng=Random(0),
            length_limit=len(ids),
            scores=scores,
        )
        replies: ReplyQueue = asyncio.Queue()
        self._queues[request] = (asyncio.get_running_loop(), replies)
        self._post(lambda: self._scheduler.add(request))
        try:
            item = await replies.get()
        except BaseException:  # also when cancelled: the request must not keep running
            self._commands.put(lambda: self._cancel(request))
            raise
        if isinstance(item, EngineError):
            raise item
        return scores

    async def load(self, policy: Policy) -> None:
        await asyncio.to_thread(self._load, policy)

    async def status(self) -> EngineStatus:
        """Return the status. Raises the error that stopped the engine, if one did."""
        self._check_alive()
        return self._scheduler.status()

    def use_cores(self, count: int) -> None:
        """Use this number of threads unless the config sets one."""
        if self._threads is None:
            self._commands.put(lambda: torch.set_num_threads(count))

    def set_kv_tokens(self, count: int) -> None:
        """Limit the number of tokens in the KV cache. The limit is at least one full context."""
        self._commands.put(lambda: self._scheduler.set_kv_tokens(count))

    def release_memory(self) -> None:
        """Free the KV cache's memory if there are no requests."""
        self._commands.put(self._scheduler.release_memory)

    async def close(self) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- called by users of the engine ---

    def _eos_ids(self) -> set[int]:
        ids = self._model.eos_ids()
        return ids if self._tokenizer.eos_token_id is None else {*ids, self._tokenizer.eos_token_id}

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._check_alive()

    def _load(self, policy: Policy) -> None:
        with self._loading:  # one at a time, because reading depends on the current weights
            change = self._model.read(policy)
            done: Future[None] = Future()
            self._post(lambda: _resolve(done, lambda: self._scheduler.apply(change)))
            while not done.done():
                try:
                    return done.result(timeout=1)
                except TimeoutError:
                    self._check_alive()

    # --- called in the engine's thread ---

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
        self._fail_all(self._failure)

    def _run_commands(self) -> bool:
        """Run the commands that callers posted; wait for one if there are no requests. Returns False if the
        engine must stop."""
        while True:
            try:
                command = self._commands.get(block=not self._scheduler.is_busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _cancel(self, request: SchedulerRequest) -> None:
        if self._queues.pop(request, None) is not None:
            self._scheduler.cancel(request)

    def _deliver(self, emissions: list[Emission]) -> None:
        """Deliver the sampled tokens, waking each event loop only once per step for all of its replies."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[ReplyQueue, TokenChunk | EngineError]]] = {}
        for request, chunk in emissions:
            loop, replies = self._queues[request]
            if request.finished:
                del self._queues[request]
            batches.setdefault(loop, []).append((replies, chunk))
        for loop, batch in batches.items():
            _wake(loop, batch)

    def _fail_all(self, error: EngineError) -> None:
        for loop, replies in list(self._queues.values()):
            _wake(loop, [(replies, error)])


def _resolve(done: Future[None], work: Callable[[], None]) -> None:
    """Run ``work`` and set the result of ``done``. A failure also stops the engine, because its weights may
    be partially changed."""
    try:
        work()
    except BaseException as error:  # whatever it is, the caller must not wait forever
        done.set_exception(EngineError(f"The policy could not be applied: {error}"))
        raise
    done.set_result(None)


def _wake(loop: asyncio.AbstractEventLoop, batch: list[tuple[ReplyQueue, TokenChunk | EngineError]]) -> None:
    def put() -> None:
        for replies, item in batch:
            replies.put_nowait(item)

    # A closed event loop raises an error. It can be ignored, because nothing waits on that loop any more.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(put)


def default_kv_tokens(shape: KVShape, batch_tokens: int) -> int:
    """Return the number of tokens that fit into a third of the free memory, but at most twice the tokens of a
    full batch."""
    free = _free_memory() if shape.device == "cpu" else torch.cuda.mem_get_info()[0]
    return min(2 * batch_tokens, free // 3 // shape.token_bytes)


def _free_memory() -> int:
    try:
        with Path("/proc/meminfo").open() as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 4 << 30  # no such file outside Linux: assume a small machine
