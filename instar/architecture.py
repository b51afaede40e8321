"""Check that a component computes a model's architecture like transformers does.

The component runs a small copy of the model with random weights, and its results are compared with those of
transformers' eager implementation. The success of a check is cached for the config and the versions.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from instar.config import ModelConfig
from instar.errors import ConfigError, InstarError
from instar.models import cache_dir, resolve_model
from instar.umask import USER_UMASK, use_umask

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""The largest difference of logprobs, in nats. Errors of rounding are about a hundred times smaller."""
VOCAB_SIZE = 256
SPECIAL_IDS = 16
"""The ids of special tokens in a copy are less than this."""
WINDOW = 16
"""The length of windows and chunks in a copy. The sequences of a check are longer."""
UNLISTED_LAYERS = 2
"""The number of layers of a copy if the config does not list the types of the layers."""
HIDDEN_SIZE = 128
MAX_COPY_PARAMETERS = 300_000_000
_VOCABULARY = re.compile(r"vocab_size")
_TOKEN_ID = re.compile(r"_token_(id|index)$")
_WINDOW = re.compile(r"window(_size)?$|chunk_size$")
_LAYER_COUNT = re.compile(r"^((num|n|encoder|decoder)_)?(hidden_)?layers?$")
_NARROW = (
    (re.compile(r"intermediate_size|ffn_(hidden_size|dim)$|^(n_inner|dim_ff|dff|ff_dim)$"), 96),
    (re.compile(r"^(n_routed|num_local|moe_num|num)_experts$"), 4),
    (re.compile(r"experts_per_tok(en)?$|^(moe_topk|moe_k|topk)$"), 2),
    (re.compile(r"^(n_group|topk_group)$"), 1),
)


def find_problem(
    model: ModelConfig, sources: Path, measure_error: Callable[[ModelConfig, Any], float]
) -> str | None:
    """Return why a component does not compute the model like transformers does, or None. ``sources`` is the
    folder with the code of the component. ``measure_error`` returns the difference between the results of the
    component, with these settings, and those of transformers for a model, and may raise any exception. Raises
    its ConfigError or OutOfMemoryError, which say nothing about the model."""
    try:
        config = AutoConfig.from_pretrained(resolve_model(model.name), local_files_only=True)
    except Exception as error:  # noqa: BLE001 - any error in the code of a config
        return f"transformers {transformers.__version__} cannot read its config ({_first_line(error)})"
    marker = cache_dir() / "architectures" / _hash_check(config, sources)
    if marker.is_file():
        return None
    problem = _find_problem(config, partial(measure_error, model))
    if problem is None:
        try:
            with use_umask(USER_UMASK):
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()
        except OSError as error:  # for example, a read-only folder
            logger.warning("The check of the model's architecture will be repeated: %s", error)
    return problem


def _find_problem(config: Any, measure_error: Callable[[Any], float]) -> str | None:
    try:
        model = create_random_copy(config)
    except Exception as error:  # noqa: BLE001 - any error in the code of an unknown architecture
        return f"transformers cannot run a small copy of it ({_first_line(error)})"
    try:
        error = measure_error(model)
    except (ConfigError, torch.OutOfMemoryError):  # not the model's fault
        raise
    except InstarError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - any error in the code of an unknown architecture
        return f"a small copy of it fails with {_first_line(error)}"
    if not error <= TOLERANCE:
        return f"its logprobs or gradients would differ from those of transformers by {error:.2g}"
    return None


def create_random_copy(config: Any) -> Any:
    """Return an fp32 model of the config's architecture with random weights, one layer per type of layer,
    short windows and chunks, and a small vocabulary. It is narrow, if such a model runs."""
    try:
        return _create_model(shrink_config(config, is_narrow=True))
    except Exception:  # noqa: BLE001 - any error of a model whose dimensions do not fit together
        return _create_model(shrink_config(config, is_narrow=False))


def _create_model(config: Any) -> Any:
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_COPY_PARAMETERS:
        raise ValueError(f"{size:,} parameters in a copy with few layers are too many to check it")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:  # neither the attention nor the logits become nearly uniform
                    parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.eval()
        compute_logprobs(model, make_sequences()[0])
    return model


def make_sequences() -> list[Any]:
    """Return two sequences of token ids with a common prefix."""
    ids = np.random.default_rng(0).integers(SPECIAL_IDS, VOCAB_SIZE, (2, 3 * WINDOW)).astype(np.int32)
    ids[1, : 2 * WINDOW] = ids[0, : 2 * WINDOW]
    return list(ids)


def compute_logprobs(model: Any, ids: Any) -> Any:
    """Return the logprob of each token except the first one, by the model's own forward function."""
    batch = torch.from_numpy(np.asarray(ids, np.int64))[None].to(model.device)
    logits = model(input_ids=batch).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, batch[0, 1:, None])[:, 0]


def shrink_config(config: Any, *, is_narrow: bool) -> Any:
    shrunk = copy.deepcopy(config)
    for part in _iterate_configs(shrunk):
        if hasattr(part, "use_cache"):
            part.update({"use_cache": False})
        _shrink_layers(part)
        _shrink_sizes(part, is_narrow)
    return shrunk


def _iterate_configs(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _iterate_configs(part)


def _shrink_layers(config: Any) -> None:
    names = [name for name in vars(config) if _LAYER_COUNT.search(name)]
    counts = [value for name in names if isinstance(value := getattr(config, name), int)]
    if not counts:
        return
    count = max(counts)
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count > 1
    }
    kinds = [value for value in lists.values() if len(set(map(str, value))) <= 8]
    first_of_kind = {str([kind[i] for kind in kinds]): i for i in reversed(range(count))}
    indices = sorted(first_of_kind.values()) if kinds else list(range(min(count, UNLISTED_LAYERS)))
    for name, value in lists.items():
        setattr(config, name, [value[i] for i in indices])
    for name in names:
        setattr(config, name, min(getattr(config, name), len(indices)))


def _shrink_sizes(config: Any, is_narrow: bool) -> None:
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if is_narrow and isinstance(heads, int) and isinstance(hidden, int):
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        config.num_attention_heads = 4
        if hasattr(config, "num_key_value_heads"):
            config.num_key_value_heads = kv_heads if kv_heads == 1 else 4 if kv_heads == heads else 2
        if getattr(config, "head_dim", 0) is None:
            config.head_dim = head_dim
        config.hidden_size = config.num_attention_heads * head_dim
    elif is_narrow and hasattr(config, "attention_hidden_size"):  # a recurrent model
        config.hidden_size = config.attention_hidden_size = HIDDEN_SIZE
    for name, value in vars(config).items():
        if _TOKEN_ID.search(name) and isinstance(value, list):
            setattr(config, name, [i % SPECIAL_IDS for i in value])
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if _VOCABULARY.search(name):
            setattr(config, name, min(value, VOCAB_SIZE))
        elif _TOKEN_ID.search(name):
            setattr(config, name, value % SPECIAL_IDS)
        elif _WINDOW.search(name):
            setattr(config, name, min(value, WINDOW))
        elif is_narrow:
            for pattern, size in _NARROW:
                if pattern.search(name):
                    setattr(config, name, min(value, size))


def _hash_check(config: Any, sources: Path) -> str:
    settings = {**config.to_dict(), "_name_or_path": ""}  # a copy of the model needs no check
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(f"{transformers.__version__} {torch.__version__}".encode())
    for file in (Path(__file__), *sorted(sources.glob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
