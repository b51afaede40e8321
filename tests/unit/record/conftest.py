from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig

from instar.config import ModelConfig
from instar.models import DEFAULT_MODEL, is_local, resolve_model
from instar.record.render import TemplateRenderer, load_renderer
from tests.tiny import CHATML, make_tiny_tokenizer

LoadTemplate = Callable[..., TemplateRenderer]


@pytest.fixture(scope="session")
def load_template(tmp_path_factory: pytest.TempPathFactory) -> LoadTemplate:
    """Return a function that loads a renderer for the tiny tokenizer with a chat template."""

    def load_template(template: str = CHATML, tool_format: str = "auto") -> TemplateRenderer:
        folder = tmp_path_factory.mktemp("model")
        make_tiny_tokenizer(template=template).save_pretrained(folder)
        LlamaConfig().save_pretrained(folder)
        model = ModelConfig.model_validate({"name": str(folder), "tool_format": tool_format})
        renderer = load_renderer(folder, model)
        assert isinstance(renderer, TemplateRenderer)
        return renderer

    return load_template


@pytest.fixture(scope="session")
def tiny_renderer(load_template: LoadTemplate) -> TemplateRenderer:
    return load_template()


@pytest.fixture(scope="session", params=["tiny", DEFAULT_MODEL])
def renderer(request: pytest.FixtureRequest, tiny_renderer: TemplateRenderer) -> TemplateRenderer:
    """The renderers of the tiny and the default model. Outside CI, the latter is skipped unless cached."""
    if request.param == "tiny":
        return tiny_renderer
    if not is_local(DEFAULT_MODEL) and not os.environ.get("CI"):
        pytest.skip(f"{DEFAULT_MODEL} is not cached; `make demo` downloads it")
    folder: Path = resolve_model(DEFAULT_MODEL)
    loaded = load_renderer(folder, ModelConfig())
    assert isinstance(loaded, TemplateRenderer)
    return loaded
