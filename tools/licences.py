"""Check the licences of the installed packages against ``tools/licences_allow.txt``.

    python tools/licences.py [--path FOLDER] [--list]

A package's licences are read from its metadata: from the SPDX expression, else the classifiers, else the
licence text. Every part of an expression must be allowed. The allow-list has a line ``licence -- reason``
for each licence that any package may have, and ``package: licence -- reason`` for a licence that only this
package may have.
"""

from __future__ import annotations

import argparse
import re
import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOW_LIST = ROOT / "tools" / "licences_allow.txt"
OWN_PACKAGE = "instar"
NO_LICENCE = "none given"
ALIASES = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "gnu general public license v3 or later (gplv3+)": "GPL-3.0-or-later",
    "gnu lesser general public license v3 or later (lgplv3+)": "LGPL-3.0-or-later",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
"""SPDX names of licences in classifiers and texts. "BSD" without a number of clauses means BSD-3-Clause."""
IGNORED_NAMES = {"dfsg approved", "osi approved"}
"""Classifiers that do not name a licence."""


def find_licences(package: Distribution) -> set[str]:
    """Return the package's licences, or NO_LICENCE if its metadata has none."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        expression = re.sub(r" WITH [\w.-]+", "", expression)  # exceptions only add permissions
        return {part for part in re.split(r"\s+AND\s+|\s+OR\s+|[()\s]+", expression) if part}
    classifiers = [line.split(" :: ") for line in metadata.get_all("Classifier", [])]
    names = [parts[-1] for parts in classifiers if parts[0] == "License"]
    text = metadata.get("License", "").strip()
    if not names and text and text != "UNKNOWN":
        names = re.split(r"\s+AND\s+|\s+OR\s+", text.splitlines()[0])
    names = [name for name in names if name.lower() not in IGNORED_NAMES]
    return {ALIASES.get(name.lower(), name) for name in names} or {NO_LICENCE}


def read_allowed() -> set[str]:
    """Return the allowed licences. Those allowed for one package only are returned as `package: licence`.

    Exit with an error if a line has no reason.
    """
    rows = [line for line in ALLOW_LIST.read_text().splitlines() if line.strip() and not line.startswith("#")]
    if missing := [row for row in rows if not row.partition(" -- ")[2]]:
        sys.exit(f"{ALLOW_LIST.name}: {missing[0]!r} has no reason; write `licence -- reason`")
    return {row.partition(" -- ")[0].strip() for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--path", default=sysconfig.get_path("purelib"), help="folder with the installed packages"
    )
    parser.add_argument("--list", action="store_true", help="print the licences of every package")
    options = parser.parse_args()
    allowed = read_allowed()
    packages = {
        package.name.lower().replace("_", "-"): find_licences(package)
        for package in distributions(path=[options.path])
    }
    packages.pop(OWN_PACKAGE, None)
    findings: list[str] = []
    for name, licences in sorted(packages.items()):
        if options.list:
            print(f"{name}: {', '.join(sorted(licences))}")
        rejected = [licence for licence in licences if not {licence, f"{name}: {licence}"} & allowed]
        findings += [
            f"{name}: the licence {licence!r} is not in {ALLOW_LIST.relative_to(ROOT)}; replace the package, "
            "or add the licence with a reason"
            for licence in sorted(rejected)
        ]
    summary = f"packages: {len(packages)}, licences that are not allowed: {len(findings)}"
    print("\n".join([*findings, summary]))
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
