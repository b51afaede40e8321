"""Tests for backend detection, package checks, resolved run configs and secrets."""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from instar.backends.packages import (
    PackageRequirement,
    check_installed,
    inspect_package,
    inspect_packages,
)
from instar.backends.resolve import (
    BackendDetection,
    detect_backend,
    extract_secrets,
    remove_api_key,
    resolve_run,
)
from instar.config import (
    AutoBackendConfig,
    CloudEngineConfig,
    LocalBackendConfig,
    MintBackendConfig,
    RunConfig,
    ScriptedEngineConfig,
    TinkerBackendConfig,
    VerlBackendConfig,
    WeaverBackendConfig,
)
from instar.errors import ConfigError

KEY = "tml-not-a-real-key"
TINKER, MINT, WEAVER = {"TINKER_API_KEY": KEY}, {"MINT_API_KEY": "sk-mint-x"}, {"WEAVER_API_KEY": "x"}


def make_auto_config(**settings: Any) -> AutoBackendConfig:
    return AutoBackendConfig(**settings)


def detect(
    env: dict[str, str] | None = None, installed: tuple[str, ...] = (), **settings: Any
) -> BackendDetection:
    return detect_backend(make_auto_config(**settings), env or {}, lambda: installed)


# --- settings -------------------------------------------------------------------------------------


def test_detection_without_settings_selects_local() -> None:
    assert detect(installed=("tinker",)) == BackendDetection("local", "no service is configured")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"api_key": "tml-abc"}, "tinker"),
        ({"api_key": "sk-mint-abc"}, "mint"),
        ({"base_url": "https://tinker.example.com"}, "tinker"),
        ({"base_url": "https://api.thinkingmachines.dev/services/x"}, "tinker"),
        ({"base_url": "https://mint.macaron.im"}, "mint"),
        ({"base_url": "https://console.weaver.example"}, "weaver"),
        ({"base_url": "http://127.0.0.1:8000/weaver"}, "weaver"),
        ({"base_url": "http://GPU-BOX/Tinker/api"}, "tinker"),
        ({"base_url": "https://mint.example.com/tinker"}, "mint"),
        ({"base_url": "https://mint.example.com", "api_key": "sk-mint-abc"}, "mint"),
        ({"api_key_env": "WEAVER_API_KEY"}, "weaver"),
    ],
)
def test_detection_recognizes_service_by_key_or_url(settings: dict[str, str], name: str) -> None:
    assert detect(WEAVER, **settings).name == name


@pytest.mark.parametrize("url", ["https://peppermint.example", "https://tinkerbell.example/mints"])
def test_detection_rejects_url_with_service_name_inside_word(url: str) -> None:
    with pytest.raises(ConfigError, match=r"backend\.base_url.*tinker, mint, weaver"):
        detect(base_url=url)


@pytest.mark.parametrize(
    ("settings", "services"),
    [
        ({"api_key": "tml-abc", "base_url": "https://mint.example"}, ("tinker", "mint")),
        ({"api_key": "sk-mint-abc", "base_url": "https://weaver.example"}, ("weaver", "mint")),
        ({"base_url": "https://weaver.tinker.example"}, ("weaver", "tinker")),
    ],
)
def test_detection_with_two_services_in_settings_names_both(
    settings: dict[str, str], services: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as error:
        detect(**settings)
    assert all(f"{name} (" in str(error.value) for name in services)
    assert "tml-abc" not in str(error.value)


def test_detection_reads_key_from_custom_variable() -> None:
    assert detect({"MY_KEY": "sk-mint-abc"}, api_key_env="MY_KEY").name == "mint"
    with pytest.raises(ConfigError, match="MY_KEY is not set"):
        detect(api_key_env="MY_KEY")


def test_detection_with_unrecognized_url_uses_environment_or_only_installed_package() -> None:
    local_url = "http://127.0.0.1:8000"
    assert detect(TINKER, base_url=local_url).name == "tinker"
    assert (
        detect(base_url=local_url, installed=("weaver",)).reason
        == "the only service whose package is installed"
    )
    for installed in ((), ("tinker", "weaver")):
        with pytest.raises(ConfigError, match=r"backend\.base_url: cannot tell which service"):
            detect(base_url=local_url, installed=installed)


def test_explicit_backend_skips_detection() -> None:
    assert detect_backend(LocalBackendConfig(), TINKER | WEAVER).name == "local"
    assert detect_backend(MintBackendConfig(base_url="https://tinker.example"), {}).name == "mint"


# --- environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("env", "name"), [(TINKER, "tinker"), (MINT, "mint"), (WEAVER, "weaver")])
def test_detection_recognizes_service_by_environment(env: dict[str, str], name: str) -> None:
    assert detect(env) == BackendDetection(name, f"{next(iter(env))} in the environment")


@pytest.mark.parametrize("env", [TINKER | WEAVER, MINT | WEAVER, MINT | TINKER])
def test_detection_with_two_services_in_environment_names_both(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="2 services are configured, and a run can use only one") as error:
        detect(env)
    assert all(variable in str(error.value) for variable in env)
    assert KEY not in str(error.value)


def test_detection_ignores_tinker_key_copied_by_mint() -> None:
    copied = {"MINT_API_KEY": "sk-mint-x", "TINKER_API_KEY": "sk-mint-x"}
    assert detect(copied).name == "mint"
    with pytest.raises(ConfigError):
        detect(copied | {"TINKER_BASE_URL": "https://other.example"})


def test_detection_prefers_settings_and_ignores_empty_variables() -> None:
    assert detect(TINKER, base_url="https://weaver.example").name == "weaver"
    assert detect({"TINKER_API_KEY": "", "WEAVER_BASE_URL": "http://127.0.0.1:1"}).name == "weaver"


# --- packages -------------------------------------------------------------------------------------


def test_inspect_packages_reports_installed_versions() -> None:
    packages = inspect_packages()
    assert packages["tinker"].version == version("tinker")
    assert [name for name, package in packages.items() if package.problem] == ["mint", "verl"]


def test_check_installed_with_missing_package_shows_install_command() -> None:
    check_installed(TinkerBackendConfig())
    missing = inspect_package("tinker", PackageRequirement("missing-package", "'instar[tinker]'"))
    assert missing.problem is not None
    assert missing.problem.endswith(f"{sys.executable} -m pip install 'instar[tinker]'")
    with pytest.raises(ConfigError) as error:
        check_installed(MintBackendConfig())
    message = str(error.value)
    assert "pip install 'instar[mint]'" in message
    assert f"tinker {version('tinker')}" in message, "MinT is not compatible with the installed tinker"
    assert "backend.python: mindlab-toolkit-env/bin/python" in message


def test_check_installed_inspects_configured_interpreter(tmp_path: Path) -> None:
    assert inspect_packages(sys.executable) == inspect_packages()
    with pytest.raises(ConfigError, match=r"backend\.python.*missing-python"):
        check_installed(VerlBackendConfig(python="missing-python"))
    venv.create(tmp_path, symlinks=True, with_pip=False)
    interpreter = str(tmp_path / "bin" / "python")
    with pytest.raises(ConfigError, match=rf"Instar is not installed.*{interpreter} -m pip install"):
        check_installed(TinkerBackendConfig(python=interpreter))


def test_inspect_packages_imports_no_sdk() -> None:
    code = (
        "import sys, instar.backends.packages as p; p.inspect_packages(); "
        "print([m for m in ('tinker', 'weaver', 'torch', 'transformers') if m in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"


# --- resolve_run ----------------------------------------------------------------------------------


def make_config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def test_auto_backend_becomes_service_with_its_settings_and_sampler() -> None:
    config, notes = resolve_run(make_config(backend={"type": "auto", "rank": 8, "deadline": 5}), TINKER)
    assert config.backend == TinkerBackendConfig(rank=8, deadline=5)
    assert config.engine == CloudEngineConfig()
    assert notes == ["backend: tinker (TINKER_API_KEY in the environment)"]
    assert resolve_run(config, TINKER) == (config, [])


def test_auto_backend_without_service_is_local_and_rejects_service_settings() -> None:
    config, _ = resolve_run(make_config(backend={"type": "auto", "rank": 8}), {})
    assert isinstance(config.backend, LocalBackendConfig)
    assert config.backend.lora is not None
    assert config.backend.lora.rank == 8
    assert config.engine.type == "local"
    with pytest.raises(ConfigError, match=r"backend\.train_mlp: no service is configured"):
        resolve_run(make_config(backend={"type": "auto", "train_mlp": False}), {})


def test_resolve_run_rejects_engine_that_does_not_fit_backend() -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.type: local cannot load the weights that tinker.*engine\.type to cloud"
    ):
        resolve_run(make_config(backend="tinker", engine="local"), TINKER)
    with pytest.raises(ConfigError, match=r"engine\.type: cloud.*backend\.type is 'local'"):
        resolve_run(make_config(engine="cloud"), {})
    config, _ = resolve_run(make_config(backend="tinker", engine="scripted"), TINKER)
    assert isinstance(config.engine, ScriptedEngineConfig)


def test_cloud_engine_uses_interpreter_of_backend() -> None:
    config, _ = resolve_run(make_config(backend={"type": "tinker", "python": sys.executable}), TINKER)
    assert config.engine.python == sys.executable


def test_resolve_run_rejects_service_without_key() -> None:
    with pytest.raises(
        ConfigError, match="api_key is missing; set it or the environment variable WEAVER_API_KEY"
    ):
        resolve_run(make_config(backend="weaver"), TINKER)


@pytest.mark.parametrize(
    "url", ["tinker.example", "https://me:tml-secret@tinker.example", "https://x/?key=tml-secret"]
)
def test_resolve_run_rejects_invalid_base_url_without_showing_key(url: str) -> None:
    with pytest.raises(ConfigError, match=r"backend\.base_url") as error:
        resolve_run(make_config(backend={"type": "tinker", "base_url": url}), TINKER)
    assert "tml-secret" not in str(error.value)


# --- secrets --------------------------------------------------------------------------------------


def test_extract_secrets_moves_key_and_url_to_environment() -> None:
    settings = {"type": "weaver", "api_key": "wv-secret", "base_url": "http://127.0.0.1:9"}
    config, secrets = extract_secrets(make_config(backend=settings), {"WEAVER_API_KEY": "wv-other"})
    assert secrets.env == {"WEAVER_API_KEY": "wv-secret", "WEAVER_BASE_URL": "http://127.0.0.1:9"}
    assert "wv-secret" not in repr((config, secrets, config.model_dump_json()))
    assert config.backend == WeaverBackendConfig(base_url="http://127.0.0.1:9")


def test_extract_secrets_withholds_variables_with_keys_or_service_urls() -> None:
    env = {"MY_KEY": KEY, "TINKER_BASE_URL": "https://other.example", "HOME": "/home/me"}
    config, secrets = extract_secrets(make_config(backend={"type": "mint", "api_key_env": "MY_KEY"}), env)
    assert secrets.env == {"MINT_API_KEY": KEY}
    assert {"MY_KEY", "MINT_API_KEY", "TINKER_BASE_URL"} <= secrets.withheld_variables
    assert "HOME" not in secrets.withheld_variables
    assert config.backend == MintBackendConfig()


def test_extract_secrets_gives_teacher_key_to_trainer_only() -> None:
    reference = {"type": "completions", "base_url": "http://x/v1", "model": "m", "api_key_env": "TEACHER_KEY"}
    _, secrets = extract_secrets(make_config(trainer={"reference": reference}), {"TEACHER_KEY": "abc"})
    assert (secrets.env, secrets.withheld_variables) == ({"TEACHER_KEY": "abc"}, {"TEACHER_KEY"})


def test_extract_secrets_of_local_run_changes_nothing() -> None:
    config = make_config()
    assert extract_secrets(config, TINKER)[0] is config
    assert extract_secrets(config, TINKER)[1].withheld_variables == frozenset()


def test_remove_api_key_removes_key_from_settings() -> None:
    redacted = remove_api_key(make_config(backend={"type": "auto", "api_key": KEY, "api_key_env": None}))
    assert KEY not in redacted.model_dump_json()
    assert make_config(**redacted.model_dump(mode="json")) == redacted
