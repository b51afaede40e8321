from __future__ import annotations

from instar.protocol.models import CoreSharing

ALL, HALF = 4, 2


def test_core_sharing_gives_all_cores_to_a_single_user() -> None:
    samplers: list[int] = []
    model: list[int] = []
    cores = CoreSharing(samplers.append, ALL)
    with cores.reserve_for_sampling():
        pass
    with cores.reserve_for_training(model.append):
        pass
    with cores.reserve_for_sampling():
        pass
    assert model == [ALL]
    assert samplers == [HALF, ALL], "half while the model trains, then all again"


def test_core_sharing_halves_the_cores_between_training_and_sampling() -> None:
    samplers: list[int] = []
    model: list[int] = []
    other: list[int] = []
    cores = CoreSharing(samplers.append, ALL)
    with cores.reserve_for_sampling(), cores.reserve_for_sampling():
        with cores.reserve_for_training(model.append):
            assert samplers == [HALF]
            with cores.reserve_for_training(other.append):
                pass
            assert samplers == [HALF], "the first model is still training"
        assert samplers == [HALF, ALL]
    assert (model, other) == ([HALF], [HALF])
    with cores.reserve_for_training(model.append):
        assert model == [HALF, ALL]
