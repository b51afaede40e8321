from __future__ import annotations

from typing import Any

from instar.config import RunConfig
from instar.data.combine import RewardCombiner
from instar.types import Reward, RewardSource, Score, ScoreState


def make_combiner(*, reward: Any = None, fallback: float | None = None, **combine: Any) -> RewardCombiner:
    scoring = {"fallback": fallback, "combine": combine}
    return RewardCombiner(
        RunConfig.model_validate({"reward": reward or [{"type": "agent"}], "scoring": scoring})
    )


def make_reward(source: RewardSource, value: float, scorer: str = "", call_id: str | None = None) -> Reward:
    return Reward("s", value, source, scorer, call_id)


def make_fallback_score(scorer: str, created_at: float = 1.0) -> Score:
    return Score("s", scorer, ScoreState.FALLBACK, 4, "no answer", created_at)


def test_combiner_uses_the_latest_reward_from_the_preferred_source() -> None:
    rewards = [
        make_reward(RewardSource.AGENT, 0.1),
        make_reward(RewardSource.RULE, 0.2),
        make_reward(RewardSource.RULE, 0.3),
        make_reward(RewardSource.FALLBACK, 0.9),
        make_reward(RewardSource.RULE, 5.0, call_id="c"),
    ]
    combine = make_combiner()
    assert combine(rewards) == 0.3
    assert combine([*rewards, make_reward(RewardSource.HUMAN, 0.0)]) == 0.0
    assert combine([]) is None
    assert combine.combine_calls(rewards) == {"c": 5.0}


def test_agent_rewards_count_only_if_configured() -> None:
    rewards = [make_reward(RewardSource.AGENT, 0.1), make_reward(RewardSource.AGENT, 1.0, call_id="c")]
    rule = {"type": "rule", "function": "tests.unit.rewards.test_rewards:match_exactly"}
    assert make_combiner(reward=rule)(rewards) is None
    assert make_combiner(reward=rule).combine_calls(rewards) == {}
    assert make_combiner(reward=[rule, {"type": "agent"}])(rewards) == 0.1


def test_combiner_prefers_scorers_by_name() -> None:
    rewards = [
        make_reward(RewardSource.RULE, 0.2, "math"),
        make_reward(RewardSource.JUDGE, 0.9, "judge:outcome"),
    ]
    assert make_combiner(prefer=["math", "judge"])(rewards) == 0.2
    assert make_combiner(prefer=["human"])(rewards) is None


def test_weighted_sum_uses_the_last_reward_of_each_scorer() -> None:
    rewards = [
        make_reward(RewardSource.RULE, 1.0, "math"),
        make_reward(RewardSource.RULE, 0.5, "math"),
        make_reward(RewardSource.RULE, 1.0, "format"),
        make_reward(RewardSource.JUDGE, 0.25, "judge:outcome"),
    ]
    assert make_combiner(how="sum", weights={"math": 2.0, "judge": 4.0})(rewards) == 2.0
    assert make_combiner(how="sum", weights={"rule": 1.0, "math": 2.0})(rewards) == 2.0, (
        "the weight of a scorer overrides the weight of its source"
    )
    assert make_combiner(how="sum", weights={"human": 1.0})(rewards) is None


def test_fallback_is_ignored_if_the_scorer_has_scored() -> None:
    fallback = make_reward(RewardSource.FALLBACK, -1.0, "judge:x")
    later = make_reward(RewardSource.JUDGE, 0.8, "judge:x")
    combine = make_combiner(how="sum", weights={"judge:x": 1.0})
    assert combine([fallback]) == -1.0
    assert combine([fallback, later]) == combine([later, fallback]) == 0.8
    assert make_combiner(prefer=["judge:x"])([later, fallback]) == 0.8


def test_calls_without_weighted_rewards_are_not_rewarded() -> None:
    rewards = [
        make_reward(RewardSource.RULE, 1.0, "math", "c1"),
        make_reward(RewardSource.JUDGE, 0.5, "judge:x", "c2"),
    ]
    assert make_combiner(how="sum", weights={"judge": 2.0}).combine_calls(rewards) == {"c2": 1.0}


def test_veto_overrides_other_rewards() -> None:
    rewards = [
        make_reward(RewardSource.RULE, 1.0, "math"),
        make_reward(RewardSource.JUDGE, 0.1, "judge:safety"),
    ]
    combine = make_combiner(prefer=["math"], veto={"judge:safety": 0.5}, veto_value=-1.0)
    assert combine(rewards) == -1.0
    assert combine(rewards[:1]) == 1.0, "a scorer without a reward cannot veto"
    assert combine([*rewards, make_reward(RewardSource.JUDGE, 0.5, "judge:safety")]) == 1.0


def test_session_is_excluded_if_a_scorer_gave_up_without_fallback() -> None:
    rewards = [make_reward(RewardSource.RULE, 1.0, "math"), make_reward(RewardSource.RULE, 1.0, "math", "c")]
    scores = [Score("s", "math", ScoreState.SCORED), make_fallback_score("judge:outcome@1")]
    assert make_combiner()(rewards, scores) is None
    assert make_combiner().combine_calls(rewards, scores) == {}
    assert make_combiner(fallback=0.0)(rewards, scores) == 1.0
    later_score = Score("s", "judge:outcome@2", ScoreState.SCORED, created_at=2.0)
    assert make_combiner()(rewards, [*scores, later_score]) == 1.0, (
        "a later version of the scorer returned a score"
    )
