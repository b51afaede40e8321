"""The variables of a chat template, such as ``enable_thinking``, and renderers with other values of them."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from instar.errors import RenderError
from instar.record.base import Renderer, contains_any
from instar.types import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MAX_VARIANTS = 16
_RENDER_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"raise_exception", "strftime_now", "tokenize", "chat_template", "conversation", "tokenizer_kwargs"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
)
"""The variables and functions that the renderer or transformers sets."""
_GENERATION_TAG = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""A tag that only transformers knows."""
_variants: WeakKeyDictionary[Renderer, OrderedDict[str, Renderer]] = WeakKeyDictionary()


def find_template_variables(tokenizer: PreTrainedTokenizerFast) -> frozenset[str]:
    """Return the variables that a request can set: those that the template reads and nobody else sets."""
    from jinja2 import Environment, TemplateError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    template = tokenizer.chat_template
    names: set[str] = set()
    for source in template.values() if isinstance(template, dict) else [template or ""]:
        try:
            names |= meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", source)))
        except TemplateError:  # Rendering reports it.
            continue
    names -= _RENDER_VARIABLES | environment.globals.keys()
    return frozenset(name for name in names if not name.endswith("_token"))


def check_template_kwargs(
    tokenizer: PreTrainedTokenizerFast, kwargs: Json, *, allow_special_tokens: bool
) -> None:
    """Raise RenderError if a value contains a special token, which could forge a message."""
    if not allow_special_tokens and contains_any(kwargs, list(tokenizer.get_added_vocab())):
        raise RenderError("a variable of the chat template contains a special token; leave the token out")


def get_variant(renderer: Renderer, kwargs: Json) -> Renderer:
    """Return the renderer with these variables. The last used variants of each renderer are kept."""
    variants = _variants.setdefault(renderer, OrderedDict())
    key = json.dumps(kwargs, sort_keys=True)
    variant = variants.pop(key, None) or renderer.create_variant(kwargs)
    variants[key] = variant
    if len(variants) > _MAX_VARIANTS:
        variants.popitem(last=False)
    variant.max_prompt_tokens = renderer.max_prompt_tokens
    return variant
