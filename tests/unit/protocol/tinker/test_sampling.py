"""Tests for sampling through the real SDK, over a socket."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from tinker import types

from tests.sdk_leaks import IGNORE_SDK_LEAKS
from tests.unit.protocol.tinker.conftest import BASE_MODEL
from tests.unit.protocol.tinker.test_training import TOKENS, get_logprobs, make_next_token_datum, run_step

PROMPT = types.ModelInput.from_ints(TOKENS)

pytestmark = IGNORE_SDK_LEAKS


def compute_logprobs(sampling_client: tinker.SamplingClient, tokens: list[int] = TOKENS) -> list[float]:
    first, *rest = sampling_client.compute_logprobs(types.ModelInput.from_ints(tokens)).result(20)
    assert first is None
    return [value for value in rest if value is not None]


def compute_model_logprobs(training_client: tinker.TrainingClient) -> list[float]:
    return get_logprobs(training_client.forward([make_next_token_datum()], "cross_entropy").result()).tolist()


def test_base_model_sampler_matches_an_untrained_model(
    service: tinker.ServiceClient, training_client: tinker.TrainingClient
) -> None:
    """The logprobs match those of an untrained model, because a new adapter does not change them."""
    sampling_client = service.create_sampling_client(base_model=BASE_MODEL).result()
    assert compute_logprobs(sampling_client) == pytest.approx(
        compute_model_logprobs(training_client), abs=1e-4
    )
    assert sampling_client.get_base_model() == BASE_MODEL
    last_logprobs = sampling_client.compute_logprobs(PROMPT, prompt_logprobs_last_n=2).result(20)
    assert last_logprobs[:4] == [None] * 4
    assert last_logprobs[4:] == pytest.approx(compute_logprobs(sampling_client)[-2:], abs=1e-5)


def test_samples_have_logprobs(service: tinker.ServiceClient) -> None:
    sampling_client = service.create_sampling_client(base_model=BASE_MODEL).result()
    params = types.SamplingParams(max_tokens=6, seed=1)
    response = sampling_client.sample(PROMPT, 3, params, include_prompt_logprobs=True).result(20)
    assert len({tuple(s.tokens) for s in response.sequences}) == 3
    assert len({s.sequence_id for s in response.sequences}) == 3
    assert response.prompt_logprobs is not None
    for sequence in response.sequences:
        logprobs = compute_logprobs(sampling_client, TOKENS + sequence.tokens)
        assert sequence.logprobs == pytest.approx(logprobs[-len(sequence.tokens) :], abs=1e-4)
    repeated = sampling_client.sample(PROMPT, 1, params).result(20)
    assert repeated.sequences[0].tokens == response.sequences[0].tokens


def test_sampling_stops_at_stop_sequences(service: tinker.ServiceClient) -> None:
    sampling_client = service.create_sampling_client(base_model=BASE_MODEL).result()
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0)
    [full] = sampling_client.sample(PROMPT, 1, greedy).result(20).sequences
    assert full.stop_reason == "length"
    stop_token = full.tokens[3]
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[stop_token])
    [short] = sampling_client.sample(PROMPT, 1, params).result(20).sequences
    assert short.stop_reason == "stop"
    assert short.tokens == full.tokens[: full.tokens.index(stop_token) + 1]
    with pytest.raises(tinker.RequestFailedError, match="stop must not be empty"):
        sampling_client.sample(PROMPT, 1, types.SamplingParams(max_tokens=8, stop=[])).result(20)


def test_saved_weights_do_not_change_during_training(
    service: tinker.ServiceClient, training_client: tinker.TrainingClient
) -> None:
    run_step(training_client)
    expected = compute_model_logprobs(training_client)
    named = training_client.save_weights_for_sampler("first").result()
    unnamed = training_client.save_weights_and_get_sampling_client().result()
    state = training_client.save_state("first").result()
    run_step(training_client)
    assert compute_model_logprobs(training_client) != pytest.approx(expected, abs=1e-2)
    for sampling_client in (
        service.create_sampling_client(model_path=named.path).result(),
        unnamed,
        training_client.create_sampling_client(state.path).result(),
    ):
        assert compute_logprobs(sampling_client) == pytest.approx(expected, abs=1e-4)


def test_prompt_with_full_context_length_has_logprobs_but_cannot_be_sampled(
    service: tinker.ServiceClient,
) -> None:
    sampling_client = service.create_sampling_client(base_model=BASE_MODEL).result()
    tokens = [3 + i % 250 for i in range(256)]
    assert np.isfinite(compute_logprobs(sampling_client, tokens)).all()
    with pytest.raises(tinker.RequestFailedError, match="256"):
        sampling_client.sample(
            types.ModelInput.from_ints(tokens), 1, types.SamplingParams(max_tokens=1)
        ).result(20)


def test_unsupported_options_and_unknown_models_are_rejected(service: tinker.ServiceClient) -> None:
    sampling_client = service.create_sampling_client(base_model=BASE_MODEL).result()
    params = types.SamplingParams(max_tokens=1)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        with pytest.raises(tinker.RequestFailedError, match=f"unsupported fields: {name}"):
            sampling_client.sample(PROMPT, 1, params, **{name: 3}).result(20)  # pyright: ignore
    with pytest.raises(tinker.BadRequestError, match="unknown base_model 'another'"):
        service.create_sampling_client(base_model="another").result()
    with pytest.raises(tinker.NotFoundError, match="was not found or has expired"):
        service.create_sampling_client(model_path="tinker://missing/sampler_weights/x").result()
