"""A frozen Llama model with one LoRA adapter per experiment, and sampling with all adapters in one batch.

The end of a tensor's name lists its axes: K experiments, R replies of an experiment, T tokens, S positions
that are attended to, C channels of a hidden state, G key-value heads, D channels of a head, and B = K * R.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, LlamaConfig

from instar.errors import ConfigError

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
ADAPTER_RANK = 16
ADAPTER_ALPHA = 32
ADAPTER_SEED = 0
MAX_POSITIONS = 2048
TOKENS_PER_CHUNK = 16_384
"""The number of tokens whose logits over the whole vocabulary are in memory at a time during training."""

Adapters = dict[str, Tensor]
"""The matrices A [K, rank, inputs] and B [K, outputs, rank] of every projection."""
KeysAndValues = tuple[Tensor, Tensor]
ContextExtender = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Takes a layer and the keys and values [K, R, T, G, D] of new tokens. Returns the keys and values
[B, G, S, D] that these tokens attend to, and the mask [B, 1, T, S]."""
Prompts = Sequence[Sequence[list[int]]]
"""The token ids of every prompt, without the shared prefix, by experiment and reply."""


def choose_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class BatchedLoraModel:
    """A frozen model with one trainable adapter per experiment, in bf16 on a GPU, else in fp32."""

    def __init__(self, folder: Path, experiments: int, device: str) -> None:
        self.config = _load_config(folder)
        self.experiments, self.device = experiments, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: weight.to(device, self.dtype) for name, weight in weights.items()}
        self.embeddings = self.weights["model.embed_tokens.weight"]
        self.adapters = self._make_adapters()
        self.adapter_scale_K11 = torch.full((experiments, 1, 1), ADAPTER_ALPHA / ADAPTER_RANK, device=device)
        """The factor of every experiment's adapter."""
        head_dim = self.config.head_dim
        exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
        frequencies = 1.0 / (self.config.rope_parameters["rope_theta"] ** exponents)
        angles = torch.arange(MAX_POSITIONS, device=device).float()[:, None] * frequencies
        self.rope_cos = torch.cat([angles.cos()] * 2, -1).to(self.dtype)
        self.rope_sin = torch.cat([angles.sin()] * 2, -1).to(self.dtype)

    def _make_adapters(self) -> Adapters:
        """Return new adapters in fp32. B is zero, so that they do not change the model yet."""
        generator = torch.Generator().manual_seed(ADAPTER_SEED)
        adapters: Adapters = {}
        for layer in range(self.config.num_hidden_layers):
            for projection in PROJECTIONS:
                outputs, inputs = self.weights[f"model.layers.{layer}.{projection}.weight"].shape
                uniform = torch.rand(self.experiments, ADAPTER_RANK, inputs, generator=generator)
                a = (uniform * 2 - 1) / math.sqrt(inputs)
                b = torch.zeros(self.experiments, outputs, ADAPTER_RANK, device=self.device)
                adapters[f"{layer}.{projection}.A"] = a.to(self.device).requires_grad_()
                adapters[f"{layer}.{projection}.B"] = b.requires_grad_()
        return adapters

    def cast_adapters(self) -> Adapters:
        """Return differentiable copies of the adapters in the model's precision."""
        return {name: weight.to(self.dtype, copy=True) for name, weight in self.adapters.items()}

    def forward(
        self,
        ids_KRT: Tensor,
        positions_KRT: Tensor,
        adapters: Adapters,
        extend_context: ContextExtender,
        attended: list[KeysAndValues] | None = None,
    ) -> Tensor:
        """Return the last hidden states [K, R, T, C].

        If ``attended`` is set, append the keys and values of each layer's context to it.
        """
        hidden = self.embeddings[ids_KRT]
        for layer in range(self.config.num_hidden_layers):
            arguments = (hidden, layer, positions_KRT, adapters, extend_context)
            if torch.is_grad_enabled():
                hidden, keys, values = checkpoint(self._run_layer, *arguments, use_reentrant=False)
            else:
                hidden, keys, values = self._run_layer(*arguments)
            if attended is not None:
                attended.append((keys, values))
        return self._normalize(hidden, "model.norm")

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.embeddings.T).float()

    def compute_prefix(self, ids: list[int], adapters: Adapters) -> list[KeysAndValues]:
        """Return the keys and values [K, G, S, D] of a prefix that all prompts share, by layer."""
        size = len(ids)
        shape = (self.experiments, 1, size)
        positions = torch.arange(size, device=self.device)
        mask = _make_causal_mask(size, 0, self.experiments, self.device)

        def extend_context(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return keys[:, 0].transpose(1, 2), values[:, 0].transpose(1, 2), mask

        prefix: list[KeysAndValues] = []
        ids_KRT = torch.tensor(ids, device=self.device).expand(shape)
        self.forward(ids_KRT, positions.expand(shape), adapters, extend_context, prefix)
        return prefix

    def _run_layer(
        self,
        hidden: Tensor,
        layer: int,
        positions_KRT: Tensor,
        adapters: Adapters,
        extend_context: ContextExtender,
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        K, R, T, C = hidden.shape
        queries_shape = (K, R, T, config.num_attention_heads, config.head_dim)
        keys_shape = (K, R, T, config.num_key_value_heads, config.head_dim)

        def project(inputs_KTC: Tensor, projection: str) -> Tensor:
            return self._project(inputs_KTC, f"{layer}.{projection}", adapters)

        normalized = self._normalize(hidden, f"model.layers.{layer}.input_layernorm").view(K, R * T, C)
        queries = self._rotate(project(normalized, "self_attn.q_proj").view(queries_shape), positions_KRT)
        keys = self._rotate(project(normalized, "self_attn.k_proj").view(keys_shape), positions_KRT)
        values = project(normalized, "self_attn.v_proj").view(keys_shape)
        keys, values, mask = extend_context(layer, keys, values)
        queries = queries.view(K * R, T, *queries_shape[3:]).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        mixed = mixed.transpose(1, 2).reshape(K, R * T, -1)
        hidden = hidden + project(mixed, "self_attn.o_proj").view(K, R, T, C)
        normalized = self._normalize(hidden, f"model.layers.{layer}.post_attention_layernorm")
        normalized = normalized.view(K, R * T, C)
        activated = F.silu(project(normalized, "mlp.gate_proj")) * project(normalized, "mlp.up_proj")
        return hidden + project(activated, "mlp.down_proj").view(K, R, T, C), keys, values

    def _project(self, inputs_KTC: Tensor, name: str, adapters: Adapters) -> Tensor:
        a, b = adapters[f"{name}.A"], adapters[f"{name}.B"]
        outputs = inputs_KTC @ self.weights[f"model.layers.{name}.weight"].T
        changes = torch.bmm(torch.bmm(inputs_KTC, a.transpose(1, 2)), b.transpose(1, 2))
        return outputs + changes * self.adapter_scale_K11.to(self.dtype)

    def _normalize(self, hidden: Tensor, name: str) -> Tensor:
        exact = hidden.float()
        mean_square = exact.pow(2).mean(-1, keepdim=True)
        normalized = exact * torch.rsqrt(mean_square + self.config.rms_norm_eps)
        return normalized.to(self.dtype) * self.weights[f"{name}.weight"]

    def _rotate(self, heads: Tensor, positions_KRT: Tensor) -> Tensor:
        """Apply rotary position embeddings to queries or keys [K, R, T, heads, D]."""
        cos, sin = self.rope_cos[positions_KRT][..., None, :], self.rope_sin[positions_KRT][..., None, :]
        half = heads.shape[-1] // 2
        return heads * cos + torch.cat([-heads[..., half:], heads[..., :half]], -1) * sin


def _load_config(folder: Path) -> LlamaConfig:
    """Return the model's config. Raise ConfigError if its architecture is not implemented here."""
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, LlamaConfig) or not config.tie_word_embeddings:
        raise ConfigError(f"--model: {folder} is not a Llama model with tied embeddings")
    if config.rope_parameters["rope_type"] != "default" or config.attention_bias or config.mlp_bias:
        raise ConfigError(
            f"--model: {folder} has scaled position embeddings or biases, which are not supported"
        )
    return config


def _make_causal_mask(tokens: int, offset: int, rows: int, device: str) -> Tensor:
    """Return the causal mask [rows, 1, T, S] of tokens that follow ``offset`` tokens of context."""
    positions = torch.arange(tokens, device=device)[:, None] + offset
    mask_TS = positions >= torch.arange(offset + tokens, device=device)[None]
    return mask_TS[None, None].expand(rows, 1, tokens, offset + tokens)


class _SamplingCache:
    """The keys and values of the prefix, the prompts and the sampled tokens, by layer.

    Shorter prompts are padded. A reply starts directly after its prompt and overwrites the padding before any
    token attends to it.
    """

    def __init__(
        self, model: BatchedLoraModel, prefix: list[KeysAndValues], prompt_width: int, reply_width: int
    ) -> None:
        self.model, self.prefix = model, prefix
        self.prefix_size = prefix[0][0].shape[2]
        self.prompt_end = self.prefix_size + prompt_width
        self.size = self.prompt_end + reply_width
        self.buffers: list[KeysAndValues] = []
        self.slots_B = self.rows_B = self.token_mask = torch.empty(0)

    def add_prompts(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        buffers: list[Tensor] = []
        for new, shared in zip((keys, values), self.prefix[layer], strict=True):
            K, R, _, G, D = new.shape
            buffer = torch.zeros(K, R, G, self.size, D, device=new.device, dtype=new.dtype)
            buffer[:, :, :, : self.prefix_size] = shared[:, None]
            buffer[:, :, :, self.prefix_size : self.prompt_end] = new.transpose(2, 3)
            buffers.append(buffer.view(K * R, G, self.size, D))
        self.buffers.append((buffers[0], buffers[1]))
        tokens = self.prompt_end - self.prefix_size
        mask = _make_causal_mask(tokens, self.prefix_size, len(buffers[0]), self.model.device)
        return buffers[0][:, :, : self.prompt_end], buffers[1][:, :, : self.prompt_end], mask

    def set_positions(self, positions_KR: Tensor) -> None:
        """Set the positions at which ``add_token`` stores the next token of every reply."""
        self.slots_B = positions_KR.reshape(-1)
        self.rows_B = torch.arange(len(self.slots_B), device=self.model.device)
        slots_S = torch.arange(self.size, device=self.model.device)
        self.token_mask = (slots_S[None] <= self.slots_B[:, None])[:, None, None]

    def add_token(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for buffer, new in zip(self.buffers[layer], (keys, values), strict=True):
            buffer[self.rows_B, :, self.slots_B] = new.reshape(len(self.rows_B), *new.shape[3:])
        return *self.buffers[layer], self.token_mask


@dataclass(frozen=True)
class SampledReplies:
    ids_KRT: Tensor
    """The sampled tokens up to and including the end token, padded with end tokens."""
    logprobs_KRT: Tensor
    entropies_KRT: Tensor
    """The entropy of the distribution that each token was sampled from, in nats."""
    lengths_KR: Tensor

    @property
    def mask_KRT(self) -> Tensor:
        """True for the sampled tokens, including the end token."""
        return torch.arange(self.ids_KRT.shape[2], device=self.ids_KRT.device) < self.lengths_KR[..., None]


class BatchedPolicy:
    """Samples replies to prompts that share a prefix, and computes the logprobs of replies."""

    def __init__(
        self, model: BatchedLoraModel, prefix_ids: list[int], end_id: int, max_new_tokens: int
    ) -> None:
        self.model, self.prefix_ids, self.end_id = model, prefix_ids, end_id
        self.max_new_tokens = max_new_tokens

    @torch.no_grad()
    def sample(
        self, adapters: Adapters, prompts: Prompts, generator: torch.Generator, *, is_greedy: bool
    ) -> SampledReplies:
        """Sample one reply per prompt, at temperature 1 or greedily."""
        model, offset, steps = self.model, len(self.prefix_ids), self.max_new_tokens
        lengths_KR = self._get_lengths(prompts)
        width = int(lengths_KR.max())
        prompts_KRT = self._pad(prompts, width)
        cache = _SamplingCache(model, model.compute_prefix(self.prefix_ids, adapters), width, steps)
        positions = (torch.arange(width, device=model.device) + offset).expand_as(prompts_KRT)
        hidden = model.forward(prompts_KRT, positions, adapters, cache.add_prompts)
        hidden_KRC = _gather_tokens(hidden, (lengths_KR - 1)[..., None])[:, :, 0]
        shape = (*lengths_KR.shape, steps)
        ids_KRT = torch.full(shape, self.end_id, device=model.device)
        logprobs_KRT, entropies_KRT = torch.zeros(2, *shape, device=model.device)
        reply_lengths_KR, is_done_KR = torch.zeros_like(lengths_KR), torch.zeros_like(lengths_KR).bool()
        for step in range(steps):
            logits = model.compute_logits(hidden_KRC)
            logprobs = logits.log_softmax(-1)
            # Draw even if greedy: training continues with the generator's state after an evaluation, so
            # skipping draws would change the measured results.
            uniform = torch.rand(logits.shape, device=model.device, generator=generator).clamp_min(1e-20)
            chosen_KR = (logits if is_greedy else logits - (-uniform.log()).log()).argmax(-1)
            del uniform
            entropies_KRT[..., step] = torch.where(is_done_KR, 0, -(logprobs.exp() * logprobs).sum(-1))
            ids_KRT[..., step] = torch.where(is_done_KR, self.end_id, chosen_KR)
            chosen_logprobs_KR = logprobs.gather(-1, chosen_KR[..., None])[..., 0]
            logprobs_KRT[..., step] = torch.where(is_done_KR, 0, chosen_logprobs_KR)
            reply_lengths_KR += (~is_done_KR).long()
            is_done_KR = is_done_KR | (chosen_KR == self.end_id)
            if step == steps - 1 or bool(is_done_KR.all()):
                break
            positions_KR = lengths_KR + step + offset
            cache.set_positions(positions_KR)
            hidden = model.forward(
                ids_KRT[..., step : step + 1], positions_KR[..., None], adapters, cache.add_token
            )
            hidden_KRC = hidden[:, :, 0]
        return SampledReplies(ids_KRT, logprobs_KRT, entropies_KRT, reply_lengths_KR)

    def compute_logprobs(self, adapters: Adapters, prompts: Prompts, replies: SampledReplies) -> Tensor:
        """Return the sampled tokens' logprobs [K, R, T], with gradients, and 0 after the end of a reply."""
        model, offset, tokens = self.model, len(self.prefix_ids), self.max_new_tokens
        lengths_KR = self._get_lengths(prompts)
        width = int(lengths_KR.max()) + tokens
        reply_slots_KRT = lengths_KR[..., None] + torch.arange(tokens, device=model.device)
        ids_KRT = self._pad(prompts, width).scatter(2, reply_slots_KRT, replies.ids_KRT)
        prefix = model.compute_prefix(self.prefix_ids, adapters)
        mask = _make_causal_mask(width, offset, lengths_KR.numel(), model.device)

        def prepend_prefix(shared: Tensor, new: Tensor) -> Tensor:
            K, R, _, G, D = new.shape
            shared = shared[:, None].expand(K, R, G, offset, D)
            return torch.cat([shared, new.transpose(2, 3)], 3).reshape(K * R, G, offset + width, D)

        def extend_context(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            shared_keys, shared_values = prefix[layer]
            return prepend_prefix(shared_keys, keys), prepend_prefix(shared_values, values), mask

        positions = (torch.arange(width, device=model.device) + offset).expand_as(ids_KRT)
        hidden = model.forward(ids_KRT, positions, adapters, extend_context)
        is_sampled_KRT = replies.mask_KRT
        predicting = _gather_tokens(hidden, reply_slots_KRT - 1)[is_sampled_KRT]
        targets = replies.ids_KRT[is_sampled_KRT]
        chunks = [
            checkpoint(self._gather_logprobs, *chunk, use_reentrant=False)
            for chunk in zip(predicting.split(TOKENS_PER_CHUNK), targets.split(TOKENS_PER_CHUNK), strict=True)
        ]
        logprobs_KRT = torch.zeros(replies.ids_KRT.shape, device=model.device)
        return logprobs_KRT.masked_scatter(is_sampled_KRT, torch.cat(chunks))

    def _gather_logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logprobs = self.model.compute_logits(hidden).log_softmax(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0]

    def _get_lengths(self, prompts: Prompts) -> Tensor:
        return torch.tensor([[len(ids) for ids in row] for row in prompts], device=self.model.device)

    def _pad(self, prompts: Prompts, width: int) -> Tensor:
        padded = [[ids + [self.end_id] * (width - len(ids)) for ids in row] for row in prompts]
        return torch.tensor(padded, device=self.model.device)


def _gather_tokens(hidden: Tensor, tokens_KRT: Tensor) -> Tensor:
    """Return the hidden states [K, R, T, C] at the selected tokens of each reply."""
    return hidden.gather(2, tokens_KRT[..., None].expand(*tokens_KRT.shape, hidden.shape[-1]))
