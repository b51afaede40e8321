"""Tests for `instar models check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from instar.architecture import shrink_config
from instar.cli.model_probe import STEPS, hold_probe
from instar.record.render import TemplateRenderer
from tests.tiny import CHATML, make_tiny_tokenizer
from tests.unit.cli.conftest import Instar

COUNTING = "{{ messages | length }} messages\n" + CHATML
"""A template in which every new message changes the start of the prompt."""


@pytest.fixture(autouse=True)
def use_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTAR_CACHE", str(tmp_path / "cache"))


def save_model(folder: Path, model_type: str, template: str = CHATML, **settings: Any) -> Path:
    """Save a config and a tokenizer, but no weights."""
    shrink_config(AutoConfig.for_model(model_type, **settings), is_narrow=True).save_pretrained(folder)
    make_tiny_tokenizer(template=template).save_pretrained(folder)
    return folder


def test_model_without_weights_is_checked_by_its_config_and_tokenizer(instar: Instar, tmp_path: Path) -> None:
    result = instar("models", "check", str(save_model(tmp_path / "my-model", "llama")), "--json")
    assert result.code == 0, result.err
    report = result.json
    assert (report["family"], report["renderer"], report["tools"]) == ("llama", "template", "generic")
    assert report["linked"] == report["trained"] == report["exact_possible"] == 1
    assert report["engines"]["local"] == report["backends"]["local"] == {"supported": True, "reason": ""}
    assert report["engines"]["tinker"]["supported"] is None
    assert "vLLM is not installed" in report["engines"]["vllm"]["reason"]
    assert report["not_checked"] == ["the weights, which are not in the folder"]


def test_model_that_no_engine_computes_exits_with_1_and_the_reasons(instar: Instar, tmp_path: Path) -> None:
    result = instar("models", "check", str(save_model(tmp_path / "model", "diffllama")))
    assert result.code == 1
    text = " ".join(result.out.replace("│", " ").split())
    assert "exact_possible 100%" in text
    assert "engine local no: its logprobs or gradients would differ" in text
    assert "backend local no: " in text
    assert "Not checked: the weights" in text


def test_model_whose_template_changes_the_history_exits_with_1(instar: Instar, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama", COUNTING)
    result = instar("models", "check", str(folder), "--json")
    assert result.code == 1
    assert result.json["engines"]["local"]["supported"]
    assert (result.json["linked"], result.json["trained"]) == (1, 1)
    assert result.json["exact_possible"] == 0


def test_adapters_that_cannot_be_served_are_reported(instar: Instar, tmp_path: Path) -> None:
    report = instar("models", "check", str(save_model(tmp_path / "model", "gpt2", n_embd=64)), "--json").json
    assert "only with backend.lora: null" in report["backends"]["local"]["reason"]


@pytest.mark.parametrize(("listed", "supported"), [("LlamaForCausalLM", True), ("Qwen3ForCausalLM", False)])
def test_architectures_of_vllm_are_those_of_its_interpreter(
    instar: Instar, tmp_path: Path, listed: str, supported: bool
) -> None:
    python = tmp_path / "python"
    cases = f"*ModelRegistry*) echo log; echo {listed};; *) echo 0.12 True;;"
    python.write_text(f'#!/bin/sh\ncase "$2" in {cases} esac\n')
    python.chmod(0o755)
    folder = save_model(tmp_path / "model", "llama", architectures=["LlamaForCausalLM"])
    report = instar("models", "check", str(folder), "--python", str(python), "--json").json
    reason = "" if supported else "vLLM does not list LlamaForCausalLM"
    assert report["engines"]["vllm"] == {"supported": supported, "reason": reason}


def test_name_that_does_not_exist_is_an_error_with_advice(instar: Instar, tmp_path: Path) -> None:
    missing = instar("models", "check", str(tmp_path / "missing"))
    assert missing.code == 1
    assert "missing' does not exist or has no config.json" in missing.err
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    incomplete = instar("models", "check", str(tmp_path / "adapter"))
    assert incomplete.code == 1
    assert "has no config.json, only adapter_config.json; name the folder with" in incomplete.err


def test_folder_without_a_tokenizer_is_reported_as_such(instar: Instar, tmp_path: Path) -> None:
    AutoConfig.for_model("falcon").save_pretrained(tmp_path / "model")
    result = instar("models", "check", str(tmp_path / "model"), "--json")
    assert result.code == 1
    assert "the tokenizer cannot be loaded" in result.json["format_problem"]
    assert result.json["exact_possible"] is None


def test_probe_keeps_the_spelling_of_the_sampled_arguments() -> None:
    replies: list[str] = []

    def write_reply(prompt: str, text: str, calls: Any) -> str:
        bodies = [f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls]
        replies.append(text + "\n".join(bodies))
        return replies[-1]

    tokenizer = make_tiny_tokenizer()
    renderer = TemplateRenderer(tokenizer)
    assert hold_probe(renderer, tokenizer, write_reply) == hold_probe(renderer, tokenizer)
    assert STEPS[0][1][1][1] in replies[0]


def test_probe_reports_calls_that_are_not_read_back() -> None:
    tokenizer = make_tiny_tokenizer()
    result = hold_probe(TemplateRenderer(tokenizer), tokenizer, lambda prompt, text, calls: json.dumps(calls))
    assert not result.is_exact
    assert "is read back as" in (result.problem or "")
