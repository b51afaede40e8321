"""A run recorded by commit 6365b3d. Ctrl-C stopped it after two of its six steps.

It has 32 completed sessions with two calls each. Half of the sessions were trained on. A person corrected a
reply in one session, rated a second session and tagged a third one as untrainable. The last two have not been
claimed yet.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.tiny import make_tiny_model

RUN_ID = "previous"
CORRECTED_ID = "sess-18e8af80a4919aee3ef7"
RATED_ID = "sess-18e8af82d54253888b37"
UNTRAINABLE_ID = "sess-18e8af82d55a48be14dd"

_FIXTURE = Path(__file__).parent / "fixtures" / "run_6365b3d"
_FOLDER_PLACEHOLDER = "@folder@"
"""A placeholder in the fixture for the folder that contained the run."""
_PATH_COLUMNS = {"runs": "config", "policies": "artifact_path", "steps": "state_path", "endpoints": "log"}


def copy_previous_run(folder: Path) -> Path:
    """Copy the run and its `run.yaml` into ``folder``, which must not exist, and return the run's folder."""
    shutil.copytree(_FIXTURE, folder)
    for file in folder.rglob("*.json"):
        file.write_text(file.read_text().replace(_FOLDER_PLACEHOLDER, str(folder)))
    with closing(sqlite3.connect(folder / "run" / "store.db")) as database, database:
        for table, column in _PATH_COLUMNS.items():
            database.execute(
                f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (_FOLDER_PLACEHOLDER, str(folder))
            )
    return folder / "run"


def make_previous_model(folder: Path) -> None:
    """Write the model that the run started from."""
    make_tiny_model(folder / "model", seed=0, hidden=32)
