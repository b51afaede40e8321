from __future__ import annotations

from instar.protocol.models import CoreSharing

ALL_CORES, HALF_OF_CORES = 4, 2


def test_core_sharing_gives_all_cores_to_a_single_user() -> None:
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
    assert sampler_cores == [HALF_OF_CORES, ALL_CORES], "half while the model trains, then all again"


def test_core_sharing_halves_the_cores_between_training_and_sampling() -> None:
    sampler_cores: list[int] = []
    model_cores: list[int] = []
    other_model_cores: list[int] = []
    cores = CoreSharing(sampler_cores.append, ALL_CORES)
    with cores.reserve_for_sampling(), cores.reserve_for_sampling():
        with cores.reserve_for_training(model_cores.append):
            assert sampler_cores == [HALF_OF_CORES]
            with cores.reserve_for_training(other_model_cores.append):
                pass
            assert sampler_cores == [HALF_OF_CORES], "the first model is still training"
        assert sampler_cores == [HALF_OF_CORES, ALL_CORES]
    assert (model_cores, other_model_cores) == ([HALF_OF_CORES], [HALF_OF_CORES])
    with cores.reserve_for_training(model_cores.append):
        assert model_cores == [HALF_OF_CORES, ALL_CORES]
