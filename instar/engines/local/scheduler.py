"""Continuous batching: decides which tokens each step computes. `Scheduler` is not thread-safe.

The first rows belong to replies that sample one token in each step. The other rows belong to requests whose
prompt is still being computed in pieces.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import torch

from instar.engines.base import EngineStatus
from instar.engines.local import attention
from instar.engines.local.adapters import Adapter
from instar.engines.local.kv_cache import (
    MIN_SHARED_ROWS,
    KVRows,
    PrefixCache,
    common_prefix_length,
    find_shared_prefixes,
)
from instar.engines.local.model import EngineModel, PolicyUpdate
from instar.engines.local.requests import Emission, SchedulerRequest
from instar.engines.local.sampling import SampledTokens, Sampler, gather_logprobs
from instar.engines.policies import LoadedPolicy, PolicyTable
from instar.errors import ConstraintError
from instar.types import Ids, PolicyRef, TokenChunk

MIN_SAVED_TOKENS = 16
"""A request waits until another request's prompt is cached if it can reuse this many more tokens then."""
BLOCK_OVERHEAD = 2048
"""Starting another block takes as long as computing this many attention scores (rows × keys)."""


class Scheduler:
    def __init__(
        self,
        model: EngineModel,
        *,
        max_batch: int,
        prefill_tokens: int,
        kv_tokens: int,
        max_adapters: int,
        is_batch_invariant: bool = False,
    ) -> None:
        self._model = model
        self._is_batch_invariant = is_batch_invariant
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._kv_tokens = kv_tokens
        self._rows = KVRows(model.kv_shape, max_batch, kv_tokens)
        self._prefixes = PrefixCache()
        self._sampler = Sampler(model.device)
        self._waiting: deque[SchedulerRequest] = deque()
        self._running: list[SchedulerRequest] = []
        self._decoding_rows = 0
        self._policies = PolicyTable(
            Adapter({}), max_adapters, self._free_policy, serves_base=not model.starts_from_adapter
        )
        # Computing the attention to a shared prefix once for all rows needs a CPU kernel.
        has_kernel = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
        self._share_prefixes = model.device == "cpu" and has_kernel and not is_batch_invariant
        self._admission_count = 0
        self._status = EngineStatus(version=0)

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._waiting)

    def status(self) -> EngineStatus:
        running, waiting = len(self._running), len(self._waiting)
        version, policies = self._policies.head.ref.version, self._policies.refs
        return msgspec.structs.replace(
            self._status, version=version, policies=policies, running=running, waiting=waiting
        )

    def add(self, request: SchedulerRequest) -> None:
        """Add a request. Raises PolicyNotFound if it names a policy that is not loaded."""
        if request.policy is None:
            request.loaded_policy = self._policies.head
        else:
            request.loaded_policy = self._policies.acquire(request.policy)
        self._waiting.append(request)

    def cancel(self, request: SchedulerRequest) -> None:
        if request.row >= 0:
            self._release(request)
        elif not request.is_finished:
            self._waiting.remove(request)
            self._release_policy(request)
        request.is_finished = True

    def load(self, update: PolicyUpdate) -> list[SchedulerRequest]:
        """Serve a policy. If this replaces full weights, cancel and return the requests that name a policy,
        because the engine can serve only one. Of the others, only running requests that sample keep keys and
        values from the old policy."""
        cancelled: list[SchedulerRequest] = []
        if update.state is not None:
            cancelled = [r for r in (*self._running, *self._waiting) if r.policy is not None]
            for request in cancelled:
                self.cancel(request)
            self._model.replace_weights(update)
            self._prefixes.clear()
            self._policies.replace_all(None if self._model.serves_full_weights else Adapter({}))
        previous = self._policies.head
        head = self._policies.set_head(update.ref, update.adapter)
        if not previous.request_count:
            self._prefixes.drop(previous.key)  # requests that name an old version are rare
        for request in [r for r in (*self._running, *self._waiting) if r.policy is None]:
            request.loaded_policy = head
            if request.scores is not None:
                request.computed_tokens = 0  # all scores must come from one version
            request.has_mixed_versions = request.computed_tokens > 0
            if not request.has_mixed_versions:
                request.prompt_key = head.key
            elif request.row >= self._decoding_rows:
                # The prompt is computed under two versions, so no other row may share its prefix.
                request.prompt_key = -request.admission_order
        return cancelled

    def keep(self, update: PolicyUpdate) -> None:
        self._policies.keep(update.ref, update.adapter)

    def unload(self, policy: PolicyRef) -> None:
        self._policies.unload(policy)

    def _free_policy(self, policy: LoadedPolicy[Adapter]) -> None:
        self._prefixes.drop(policy.key)
        self._model.adapters.forget(policy.content)

    def _release_policy(self, request: SchedulerRequest) -> None:
        if request.policy is not None:
            self._policies.release(request.loaded_policy)

    def set_kv_tokens(self, kv_tokens: int) -> None:
        self._kv_tokens = self._rows.max_tokens = kv_tokens

    def release_memory(self) -> None:
        if not self.is_busy:
            self._rows.reset()
            self._prefixes.clear()

    def step(self) -> list[Emission]:
        """Admit requests, run the model once, and return new chunks, which are empty for scored requests."""
        self._admit()
        if not self._running:
            return []
        plan, ids, logit_indices, sampling_requests = self._plan()
        positions, count = plan.positions, len(logit_indices)
        if self._is_batch_invariant:
            ids, positions, logit_indices = map(_fill_up, (ids, positions, logit_indices))
        self._select_adapters(plan, logit_indices, len(ids))
        logits = self._model.forward(ids, positions, logit_indices, plan)[:count]
        scored = self._score(plan, logits[len(sampling_requests) :])
        for request in self._running[: self._decoding_rows]:
            request.computed_tokens += 1
        for piece in plan.pieces:
            self._running[piece.row].computed_tokens = piece.length
        if not sampling_requests:
            return [self._end_scoring(request) for request in scored]
        params, rngs = [r.params for r in sampling_requests], [r.rng for r in sampling_requests]
        matchers = {i: r.matcher for i, r in enumerate(sampling_requests) if r.matcher is not None}
        masks = {i: matcher.compute_mask(logits.shape[1]) for i, matcher in matchers.items()}
        penalties = {i: r.penalties for i, r in enumerate(sampling_requests) if r.penalties is not None}
        tokens = self._sampler.draw(logits[: len(sampling_requests)], params, rngs, masks, penalties)
        for request in sampling_requests[self._decoding_rows :]:
            self._finish_prefill(request)
        emissions = [self._accept(request, i, tokens) for i, request in enumerate(sampling_requests)]
        return emissions + [self._end_scoring(request) for request in scored]

    def _admit(self) -> None:
        deferred: list[SchedulerRequest] = []
        while self._waiting and len(self._running) < self._max_batch:
            request = self._waiting.popleft()
            length = max([request.length_limit, *(r.length_limit for r in self._running)])
            if not self._rows.can_fit(len(self._running) + 1, length):
                self._waiting.appendleft(request)
                break
            # The last prompt token is always computed, because its logits are needed.
            reusable = request.prompt[:-1] if request.scores is None else request.prompt[:0]
            if self._should_wait(request, reusable):
                deferred.append(request)
                continue
            self._start(request, reusable, length)
        self._waiting.extendleft(reversed(deferred))

    def _should_wait(self, request: SchedulerRequest, ids: Ids) -> bool:
        """Return True if a prompt in progress will add at least MIN_SAVED_TOKENS of ``ids`` to the cache."""
        cached = self._prefixes.match_length(request.loaded_policy.key, ids)
        return any(
            not other.has_mixed_versions
            and other.loaded_policy is request.loaded_policy
            and other.scores is None  # scored prompts are not cached
            and common_prefix_length(other.prompt, ids) >= cached + MIN_SAVED_TOKENS
            for other in self._running[self._decoding_rows :]
        )

    def _start(self, request: SchedulerRequest, reusable: Ids, length: int) -> None:
        if not self._running and self._rows.is_oversized(length):
            self._rows.reset()
        request.row = len(self._running)
        self._admission_count += 1
        request.admission_order = self._admission_count
        request.prompt_key = request.loaded_policy.key
        self._rows.ensure_capacity(request.row + 1, length)
        row = self._rows.get_row(request.row)
        for kv, count in self._prefixes.match(request.loaded_policy.key, reusable):
            row[:, :, :, request.computed_tokens : request.computed_tokens + count].copy_(kv[:, :, :, :count])
            request.computed_tokens += count
        self._running.append(request)
        self._status.prompt_tokens += len(request.prompt)
        self._status.cached_tokens += request.computed_tokens
        self._trim_prefixes()

    def _plan(self) -> tuple[attention.StepPlan, torch.Tensor, torch.Tensor, list[SchedulerRequest]]:
        """Return the plan, the token ids, the token indices that need logits, and the requests that sample.
        The indices for scored prompts come last."""
        decoding = self._running[: self._decoding_rows]
        ids = [r.sampled[-1] for r in decoding]
        rows = list(range(self._decoding_rows))
        positions = [r.computed_tokens for r in decoding]
        logit_indices, sampling_requests = list(range(self._decoding_rows)), list(decoding)
        spans: list[tuple[int, int, int, int]] = []
        scored_indices: list[int] = []
        budget = self._prefill_tokens
        # Rows are moved, so they are not in admission order.
        for request in sorted(self._running[self._decoding_rows :], key=lambda r: r.admission_order):
            count = min(len(request.prompt) - request.computed_tokens, budget)
            if count == 0:
                break
            budget -= count
            end = request.computed_tokens + count
            spans.append((len(ids), len(ids) + count, request.row, end))
            ids.extend(request.prompt[request.computed_tokens : end].tolist())
            rows.extend([request.row] * count)
            positions.extend(range(request.computed_tokens, end))
            if request.scores is not None:
                # The last token of the prompt has no next token to score.
                scored_end = len(ids) - (end == len(request.prompt))
                scored_indices.extend(range(len(ids) - count, scored_end))
            elif end == len(request.prompt):
                logit_indices.append(len(ids) - 1)
                sampling_requests.append(request)
        logit_indices += scored_indices
        # One transfer to the device for all values.
        values = torch.tensor(ids + rows + positions + logit_indices)
        packed = values.to(self._model.device, non_blocking=True)
        ids_T, rows_T, positions_T, logit_indices_N = packed.split([len(ids)] * 3 + [len(logit_indices)])
        plan = attention.StepPlan(
            self._rows.kv,
            rows_T,
            positions_T,
            self._decoding_rows,
            is_batch_invariant=self._is_batch_invariant,
        )
        self._add_shared_prefixes(plan)
        if not self._is_batch_invariant:
            plan.blocks = self._build_blocks(positions_T, positions[: self._decoding_rows])
        for start, stop, row, length in spans:
            mask = None
            if length > stop - start:
                mask = torch.arange(length, device=positions_T.device) <= positions_T[start:stop, None]
            plan.pieces.append(attention.PrefillPiece(start, stop, row, length, mask))
        return plan, ids_T, logit_indices_N, sampling_requests

    def _add_shared_prefixes(self, plan: attention.StepPlan) -> None:
        decoding = self._running[: self._decoding_rows]
        if not self._share_prefixes or len(decoding) < MIN_SHARED_ROWS:
            return
        shared = find_shared_prefixes([r.prompt for r in decoding], [r.prompt_key for r in decoding])
        if shared is not None:
            plan.shared_length, groups = shared
            plan.prefixes = [attention.SharedPrefix(torch.tensor(rows), rows[0]) for rows in groups]

    def _build_blocks(self, positions_T: torch.Tensor, positions: list[int]) -> list[attention.DecodeBlock]:
        blocks: list[attention.DecodeBlock] = []
        for start, stop in split_rows(positions):
            # A multiple of 8 keys, because GPU kernels require it for masks.
            length = -(-(max(positions[start:stop]) + 1) // 8) * 8
            keys = torch.arange(length, device=positions_T.device)
            is_hidden = keys > positions_T[start:stop, None]
            mask = torch.zeros(is_hidden.shape, dtype=self._rows.kv.dtype, device=is_hidden.device)
            mask.masked_fill_(is_hidden, -torch.inf)
            blocks.append(attention.DecodeBlock(start, stop, length, mask[:, None, None]))
        return blocks

    def _finish_prefill(self, request: SchedulerRequest) -> None:
        """Cache the prompt and move the request to the decoding rows."""
        self._cache_prefix(request)
        first = self._running[self._decoding_rows]
        if first is not request:
            self._rows.swap(first.row, first.computed_tokens, request.row, request.computed_tokens)
            self._running[first.row], self._running[request.row] = request, first
            first.row, request.row = request.row, first.row
        self._decoding_rows += 1

    def _select_adapters(
        self, plan: attention.StepPlan, logit_indices_N: torch.Tensor, token_count: int
    ) -> None:
        spans = [(r.loaded_policy.content, 1) for r in self._running[: self._decoding_rows]]
        for piece in plan.pieces:
            spans.append((self._running[piece.row].loaded_policy.content, piece.stop - piece.start))
        stacks = not self._is_batch_invariant
        self._model.adapters.select(spans, logit_indices_N, token_count, stacks=stacks)

    def _score(self, plan: attention.StepPlan, logits: torch.Tensor) -> list[SchedulerRequest]:
        """Compute the logprobs of scored prompts from ``logits``, and return the completed requests."""
        completed: list[SchedulerRequest] = []
        start = 0
        for piece in plan.pieces:
            request = self._running[piece.row]
            if request.scores is None:
                continue
            first = piece.length - (piece.stop - piece.start) + 1
            targets = request.prompt[first : piece.length + 1]
            logprobs = gather_logprobs(logits[start : start + len(targets)], targets)
            request.scores[first : first + len(targets)] = logprobs
            start += len(targets)
            if piece.length == len(request.prompt):
                completed.append(request)
        return completed

    def _end_scoring(self, request: SchedulerRequest) -> Emission:
        self._release(request)
        return request, TokenChunk(token_ids=[], logprobs=[], versions=[], finish_reason="stop")

    def _accept(self, request: SchedulerRequest, index: int, tokens: SampledTokens) -> Emission:
        token, behavior = tokens.ids[index], tokens.behavior_logprobs[index]
        request.append_sampled(token)
        self._status.generated_tokens += 1
        reason, stop = request.stop_rule.push(token)
        chunk = TokenChunk(
            token_ids=[token],
            logprobs=[tokens.logprobs[index]],
            versions=[request.loaded_policy.ref.version],
            behavior_logprobs=None if behavior is None else [behavior],
            finish_reason=reason,
            stop=stop,
        )
        error = request.matcher and request.matcher.consume(token)
        if reason is not None or error is not None:
            self._cache_prefix(request)
            self._release(request)
        return request, chunk if error is None else ConstraintError(error)

    def _cache_prefix(self, request: SchedulerRequest) -> None:
        if not request.has_mixed_versions:
            ids = np.concatenate([request.prompt, np.asarray(request.sampled, np.int32)])
            row = self._rows.get_row(request.row)
            self._prefixes.insert(request.loaded_policy.key, ids[: request.computed_tokens], row)
            self._trim_prefixes()

    def _trim_prefixes(self) -> None:
        self._prefixes.trim(max(0, self._kv_tokens - self._rows.capacity_tokens))

    def _release(self, request: SchedulerRequest) -> None:
        """End a request and free its row. Other rows move to close the gap, and decoding rows stay first."""
        free_row = request.row
        request.row, request.is_finished = -1, True
        if free_row < self._decoding_rows:
            self._decoding_rows -= 1
            self._move(self._decoding_rows, free_row)
            free_row = self._decoding_rows
        self._move(len(self._running) - 1, free_row)
        self._running.pop()
        self._release_policy(request)

    def _move(self, source: int, target: int) -> None:
        if source != target:
            request = self._running[source]
            self._rows.move(source, target, request.computed_tokens)
            request.row = target
            self._running[target] = request


def _fill_up(values: torch.Tensor) -> torch.Tensor:
    """Repeat the first value until there are MIN_GEMM_ROWS, if there is one."""
    return torch.cat([values, values[:1].repeat(max(0, attention.MIN_GEMM_ROWS - len(values)))])


def split_rows(positions: list[int]) -> list[tuple[int, int]]:
    """Return blocks of adjacent rows as (start, stop). A block ends where padding its short rows would take
    longer than starting another block."""
    spans: list[tuple[int, int]] = []
    start, longest, padding = 0, 0, 0
    for i, position in enumerate(positions):
        length = position + 1
        added = (i - start) * (length - longest) if length > longest else longest - length
        if i > start and padding + added > BLOCK_OVERHEAD:
            spans.append((start, i))
            start, longest, padding = i, length, 0
        else:
            longest, padding = max(longest, length), padding + added
    if positions:
        spans.append((start, len(positions)))
    return spans
