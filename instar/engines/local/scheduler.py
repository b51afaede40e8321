"""Continuous batching: decides which tokens each step computes. Single-threaded.

Rows ``0 .. decoding-1`` hold replies that sample one token per step. The rows after them hold requests whose
prompt is still being computed, in pieces. Requests that score a prompt finish as soon as the prompt is
computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch

from instar.engines.base import EngineStatus
from instar.engines.local.attention import (
    DecodeBlock,
    PrefillPiece,
    SharedPrefix,
    StepPlan,
    can_share_prefixes,
)
from instar.engines.local.model import EngineModel, PolicyUpdate
from instar.engines.local.prefix import PrefixCache, common_length
from instar.engines.local.rows import KVRows
from instar.engines.local.sampling import SampledTokens, Sampler, gather_logprobs
from instar.engines.local.sharing import MIN_SHARED_ROWS, find_shared_prefixes
from instar.engines.stopping import StopRule
from instar.types import Floats, Ids, SamplingParams, TokenChunk

MIN_SAVED_TOKENS = 16
"""A request waits for the prefill of another request if that saves at least this many tokens."""
BLOCK_OVERHEAD = 2048
"""The number of row × key cells of attention that cost as much as starting another block."""


@dataclass(eq=False, slots=True)
class SchedulerRequest:
    prompt: Ids
    params: SamplingParams
    stop: StopRule
    rng: Random
    length_limit: int
    """The maximum number of tokens of prompt and reply together."""
    sampled: list[int] = field(default_factory=list[int])
    computed: int = 0
    """The number of tokens whose keys and values are in the request's row."""
    row: int = -1
    admission_order: int = 0
    has_mixed_versions: bool = False
    """True if the request's keys and values were computed under several versions, so that other requests must
    not reuse them."""
    weights_epoch: int = 0
    """The number of weight changes before the prompt was computed, or a unique value if versions are
    mixed."""
    finished: bool = False
    scores: Floats | None = None
    """An array that receives the logprobs of the prompt's tokens. Set only for requests that score a prompt
    instead of sampling a reply."""

    def computed_ids(self) -> Ids:
        """Return the ids whose keys and values are in the request's row."""
        return np.concatenate([self.prompt, np.asarray(self.sampled, np.int32)])[: self.computed]


Emission = tuple[SchedulerRequest, TokenChunk]


class Scheduler:
    def __init__(self, model: EngineModel, *, max_batch: int, prefill_tokens: int, kv_tokens: int) -> None:
        self._model = model
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._kv_tokens = kv_tokens
        self._rows = KVRows(model.kv_shape, max_batch, kv_tokens)
        self._prefixes = PrefixCache()
        self._sampler = Sampler(model.device)
        self._waiting: deque[SchedulerRequest] = deque()
        self._running: list[SchedulerRequest] = []
        self._decoding = 0
        self._version = 0
        self._changes = 0
        self._can_share = can_share_prefixes(model.device)
        self._admitted = 0
        self._generated = self._prompted = self._reused = 0

    # --- called by the engine between steps ---

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._waiting)

    def status(self) -> EngineStatus:
        return EngineStatus(
            version=self._version,
            running=len(self._running),
            waiting=len(self._waiting),
            generated_tokens=self._generated,
            prompt_tokens=self._prompted,
            cached_tokens=self._reused,
        )

    def add(self, request: SchedulerRequest) -> None:
        self._waiting.append(request)

    def cancel(self, request: SchedulerRequest) -> None:
        if request.row >= 0:
            self._release(request)
        elif not request.finished:
            self._waiting.remove(request)
        request.finished = True

    def apply(self, change: PolicyUpdate) -> None:
        """Change the weights. Keys and values computed under the old weights are kept only in the rows of
        running requests."""
        self._model.apply(change)
        self._version = change.version
        self._prefixes.clear()
        for request in self._running:
            request.has_mixed_versions = request.computed > 0
        for request in self._running[self._decoding :]:
            # The rest of the prompt is computed under the new weights.
            request.weights_epoch = -request.admission_order
            if request.scores is not None:
                request.computed = 0
        self._changes += 1

    def set_kv_tokens(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens
        self._rows.set_max_tokens(kv_tokens)

    def release_memory(self) -> None:
        if not self.is_busy:
            self._rows.reset()
            self._prefixes.clear()

    def step(self) -> list[Emission]:
        """Admit requests, run the model once and sample. Returns the new tokens, in no particular order."""
        self._admit()
        if not self._running:
            return []
        plan, ids, sampled_at, sampling = self._plan()
        logits = self._model.forward(ids, plan.positions, sampled_at, plan)
        scored = self._score(plan, logits[len(sampling) :])
        for request in self._running[: self._decoding]:
            request.computed += 1
        for piece in plan.pieces:
            self._running[piece.row].computed = piece.length
        if not sampling:
            return [self._end_scoring(request) for request in scored]
        drawn = self._sampler.draw(
            logits[: len(sampling)], [r.params for r in sampling], [r.rng for r in sampling]
        )
        for request in sampling[self._decoding :]:
            self._finish_prefill(request)
        emissions = [self._accept(request, i, drawn) for i, request in enumerate(sampling)]
        return emissions + [self._end_scoring(request) for request in scored]

    # --- admission ---

    def _admit(self) -> None:
        deferred: list[SchedulerRequest] = []
        while self._waiting and len(self._running) < self._max_batch:
            request = self._waiting.popleft()
            length = max([request.length_limit, *(r.length_limit for r in self._running)])
            if not self._rows.can_fit(len(self._running) + 1, length):
                self._waiting.appendleft(request)
                break
            # The last prompt token is always computed: the reply begins from its logits.
            reusable = request.prompt[:-1] if request.scores is None else request.prompt[:0]
            if self._would_share(reusable):
                deferred.append(request)
                continue
            self._start(request, reusable, length)
        self._waiting.extendleft(reversed(deferred))

    def _would_share(self, ids: Ids) -> bool:
        """Return True if a prompt in progress will cache a longer prefix of ``ids``. Scored prompts cache
        none."""
        cached = self._prefixes.match_length(ids)
        return any(
            not other.has_mixed_versions
            and other.scores is None
            and common_length(other.prompt, ids) >= cached + MIN_SAVED_TOKENS
            for other in self._running[self._decoding :]
        )

    def _start(self, request: SchedulerRequest, reusable: Ids, length: int) -> None:
        if not self._running and self._rows.is_oversized(length):
            self._rows.reset()
        request.row = len(self._running)
        self._admitted += 1
        request.admission_order = self._admitted
        request.weights_epoch = self._changes
        self._rows.ensure(request.row + 1, length)
        row = self._rows.row(request.row)
        for kv, count in self._prefixes.match(reusable):
            row[:, :, :, request.computed : request.computed + count].copy_(kv[:, :, :, :count])
            request.computed += count
        self._running.append(request)
        self._prompted += len(request.prompt)
        self._reused += request.computed
        self._prefixes.trim(max(0, self._kv_tokens - self._rows.tokens))

    # --- one step ---

    def _plan(self) -> tuple[StepPlan, torch.Tensor, torch.Tensor, list[SchedulerRequest]]:
        """Return the plan, the token ids, the indices that need logits, and the requests that sample. The
        logits of scored prompts come last."""
        decoding = self._running[: self._decoding]
        ids = [r.sampled[-1] for r in decoding]
        rows = list(range(self._decoding))
        positions = [r.computed for r in decoding]
        sampled_at, sampling = list(range(self._decoding)), list(decoding)
        spans: list[tuple[int, int, int, int]] = []
        scored_at: list[int] = []
        budget = self._prefill_tokens
        # In the order of admission, which is not the order of the rows once they have moved.
        for request in sorted(self._running[self._decoding :], key=lambda r: r.admission_order):
            count = min(len(request.prompt) - request.computed, budget)
            if count == 0:
                break
            budget -= count
            end = request.computed + count
            spans.append((len(ids), len(ids) + count, request.row, end))
            ids.extend(request.prompt[request.computed : end].tolist())
            rows.extend([request.row] * count)
            positions.extend(range(request.computed, end))
            if request.scores is not None:
                last = len(ids) - (end == len(request.prompt))  # nothing is scored after the prompt
                scored_at.extend(range(len(ids) - count, last))
            elif end == len(request.prompt):
                sampled_at.append(len(ids) - 1)
                sampling.append(request)
        sampled_at += scored_at
        # One transfer to the device for all four.
        packed = torch.tensor(ids + rows + positions + sampled_at).to(self._model.device, non_blocking=True)
        ids_T, rows_T, positions_T, sampled_N = packed.split([len(ids)] * 3 + [len(sampled_at)])
        plan = StepPlan(self._rows.kv, rows_T, positions_T, self._decoding)
        self._share(plan)
        plan.blocks = self._blocks(positions_T, positions[: self._decoding])
        plan.pieces = [self._piece(positions_T, *span) for span in spans]
        return plan, ids_T, sampled_N, sampling

    def _share(self, plan: StepPlan) -> None:
        """Find the prefix that decoding rows have in common and add it to the plan."""
        decoding = self._running[: self._decoding]
        if not self._can_share or len(decoding) < MIN_SHARED_ROWS:
            return
        shared = find_shared_prefixes([r.prompt for r in decoding], [r.weights_epoch for r in decoding])
        if shared is not None:
            plan.shared_length, groups = shared
            plan.prefixes = [SharedPrefix(torch.tensor(rows), rows[0]) for rows in groups]

    def _blocks(self, positions_T: torch.Tensor, positions: list[int]) -> list[DecodeBlock]:
        blocks: list[DecodeBlock] = []
        for start, stop in split_rows(positions):
            # Rounded to a multiple of 8 keys, which the masks of GPU kernels require.
            length = -(-(max(positions[start:stop]) + 1) // 8) * 8
            keys = torch.arange(length, device=positions_T.device)
            unseen = keys > positions_T[start:stop, None]
            mask = torch.zeros(unseen.shape, dtype=self._rows.kv.dtype, device=unseen.device)
            mask.masked_fill_(unseen, -torch.inf)
            blocks.append(DecodeBlock(start, stop, length, mask[:, None, None]))
        return blocks

    def _piece(self, positions_T: torch.Tensor, start: int, stop: int, row: int, length: int) -> PrefillPiece:
        mask = None
        if length > stop - start:
            mask = torch.arange(length, device=positions_T.device) <= positions_T[start:stop, None]
        return PrefillPiece(start, stop, row, length, mask)

    def _finish_prefill(self, request: SchedulerRequest) -> None:
        """Cache the computed prompt and move the request to the decoding rows."""
        self._keep(request)
        first = self._running[self._decoding]
        if first is not request:
            self._rows.swap(first.row, first.computed, request.row, request.computed)
            self._running[first.row], self._running[request.row] = request, first
            first.row, request.row = request.row, first.row
        self._decoding += 1

    def _score(self, plan: StepPlan, logits: torch.Tensor) -> list[SchedulerRequest]:
        """Store the logprobs of scored prompts; return the requests that are complete."""
        done: list[SchedulerRequest] = []
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
                done.append(request)
        return done

    def _end_scoring(self, request: SchedulerRequest) -> Emission:
        self._release(request)
        request.finished = True
        return request, TokenChunk(token_ids=[], logprobs=[], versions=[], finish_reason="stop")

    def _accept(self, request: SchedulerRequest, index: int, drawn: SampledTokens) -> Emission:
        token, behavior = drawn.ids[index], drawn.behavior[index]
        request.sampled.append(token)
        self._generated += 1
        reason, stop = request.stop.push(token)
        chunk = TokenChunk(
            token_ids=[token],
            logprobs=[drawn.logprobs[index]],
            versions=[self._version],
            behavior_logprobs=None if behavior is None else [behavior],
            finish_reason=reason,
            stop=stop,
        )
        if reason is not None:
            self._keep(request)
            self._release(request)
            request.finished = True
        return request, chunk

    def _keep(self, request: SchedulerRequest) -> None:
        """Cache a row's keys and values for later requests."""
        if not request.has_mixed_versions:
            self._prefixes.insert(request.computed_ids(), self._rows.row(request.row))
            self._prefixes.trim(max(0, self._kv_tokens - self._rows.tokens))

    def _release(self, request: SchedulerRequest) -> None:
        """Free a request's row. The last decoding row and the last row move to close the gaps."""
        hole = request.row
        request.row = -1
        if hole < self._decoding:
            self._decoding -= 1
            hole = self._fill(hole, self._decoding)
        self._fill(hole, len(self._running) - 1)
        self._running.pop()

    def _fill(self, hole: int, last: int) -> int:
        """Move the row ``last`` into the hole and return the new hole."""
        if hole != last:
            moved = self._running[last]
            self._rows.move(last, hole, moved.computed)
            moved.row = hole
            self._running[hole] = moved
        return last


def split_rows(positions: list[int]) -> list[tuple[int, int]]:
    """Return blocks of adjacent rows as (start, stop). Rows are grouped greedily: a block ends where padding
    its short rows would cost more than starting another block."""
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
