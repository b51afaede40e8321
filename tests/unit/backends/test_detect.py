"""Which backend a run gets: by its settings, the environment, and what is installed."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from instar.backends.detect import BackendDetection, detect_backend
from instar.backends.packages import (
    PackageRequirement,
    check_installed,
    inspect_package,
    inspect_packages,
    inspect_packages_of,
)
from instar.backends.resolve import extract_secrets, resolve_run, without_api_key
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


def auto(**settings: Any) -> AutoBackendConfig:
    return AutoBackendConfig(**settings)


def found(
    env: dict[str, str] | None = None, installed: tuple[str, ...] = (), **settings: Any
) -> BackendDetection:
    return detect_backend(auto(**settings), env or {}, lambda: installed)


# --- settings -------------------------------------------------------------------------------------


def test_nothing_said_is_local() -> None:
    assert found(installed=("tinker",)) == BackendDetection(
        "local", "no setting and no variable names a service"
    )


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
def test_key_and_address_name_the_service(settings: dict[str, str], name: str) -> None:
    assert found(WEAVER, **settings).name == name


@pytest.mark.parametrize("url", ["https://peppermint.example", "https://tinkerbell.example/mints"])
def test_a_longer_word_is_another_word(url: str) -> None:
    with pytest.raises(ConfigError, match=r"backend\.base_url.*tinker, mint, weaver"):
        found(base_url=url)


@pytest.mark.parametrize(
    ("settings", "both"),
    [
        ({"api_key": "tml-abc", "base_url": "https://mint.example"}, ("tinker", "mint")),
        ({"api_key": "sk-mint-abc", "base_url": "https://weaver.example"}, ("weaver", "mint")),
        ({"base_url": "https://weaver.tinker.example"}, ("weaver", "tinker")),
    ],
)
def test_two_services_in_the_settings_are_an_error_that_names_both(
    settings: dict[str, str], both: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as error:
        found(**settings)
    assert all(f"{name} (" in str(error.value) for name in both)
    assert "tml-abc" not in str(error.value)


def test_a_key_behind_a_variable_of_ones_own_is_looked_at() -> None:
    assert found({"MY_KEY": "sk-mint-abc"}, api_key_env="MY_KEY").name == "mint"
    with pytest.raises(ConfigError, match="MY_KEY is not set"):
        found(api_key_env="MY_KEY")


def test_an_address_that_names_none_is_not_dropped() -> None:
    local = "http://127.0.0.1:8000"
    assert found(TINKER, base_url=local).name == "tinker"
    assert (
        found(base_url=local, installed=("weaver",)).reason == "the only service whose package is installed"
    )
    for installed in ((), ("tinker", "weaver")):
        with pytest.raises(ConfigError, match=r"backend\.base_url: it does not tell which service"):
            found(base_url=local, installed=installed)


def test_a_chosen_backend_is_not_detected() -> None:
    assert detect_backend(LocalBackendConfig(), TINKER | WEAVER).name == "local"
    assert detect_backend(MintBackendConfig(base_url="https://tinker.example"), {}).name == "mint"


# --- the environment ------------------------------------------------------------------------------


@pytest.mark.parametrize(("env", "name"), [(TINKER, "tinker"), (MINT, "mint"), (WEAVER, "weaver")])
def test_the_environment_names_the_service(env: dict[str, str], name: str) -> None:
    assert found(env) == BackendDetection(name, f"{next(iter(env))} in the environment")


@pytest.mark.parametrize("env", [TINKER | WEAVER, MINT | WEAVER, MINT | TINKER])
def test_two_services_in_the_environment_are_an_error_that_names_both(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="2 services are configured at once") as error:
        found(env)
    assert all(variable in str(error.value) for variable in env)
    assert KEY not in str(error.value)


def test_what_mints_package_copied_is_not_a_second_service() -> None:
    copied = {"MINT_API_KEY": "sk-mint-x", "TINKER_API_KEY": "sk-mint-x"}
    assert found(copied).name == "mint"
    with pytest.raises(ConfigError):
        found(copied | {"TINKER_BASE_URL": "https://elsewhere.example"})


def test_settings_come_before_the_environment_and_empty_is_unset() -> None:
    assert found(TINKER, base_url="https://weaver.example").name == "weaver"
    assert found({"TINKER_API_KEY": "", "WEAVER_BASE_URL": "http://127.0.0.1:1"}).name == "weaver"


# --- packages -------------------------------------------------------------------------------------


def test_what_is_installed_here() -> None:
    there = inspect_packages()
    assert there["tinker"].version == "0.36.0"
    assert [name for name, found in there.items() if found.problem] == ["mint", "verl"]


def test_a_missing_package_is_an_error_with_what_to_type() -> None:
    check_installed(TinkerBackendConfig())
    absent = inspect_package("tinker", PackageRequirement("no-such-package", "'instar[tinker]'"))
    assert absent.problem is not None
    assert absent.problem.endswith(f"{sys.executable} -m pip install 'instar[tinker]'")
    with pytest.raises(ConfigError) as error:
        check_installed(MintBackendConfig())
    said = str(error.value)
    assert "pip install 'instar[mint]'" in said
    assert "tinker 0.36.0" in said, "MinT does not go with the tinker that is here"
    assert "backend.python: mindlab-toolkit-env/bin/python" in said


def test_another_interpreter_is_asked(tmp_path: Path) -> None:
    assert inspect_packages_of(sys.executable) == inspect_packages()
    with pytest.raises(ConfigError, match=r"backend\.python.*no-such-python"):
        check_installed(VerlBackendConfig(python="no-such-python"))
    venv.create(tmp_path, symlinks=True, with_pip=False)
    bare = str(tmp_path / "bin" / "python")
    with pytest.raises(ConfigError, match=rf"has no Instar.*{bare} -m pip install"):
        check_installed(TinkerBackendConfig(python=bare))


def test_asking_imports_no_sdk() -> None:
    code = (
        "import sys, instar.backends.packages as p; p.inspect_packages(); "
        "print([m for m in ('tinker', 'weaver', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the run --------------------------------------------------------------------------------------


def run(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def test_auto_becomes_the_service_with_what_was_set_and_its_sampler() -> None:
    config, notes = resolve_run(run(backend={"type": "auto", "rank": 8, "deadline": 5}), TINKER)
    assert config.backend == TinkerBackendConfig(rank=8, deadline=5)
    assert config.engine == CloudEngineConfig()
    assert notes == ["backend: tinker (TINKER_API_KEY in the environment)"]
    assert resolve_run(config, TINKER) == (config, [])


def test_auto_without_a_service_is_local_and_drops_nothing_silently() -> None:
    config, _ = resolve_run(run(backend={"type": "auto", "rank": 8}), {})
    assert isinstance(config.backend, LocalBackendConfig)
    assert config.backend.lora is not None
    assert config.backend.lora.rank == 8
    assert config.engine.type == "local"
    with pytest.raises(ConfigError, match=r"backend\.train_mlp: nothing names a service"):
        resolve_run(run(backend={"type": "auto", "train_mlp": False}), {})


def test_engine_and_backend_go_together_or_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.type: local cannot sample what tinker.*engine\.type: cloud"
    ):
        resolve_run(run(backend="tinker", engine="local"), TINKER)
    with pytest.raises(ConfigError, match=r"engine\.type: cloud.*backend\.type is 'local'"):
        resolve_run(run(engine="cloud"), {})
    config, _ = resolve_run(run(backend="tinker", engine="scripted"), TINKER)
    assert isinstance(config.engine, ScriptedEngineConfig)


def test_the_sampler_runs_where_the_trainer_does() -> None:
    config, _ = resolve_run(run(backend={"type": "tinker", "python": sys.executable}), TINKER)
    assert config.engine.python == sys.executable


def test_a_service_without_a_key_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"weaver needs a key; set WEAVER_API_KEY"):
        resolve_run(run(backend="weaver"), TINKER)


@pytest.mark.parametrize(
    "url", ["tinker.example", "https://me:tml-secret@tinker.example", "https://x/?key=tml-secret"]
)
def test_an_address_holds_no_key_and_is_one(url: str) -> None:
    with pytest.raises(ConfigError, match=r"backend\.base_url") as error:
        resolve_run(run(backend={"type": "tinker", "base_url": url}), TINKER)
    assert "tml-secret" not in str(error.value)


# --- secrets --------------------------------------------------------------------------------------


def test_key_and_address_leave_the_settings_for_the_environment() -> None:
    settings = {"type": "weaver", "api_key": "wv-secret", "base_url": "http://127.0.0.1:9"}
    config, secrets = extract_secrets(run(backend=settings), {"WEAVER_API_KEY": "another"})
    assert secrets.env == {"WEAVER_API_KEY": "wv-secret", "WEAVER_BASE_URL": "http://127.0.0.1:9"}
    assert "wv-secret" not in repr((config, secrets, config.model_dump_json()))
    assert config.backend == WeaverBackendConfig(base_url="http://127.0.0.1:9")


def test_every_variable_with_the_key_is_withheld() -> None:
    env = {"MY_KEY": KEY, "TINKER_BASE_URL": "https://elsewhere.example", "HOME": "/home/me"}
    config, secrets = extract_secrets(run(backend={"type": "mint", "api_key_env": "MY_KEY"}), env)
    assert secrets.env == {"MINT_API_KEY": KEY}
    assert {"MY_KEY", "MINT_API_KEY", "TINKER_BASE_URL"} <= secrets.withheld
    assert "HOME" not in secrets.withheld
    assert config.backend == MintBackendConfig()


def test_a_teachers_key_is_the_trainers_alone() -> None:
    reference = {"type": "completions", "base_url": "http://x/v1", "model": "m", "api_key_env": "TEACHER_KEY"}
    _, secrets = extract_secrets(run(trainer={"reference": reference}), {"TEACHER_KEY": "abc"})
    assert (secrets.env, secrets.withheld) == ({"TEACHER_KEY": "abc"}, {"TEACHER_KEY"})


def test_a_local_run_leaves_the_environment_alone() -> None:
    config = run()
    assert extract_secrets(config, TINKER)[0] is config
    assert extract_secrets(config, TINKER)[1].withheld == frozenset()


def test_settings_are_shown_without_the_key() -> None:
    shown = without_api_key(run(backend={"type": "auto", "api_key": KEY, "api_key_env": None}))
    assert KEY not in shown.model_dump_json()
    assert run(**shown.model_dump(mode="json")) == shown
