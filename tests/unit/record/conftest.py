from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import LlamaConfig

from instar.config import ModelConfig
from instar.models import DEFAULT_MODEL
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
    """The renderers of the tiny and the default model."""
    if request.param == "tiny":
        return tiny_renderer
    loaded = load_renderer(request.getfixturevalue("default_model"), ModelConfig())
    assert isinstance(loaded, TemplateRenderer)
    return loaded
