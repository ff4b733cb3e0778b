"""Engine and trainer must read the same prompt and compute the same probabilities, for every modality."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from rollout_helpers import MODALITIES, make_requests, make_sample, model_token_ids, reference_logprobs

from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rollout.engines.hf import HFEngine
from rollout.types import SamplingSpec

BOUND = 1e-5


@pytest.fixture(scope="module")
def processor(tiny_model_dir):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir).eval()


@pytest.fixture(scope="module")
def spec(tiny_model_dir):
    banned, stop = model_token_ids(tiny_model_dir)
    return SamplingSpec(n=2, temperature=1.0, max_tokens=12, banned_ids=banned, stop_ids=stop)


@pytest.fixture(scope="module")
def hf_engine(tiny_model_dir):
    return HFEngine(tiny_model_dir, Qwen3VLFamily())


@pytest.mark.parametrize("engine_name", ["vllm_engine", "hf_engine"])
@pytest.mark.parametrize("modality", MODALITIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ids_and_logprobs_equal_the_models(request, engine_name, modality, temperature, processor, model, spec):
    engine = request.getfixturevalue(engine_name)
    spec = dataclasses.replace(spec, temperature=temperature)
    prompt = make_sample(processor, modality)
    responses = dict(engine.generate(make_requests([prompt], spec)))
    assert set(responses) == {"0/0", "0/1"}
    for response in responses.values():
        assert response.prompt_token_ids == prompt.expanded_ids
        expected = reference_logprobs(model, processor, prompt, response.token_ids, temperature, spec.banned_ids)
        np.testing.assert_allclose(response.logprobs, expected, atol=BOUND, rtol=0)
    # A model that gave every token the same probability would pass the comparison above.
    assert np.ptp(np.concatenate([r.logprobs for r in responses.values()])) > 0.5


@pytest.mark.parametrize("modality", MODALITIES)
def test_greedy_tokens_of_both_engines_are_equal(modality, vllm_engine, hf_engine, processor, spec):
    greedy = dataclasses.replace(spec, n=1, temperature=0.0, max_tokens=24)
    prompts = [make_sample(processor, modality, seed=seed) for seed in (0, 1)]
    ours = dict(hf_engine.generate(make_requests(prompts, greedy)))
    theirs = dict(vllm_engine.generate(make_requests(prompts, greedy)))
    for key, response in theirs.items():
        assert response.token_ids.tolist() == ours[key].token_ids.tolist()
        assert response.finish_reason == ours[key].finish_reason
        np.testing.assert_allclose(response.logprobs, ours[key].logprobs, atol=BOUND, rtol=0)
