"""Compare the local engine and backend with transformers for all causal language models in transformers.

    python bench/families.py [--json] [--record docs/models.json] [TYPE ...]

For each type, a small model with random weights is saved in a folder. The engine's logprobs of sampled
replies, the backend's logprobs and gradients of packed samples, and the engine's logprobs with a trained
adapter are compared with transformers' eager forward pass in fp32. A type is `right` if they differ by less
than 1e-4, and `wrong` if not. It is `refused` if the engine or the backend raises an error with a reason, and
any other error is a `raw error`.

Without TYPE, the conversation of `instar models check` is then held in the formats of the models in
tests/model_families.txt, with replies that the chat template writes and with replies that the tests write.
`exact_possible` is the fraction of follow-up calls that extend the tokens of the call before them. Calls in
which the format itself rewrites the history are not counted. ``--record`` writes the results to a file, from
which tools/models_page.py generates docs/models.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from instar.architecture import create_random_copy, shrink_config
from instar.backends.local.backend import LocalBackend
from instar.cli.model_probe import hold_probe
from instar.cli.models import ModelReport, check_renderer
from instar.config import (
    AdamConfig,
    LocalBackendConfig,
    LocalEngineConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
)
from instar.conformance.tiny import make_tiny_tokenizer
from instar.engines.local.engine import LocalEngine
from instar.errors import InstarError
from instar.models import load_tokenizer
from instar.record.render import load_renderer
from instar.types import Policy, Sample, SamplingParams
from tests.model_families import FAMILIES, ModelFamily, TokenizerUnavailable

TOLERANCE = 1e-4
TIMEOUT_SECONDS = 300
FRACTIONS = ("linked", "trained", "exact_possible")
GRANITE = {
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
}
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), GRANITE),
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
}
"""Settings of types whose default config is incomplete, or has multipliers that no published model has."""


def save_model(model_type: str, folder: Path) -> None:
    """Save a small model, or only its config if transformers cannot run it."""
    try:
        config = CONFIG_MAPPING[model_type](**SETTINGS.get(model_type, {}))
    except Exception:  # noqa: BLE001 - any error of a type without a default config
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        return
    try:
        model = create_random_copy(config)
        model.save_pretrained(folder)
        if model.config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:  # a part of a larger model
            shrink_config(config, is_narrow=True).save_pretrained(folder)
    except Exception:  # noqa: BLE001 - any error of an incomplete config
        config.save_pretrained(folder)


def make_prompts() -> list[list[int]]:
    ids = np.random.default_rng(1).integers(20, 250, (3, 60))
    ids[1, :30] = ids[0, :30]
    return ids.tolist()


def compute_expected(model: Any, ids: Sequence[int]) -> torch.Tensor:
    batch = torch.tensor([list(ids)])
    return model(input_ids=batch).logits[0, :-1].log_softmax(-1).gather(-1, batch[0, 1:, None])[:, 0]


async def measure_engine(config: ModelConfig, policy: Policy | None, model: Any) -> float:
    """Return the maximum difference of the logprobs of sampled replies."""
    engine = LocalEngine(
        config,
        LocalEngineConfig(threads=1, prefill_tokens=16),
        tokenizer=make_tiny_tokenizer(),
        stop_at_eos=False,
    )
    if policy is not None:
        await engine.load(policy)

    async def measure_reply(prompt: list[int]) -> float:
        params = SamplingParams(max_tokens=40, seed=0)
        chunks = [chunk async for chunk in engine.generate(prompt, params)]
        ids = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = torch.tensor([value for chunk in chunks for value in chunk.logprobs])
        with torch.no_grad():
            return float((compute_expected(model, prompt + ids)[-len(ids) :] - logprobs).abs().max())

    try:
        return float(np.max(await asyncio.gather(*map(measure_reply, make_prompts()))))
    finally:
        await engine.close()


def make_samples() -> list[Sample]:
    samples: list[Sample] = []
    for index, ids in enumerate(make_prompts()):
        mask = np.r_[0.0, np.ones(len(ids) - 1)].astype(np.float32)
        versions = np.zeros(len(ids), np.int32)
        samples.append(Sample(str(index), "s", np.array(ids, np.int32), mask, mask * 0 - 1, mask, versions))
    return samples


async def measure_backend(config: ModelConfig, model: Any) -> float:
    """Return the maximum difference of the logprobs, and of the gradients relative to the largest one."""
    backend = LocalBackend(config, LocalBackendConfig(lora=None, threads=1))
    result = await backend.forward_backward(make_samples(), LossConfig(name="cross_entropy"))
    expected = [compute_expected(model, ids) for ids in make_prompts()]
    torch.stack(expected).sum().neg().backward()
    differences = [
        float(np.abs(actual[1:] - values.detach().numpy()).max())
        for actual, values in zip(result.logprobs, expected, strict=True)
    ]
    actual_gradients = {name: p.grad for name, p in backend._parameters.items()}
    expected_gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        actual = actual_gradients[name]
        difference = gradient if actual is None else gradient - actual
        differences.append(float(difference.abs().max()) / largest)
    model.zero_grad()
    await backend.close()
    return float(np.max(differences))


async def publish_adapter(config: ModelConfig, folder: Path) -> Policy:
    backend = LocalBackend(config, LocalBackendConfig(lora=LoraConfig(rank=4), threads=1))
    await backend.forward_backward(make_samples(), LossConfig(name="cross_entropy"))
    await backend.optim_step(AdamConfig(lr=0.01))
    artifact = await backend.publish(folder)
    await backend.close()
    return Policy("p", 1, artifact)


async def measure_type(model_type: str, folder: Path) -> dict[str, float]:
    (folder / "model").mkdir()
    save_model(model_type, folder / "model")
    config = ModelConfig(name=str(folder / "model"), dtype="fp32", device="cpu", max_context=256)
    # The engine and the backend check the model before they load it.
    await LocalEngine(config, LocalEngineConfig(threads=1), tokenizer=make_tiny_tokenizer()).close()
    model: Any = AutoModelForCausalLM.from_pretrained(
        config.name, dtype=torch.float32, attn_implementation="eager"
    )
    errors = {
        "backend": await measure_backend(config, model),
        "engine": await measure_engine(config, None, model),
    }
    policy = await publish_adapter(config, folder / "adapter")
    return errors | {
        "adapter": await measure_engine(config, policy, add_adapter(model, policy.artifact.path))
    }


def add_adapter(model: Any, folder: str) -> Any:
    """Load a published adapter. PEFT's own function renames weights of some models, and then omits them."""
    adapted = get_peft_model(model, PeftLoraConfig.from_pretrained(folder))
    weights = load_file(Path(folder) / "adapter_model.safetensors")
    renamed = {name.replace(".weight", ".default.weight"): weight for name, weight in weights.items()}
    if unexpected := adapted.load_state_dict(renamed, strict=False).unexpected_keys:
        raise ValueError(f"the model does not have {unexpected}")
    return adapted


def run_type(model_type: str, results: Connection) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            errors = asyncio.run(measure_type(model_type, Path(folder)))
        except InstarError as error:
            results.send(("refused", str(error).replace(folder, "")))
        except Exception as error:  # noqa: BLE001 - every other error is a result of the benchmark
            results.send(("raw error", f"{type(error).__name__}: {error}"))
        else:
            is_right = all(value < TOLERANCE for value in errors.values())  # False for NaN
            text = ", ".join(f"{name} {value:.1e}" for name, value in errors.items())
            results.send(("right" if is_right else "wrong", text))


def measure_in_process(model_type: str) -> tuple[str, str]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_type, args=(model_type, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(TIMEOUT_SECONDS) else ("raw error", "timeout")
    except EOFError:
        return "raw error", "the process was killed"
    finally:
        process.kill()
        process.join()


def measure_format(family: ModelFamily, folder: Path) -> dict[str, Any]:
    """Return the row of a family in docs/models.json. Raises TokenizerUnavailable."""
    model_folder = family.save_tokenizer(folder)
    renderer = load_renderer(model_folder, ModelConfig(name=str(model_folder)))
    tokenizer = load_tokenizer(model_folder)
    report = ModelReport(family.name)
    check_renderer(report, renderer, tokenizer)
    row = {name: getattr(report, name) for name in ("tools", "reasoning", "rewritten")}
    if report.format_problem is not None:
        return {**row, **dict.fromkeys(FRACTIONS, 0.0), "problem": report.format_problem}
    probe = hold_probe(renderer, tokenizer, family.write_reply)
    fractions = {name: min(getattr(report, name), getattr(probe, name)) for name in FRACTIONS}
    return {**row, **fractions} | ({"problem": probe.problem} if probe.problem else {})


def measure_formats() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = rows[family.name] = measure_format(family, Path(folder))
            except TokenizerUnavailable as error:
                print(f"{family.name:26} skipped: {error}", flush=True)
                continue
        text = ", ".join(f"{name} {row[name]:.2f}" for name in FRACTIONS)
        print(f"{family.name:26} {text} {row.get('problem', '')}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="the types to measure; default: all")
    parser.add_argument("--json", action="store_true", help="end with the figures as a JSON object")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the results of all types as JSON")
    arguments = parser.parse_args()
    if arguments.record and arguments.types:
        parser.error("--record needs the results of all types; remove the types")
    logging.set_verbosity_error()
    outcomes: list[str] = []
    types: dict[str, dict[str, str]] = {}
    model_types: list[str] = arguments.types or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for model_type in model_types:
        outcome, text = measure_in_process(model_type)
        outcomes.append(outcome)
        types[model_type] = {"outcome": outcome} | ({} if outcome == "right" else {"detail": text})
        print(f"{model_type:26} {outcome:10} {text[:300]}", flush=True)
    figures: dict[str, Any] = {
        "types": len(outcomes),
        **{f"{name.replace(' ', '_')}": outcomes.count(name) for name in ("right", "refused", "wrong")},
        "raw_errors": outcomes.count("raw error"),
    }
    families = {} if arguments.types else measure_formats()
    if families:
        figures["formats"] = len(families)
        figures |= {name: fmean(row[name] for row in families.values()) for name in FRACTIONS}
    if arguments.record:
        results = {"transformers": transformers.__version__, "types": types, "families": families}
        arguments.record.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(figures) if arguments.json else figures)


if __name__ == "__main__":
    main()
