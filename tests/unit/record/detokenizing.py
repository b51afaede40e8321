"""Random token sequences, streamed in random chunks and compared with the text of all tokens."""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerFast

from instar.record.stream import Detokenizer, TokenDecoder

TEXTS = [
    "😀🦩🫨", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", " ok", "hello", "  ", "\n\n", "日本語", "é", "\ufffd",
    " ", "<b>", "42", "ግዕዝ", "\x00", "▁",
]  # fmt: skip


def make_random_ids(tokenizer: PreTrainedTokenizerFast, rng: random.Random, byte_ids: list[int]) -> list[int]:
    """Return tokens of texts, some cut inside of a character, and arbitrary, byte and special tokens."""
    ids: list[int] = []
    for _ in range(rng.randint(0, 12)):
        kind = rng.random()
        if kind < 0.5:
            text = "".join(rng.choices(TEXTS, k=rng.randint(1, 4)))
            encoded = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            ids += encoded[rng.choice([0, 0, 1]) : len(encoded) - rng.choice([0, 0, 1, 2])]
        elif kind < 0.7 and byte_ids:
            ids += rng.choices(byte_ids, k=rng.randint(1, 6))
        elif kind < 0.8:
            ids.append(rng.choice(tokenizer.all_special_ids))
        else:
            ids += [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 12))]
    return ids


def find_differences(tokenizer: PreTrainedTokenizerFast, sequences: int, seed: int = 7) -> list[list[int]]:
    """Return the random sequences whose streamed text differs from the decoded text of all their tokens,
    or of those that are not special."""
    rng = random.Random(seed)
    decode = TokenDecoder(tokenizer.backend_tokenizer)
    lone_bytes = tokenizer.backend_tokenizer.encode("😀é日🦩", add_special_tokens=False).ids
    byte_ids = sorted(decode.byte_ids) or lone_bytes
    special_ids = frozenset[int](tokenizer.all_special_ids)
    differences: list[list[int]] = []
    for _ in range(sequences):
        ids = make_random_ids(tokenizer, rng, byte_ids)
        hidden_ids = rng.choice([frozenset[int](), special_ids])
        detokenizer = Detokenizer(decode, hidden_ids)
        pieces: list[str] = []
        position = 0
        while position < len(ids):
            size = rng.choice([1, 1, 1, 2, 7, 50])
            pieces.append(detokenizer.feed(ids[position : position + size]))
            position += size
        pieces.append(detokenizer.finish())
        if "".join(pieces) != decode([i for i in ids if i not in hidden_ids]):
            differences.append(ids)
    return differences


def check_streamed_text(tokenizer: PreTrainedTokenizerFast, sequences: int) -> None:
    assert not find_differences(tokenizer, sequences)
