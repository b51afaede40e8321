"""Creates a tiny chat model with random weights and a byte-level tokenizer, in about a second."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
    '<tool_call>\n{"name": "calc", "arguments": {"expression": "12 * 34"}}\n</tool_call>',
    "What is 615 plus 278? The answer is 893. user assistant tool system",
]


def make_tiny_tokenizer(vocab_size: int = 320, template: str = CHATML) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer. Every string round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    fast_tokenizer.chat_template = template
    return fast_tokenizer


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 1024,
    std: float = 0.1,
) -> Path:
    """Write a random fp32 Llama model and its tokenizer to ``folder``, and return the folder."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    tokenizer = make_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        initializer_range=std,
        tie_word_embeddings=True,
        bos_token_id=cast(int, tokenizer.bos_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
    )
    rng_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    torch.set_rng_state(rng_state)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
