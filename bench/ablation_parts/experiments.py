"""The named sets of experiments. Each setting runs with several seeds."""

from __future__ import annotations

from dataclasses import replace

from ablation_parts.training import ExperimentSettings as Settings


def _repeat_for_seeds(seeds: tuple[int, ...], *settings: Settings) -> tuple[Settings, ...]:
    """Return every setting with each of the seeds. The order decides an experiment's initial adapter."""
    return tuple(setting.with_seed(seed) for setting in settings for seed in seeds)


FIRST = _repeat_for_seeds(
    (0, 1),
    Settings(),
    Settings(groups=6, learning_rate=1e-4),
    Settings(groups=6),
    Settings(
        groups=6,
        should_divide_by_std=False,
        max_gradient_norm=0.0,
        normalization="all_groups",
        adam_beta2=0.99,
    ),
    Settings(groups=6, entropy_bonus=0.03),
    Settings(groups=6, failed_group_penalty=0.3),
    Settings(groups=6, positive_weight=0.3),
    Settings(groups=6, target_kl=0.01),
    Settings(groups=6, epochs=2),
    Settings(groups=6, easy_group_discount=0.7),
)
"""Each change alone, from a base setting of 6 groups."""

SECOND = _repeat_for_seeds(
    (0, 1),
    Settings(groups=6, failed_group_penalty=0.3, epochs=2),
    Settings(groups=6, failed_group_penalty=0.3, target_kl=0.01),
    Settings(groups=6, failed_group_penalty=0.3, target_kl=0.01, epochs=2),
    Settings(groups=6, failed_group_penalty=1.0),
    Settings(groups=6, failed_group_penalty=0.1),
    Settings(groups=6, failed_group_penalty=0.3, learning_rate=1e-3),
    Settings(groups=6, failed_group_penalty=0.3, learning_rate=1e-4),
    Settings(groups=6, failed_group_penalty=0.3, easy_group_discount=0.7, epochs=2),
    Settings(groups=3, failed_group_penalty=0.3),
    Settings(groups=6, failed_group_penalty=0.2, should_divide_by_std=False, epochs=2),
)
"""A penalty for groups that fail completely, combined with other changes."""

THIRD = _repeat_for_seeds(
    (2, 3),
    Settings(groups=6, learning_rate=1e-4),
    Settings(groups=6, learning_rate=1e-4, epochs=2),
    Settings(groups=6, learning_rate=1e-4, epochs=2, failed_group_penalty=0.2),
    Settings(groups=6, learning_rate=1e-4, should_divide_by_std=False),
    Settings(groups=6, target_kl=0.002),
    Settings(groups=6, learning_rate_scaling="sqrt"),
    Settings(groups=6, learning_rate_scaling="linear"),
)
"""Smaller steps: a lower learning rate, or one that depends on the KL or on the groups with signal."""

LIKE_TRL = Settings(is_on_policy=True, warmup_steps=0, normalization="all_tokens", adam_beta2=0.999)
FOURTH = _repeat_for_seeds(
    (0, 1),
    LIKE_TRL,
    replace(LIKE_TRL, learning_rate=1e-4),
    Settings(),
    Settings(warmup_steps=0, is_on_policy=True),
    replace(LIKE_TRL, adapter_alpha=8.0),
    Settings(warmup_steps=0, is_on_policy=True, learning_rate=1e-4),
)
"""The differences from TRL's defaults, one by one. `ablations_trl.py` runs TRL with the same examples."""

FIFTH = _repeat_for_seeds(
    (4, 5, 6),
    Settings(groups=6),
    Settings(groups=6, learning_rate_scaling="sqrt"),
    Settings(groups=6, min_signal_groups=4),
    Settings(groups=6, learning_rate=1e-4, normalization="all_tokens", adam_beta2=0.999),
    Settings(groups=6, normalization="all_tokens", adam_beta2=0.999),
    Settings(groups=6, failed_group_penalty=0.2, learning_rate_scaling="sqrt"),
    Settings(groups=6, learning_rate=1e-3, max_kl=0.02, learning_rate_scaling="sqrt"),
)
"""Steps that depend on the signal, and a limit on the KL of a step."""

TWO_UPDATES = Settings(groups=6, epochs=2, learning_rate_scaling="sqrt")
SIXTH = _repeat_for_seeds(
    (4, 5, 6),
    Settings(groups=6, epochs=2),
    TWO_UPDATES,
    replace(TWO_UPDATES, failed_group_penalty=0.2),
    Settings(groups=6, hard_group_epochs=1, learning_rate_scaling="sqrt", failed_group_penalty=0.2),
    Settings(groups=6, epochs=2, failed_group_penalty=0.2, learning_rate=1e-4),
    replace(TWO_UPDATES, failed_group_penalty=0.2, max_kl=0.02, learning_rate=1e-3),
    replace(TWO_UPDATES, failed_group_penalty=0.2, max_kl=0.02),
)
"""Two updates per step, with the changes of the fifth set."""

LIMITED = Settings(warmup_steps=0, max_kl=0.03)
SEVENTH = _repeat_for_seeds(
    (7, 8, 9),
    LIMITED,
    replace(LIMITED, epochs=2),
    replace(LIMITED, epochs=3),
    replace(LIMITED, epochs=2, max_kl=0.01),
)
"""Three groups per step with a limit on the KL of a step, and one to three updates."""

EIGHTH = _repeat_for_seeds(
    (7, 8, 9),
    Settings(groups=6, learning_rate=2e-4, max_kl=0.01),
    replace(LIMITED, groups=6, epochs=2),
    replace(LIMITED, groups=6, epochs=4),
)
"""Six groups per step: the defaults of version 0.1, and several updates with a higher limit on the KL."""

EXPERIMENT_SETS = {
    "first": FIRST,
    "second": SECOND,
    "third": THIRD,
    "fourth": FOURTH,
    "fifth": FIFTH,
    "sixth": SIXTH,
    "seventh": SEVENTH,
    "eighth": EIGHTH,
}
