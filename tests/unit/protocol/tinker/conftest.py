from __future__ import annotations

from collections.abc import Generator

import pytest
import tinker

from instar.config import ModelConfig
from instar.protocol.base import ServiceLimits
from tests.sdk_leaks import collect_sdk_leaks
from tests.unit.protocol.serving import make_tiny_config, serve_in_thread

KEY = "tml-test-key"
OTHER_KEY = "tml-other-key"
MINT_KEY = "sk-mint-key"
BASE_MODEL = "tiny"


@pytest.fixture(scope="package")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return make_tiny_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def url(tiny_model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The URL of a server that all tests share. Each test has its own session."""
    limits = ServiceLimits(max_body=1_000_000, max_rank=16, max_models=4)
    folder = tmp_path_factory.mktemp("checkpoints")
    keys = [KEY, OTHER_KEY, MINT_KEY]
    options = {"folder": folder, "keys": keys, "base_model": BASE_MODEL, "limits": limits}
    with collect_sdk_leaks(), serve_in_thread("tinker", tiny_model, **options) as address:
        yield address


@pytest.fixture
def service(url: str) -> Generator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    yield client
    client.close("success").result(10)


@pytest.fixture
def training_client(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
