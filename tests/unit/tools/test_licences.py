"""Tests that `tools/licences.py` accepts only allow-listed licences, in every metadata format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "licences.py"


def write_package_metadata(folder: Path, name: str, *metadata: str) -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0", *metadata])
    )


def check_licences(folder: Path) -> tuple[int, str]:
    completed = subprocess.run(
        [sys.executable, str(TOOL), "--path", str(folder)], capture_output=True, text=True, check=False
    )
    return completed.returncode, completed.stdout + completed.stderr


@pytest.mark.parametrize(
    "metadata",
    [
        "License-Expression: MPL-2.0 AND (Apache-2.0 OR MIT)",
        "License-Expression: Apache-2.0 WITH LLVM-exception",
        "License: BSD",
        "License: Copyright (c) 2020\nClassifier: License :: OSI Approved :: MIT License",
    ],
)
def test_licence_in_allow_list_passes(tmp_path: Path, metadata: str) -> None:
    write_package_metadata(tmp_path, "good", metadata)
    assert check_licences(tmp_path) == (0, "packages: 1, licences that are not allowed: 0\n")


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ("License-Expression: MIT AND AGPL-3.0-only", "AGPL-3.0-only"),
        (
            "Classifier: License :: OSI Approved :: GNU General Public License v3 or later (GPLv3+)",
            "GPL-3.0-or-later",
        ),
        ("License: Proprietary", "Proprietary"),
        ("Summary: No licence", "none given"),
    ],
)
def test_licence_outside_allow_list_is_named_and_rejected(
    tmp_path: Path, metadata: str, licence: str
) -> None:
    write_package_metadata(tmp_path, "bad", metadata)
    code, output = check_licences(tmp_path)
    assert code == 1
    assert f"bad: the licence '{licence}' is not in tools/licences_allow.txt" in output


def test_licence_allowed_for_one_package_is_rejected_for_another(tmp_path: Path) -> None:
    write_package_metadata(tmp_path, "psycopg", "License-Expression: LGPL-3.0-only")
    assert check_licences(tmp_path)[0] == 0
    write_package_metadata(tmp_path, "other", "License-Expression: LGPL-3.0-only")
    code, output = check_licences(tmp_path)
    assert code == 1
    assert "other: the licence 'LGPL-3.0-only'" in output
    assert "psycopg" not in output
