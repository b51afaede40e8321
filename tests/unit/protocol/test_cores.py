from __future__ import annotations

from instar.protocol.models import CoreSharing

ALL_CORES, HALF_THE_CORES = 4, 2


def test_core_sharing_gives_all_cores_when_only_one_side_is_active() -> None:
    sampler_cores: list[int] = []
    model_cores: list[int] = []
    cores = CoreSharing(sampler_cores.append, ALL_CORES)
    with cores.reserve_for_sampling():
        pass
    with cores.reserve_for_training(model_cores.append):
        pass
    with cores.reserve_for_sampling():
        pass
    assert model_cores == [ALL_CORES]
    # The sampler is limited while the model trains, in case a sampling request arrives.
    assert sampler_cores == [HALF_THE_CORES, ALL_CORES]


def test_core_sharing_halves_the_cores_between_training_and_sampling() -> None:
    sampler_cores: list[int] = []
    model_cores: list[int] = []
    other_model_cores: list[int] = []
    cores = CoreSharing(sampler_cores.append, ALL_CORES)
    with cores.reserve_for_sampling(), cores.reserve_for_sampling():
        with cores.reserve_for_training(model_cores.append):
            assert sampler_cores == [HALF_THE_CORES]
            with cores.reserve_for_training(other_model_cores.append):
                pass
            assert sampler_cores == [HALF_THE_CORES], "the first model is still training"
        assert sampler_cores == [HALF_THE_CORES, ALL_CORES]
    assert (model_cores, other_model_cores) == ([HALF_THE_CORES], [HALF_THE_CORES])
    with cores.reserve_for_training(model_cores.append):
        assert model_cores == [HALF_THE_CORES, ALL_CORES]
