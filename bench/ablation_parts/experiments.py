"""The named sets of experiments. Each setting runs with two seeds."""

from __future__ import annotations

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

EXPERIMENT_SETS = {"first": FIRST, "second": SECOND, "third": THIRD}
