"""A small tokenizer with byte fallback, like those of Gemma (no prefix) and Llama 2 (with a prefix)."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import CHATML

MERGES = ["o k", "h e", "l l", "he ll", "hell o", "▁ b", "▁b y", "▁by e", "▁ ▁"]
SPECIAL_TOKENS = ["<s>", "<|im_start|>", "<|im_end|>"]


def make_byte_fallback_tokenizer(*, has_prefix: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer that writes spaces as `▁` and other characters outside its vocabulary as bytes. With
    ``has_prefix``, it adds a space before the text and removes it when decoding."""
    letters = [chr(code) for code in range(32, 127)]
    merged = ["".join(merge.split()) for merge in MERGES]
    pieces = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "\n", *letters, "é", *merged]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    pairs = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = replace
        tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL_TOKENS])
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>"
    )
    fast_tokenizer.chat_template = CHATML
    return fast_tokenizer
