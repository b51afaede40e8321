"""Tests for the workaround for broken AMX instructions, and for the settings of malloc."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from instar.cpu import ISA_LIMIT_VARIABLE, cpu_flags, disable_broken_amx

BF16_PRODUCT = """
import sys, torch
from pathlib import Path
from instar.cpu import disable_broken_amx
disable_broken_amx(Path(sys.argv[1]))
print(torch.nn.functional.linear(torch.ones(33, 64).bfloat16(), torch.ones(96, 64).bfloat16()).sum().item())
"""


def test_bf16_product_after_disable_broken_amx_succeeds(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != ISA_LIMIT_VARIABLE}
    command = [sys.executable, "-c", BF16_PRODUCT, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, str(33 * 96 * 64.0)), result.stderr


def test_disable_broken_amx_keeps_an_existing_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_LIMIT_VARIABLE, "AVX2")
    disable_broken_amx(tmp_path)
    assert os.environ[ISA_LIMIT_VARIABLE] == "AVX2"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif("amx_bf16" not in cpu_flags(), reason="this CPU does not report AMX")
def test_disable_broken_amx_stores_the_probe_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_LIMIT_VARIABLE, raising=False)
    disable_broken_amx(tmp_path)
    (file,) = (tmp_path / "cpu").iterdir()
    is_broken = file.read_text() == "broken"
    assert (ISA_LIMIT_VARIABLE in os.environ) == is_broken
    monkeypatch.delenv(ISA_LIMIT_VARIABLE, raising=False)
    file.write_text("broken")
    disable_broken_amx.cache_clear()
    disable_broken_amx(tmp_path)
    assert os.environ[ISA_LIMIT_VARIABLE] == "AVX512_CORE_FP16"


FRAGMENT_MEMORY = """
from pathlib import Path
from instar.cpu import release_freed_pages

def read_resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

blocks = [bytes(6000) for _ in range(20_000)]
kept = blocks[::20]
del blocks
before = read_resident_pages()
release_freed_pages()
print(before, read_resident_pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can release freed pages")
def test_release_freed_pages_shrinks_a_fragmented_process() -> None:
    command = [sys.executable, "-c", FRAGMENT_MEMORY]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, result.stdout.split())
    assert after < 0.7 * before
