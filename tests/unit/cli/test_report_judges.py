from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from instar.store.sqlite import SqliteStore
from instar.types import Reward, RewardSource, Score, ScoreState
from tests.unit.cli.conftest import RUN, Instar, SmallRun


async def add_judge_scores(path: Path) -> None:
    store = SqliteStore(path)
    rows = (await store.sessions(RUN))[:2]
    for value, row in zip((0.25, 0.75), rows, strict=True):
        session_id = row.session.session_id
        rewards = [
            Reward(session_id, value, RewardSource.RULE, "math"),
            Reward(
                session_id,
                value,
                RewardSource.JUDGE,
                "judge:<b>",
                detail={"votes": [value, value + 0.1]},
                scorer_version="v1",
                cost=0.5,
            ),
        ]
        await store.record_scores([Score(session_id, "judge:<b>@v1", ScoreState.SCORED)], rewards)
    await store.close()


def test_report_shows_judge_agreement(instar: Instar, small_run: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(small_run.folder, folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace(str(small_run.folder), str(folder)))
    report_path = instar("report", folder, "--json").json["report"]
    assert "<h2>Judges</h2>" not in Path(report_path).read_text(encoding="utf-8")
    asyncio.run(add_judge_scores(folder / "store.db"))
    page = Path(instar("report", folder, "--json").json["report"]).read_text(encoding="utf-8")
    table = page.partition("<h2>Judges</h2>")[2].partition("</table>")[0]
    assert table.endswith(
        "<tr><td>judge:&lt;b&gt;@v1</td><td>2</td><td>0.500</td><td>1.00</td><td>0.900</td><td>–</td>"
        "<td>2</td><td>1.000</td><td>1.000</td></tr>"
    )
