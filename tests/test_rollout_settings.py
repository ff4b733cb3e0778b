"""Engine settings must not change what the engine computes; and what a start without weights means."""

from __future__ import annotations

import dataclasses

import pytest
from rollout_helpers import MODALITIES, logprob_gate, make_requests, make_sample, model_token_ids, reference_logprobs

from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rollout.types import SamplingSpec
from rollout.weight_sync import WeightSync


@pytest.fixture(scope="module")
def small_engine(tiny_model_dir, vllm_engine):
    """16 tokens per engine step cut every video in the middle; room for seven blocks of 128 tokens; no prefix cache."""
    from rollout.engines.vllm import VLLMEngine

    engine = VLLMEngine(
        tiny_model_dir,
        Qwen3VLFamily(),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        limit_images=2,
        limit_videos=2,
        enforce_eager=True,
        enable_prefix_caching=False,
        load_weights=False,
        extra_options={"num_gpu_blocks_override": 8},
    )
    yield engine
    engine.close()


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
    return SamplingSpec(n=2, max_tokens=6, banned_ids=banned, stop_ids=stop)


def tokens(engine, requests):
    return {key: response.token_ids.tolist() for key, response in engine.generate(requests)}


def test_chunked_prefill_inside_a_video(small_engine, vllm_engine, tiny_model_dir, processor, model, spec):
    requests = make_requests([make_sample(processor, kind, seed=2) for kind in MODALITIES], spec)
    with pytest.raises(RuntimeError, match="holds no weights"):
        list(small_engine.generate(requests))
    WeightSync(small_engine, Qwen3VLFamily().checkpoint_names(tiny_model_dir)).sync(0, model.named_parameters)
    gap = logprob_gate(
        small_engine,
        requests,
        lambda prompt, ids: reference_logprobs(model, processor, prompt, ids, 1.0, spec.banned_ids),
        1e-5,
    )
    assert gap.num_tokens > 20
    assert abs(gap.kl) < 1e-5
    assert tokens(small_engine, requests) == tokens(vllm_engine, requests)


def test_preempted_responses_keep_their_tokens(small_engine, vllm_engine, processor, model, spec):
    """Four responses need two blocks each and seven are there: some start over, with the draws they had made."""
    small_engine.update_weights(model.named_parameters())
    prompt = make_sample(processor, "video", seed=2, question="What? " * 13)
    assert 90 < prompt.num_prompt_tokens < 128
    requests = make_requests([prompt], dataclasses.replace(spec, n=4, max_tokens=60, stop_ids=()))
    scheduler = small_engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    original = scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **kwargs: (preempted.append(args[0]), original(*args, **kwargs))[1]
    try:
        small = tokens(small_engine, requests)
    finally:
        scheduler._preempt_request = original
    assert preempted
    assert small == tokens(vllm_engine, requests)


def test_bad_arguments_are_refused_before_the_start(tiny_model_dir, tmp_path):
    from rollout.engines.vllm import VLLMEngine

    for options, message in [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not divide the 1 ranks"),
        ({"sleep_level": 3}, "sleep_level=3"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            VLLMEngine(tiny_model_dir, Qwen3VLFamily(), **options)
    with pytest.raises(ValueError, match=r"holds no config.json"):
        VLLMEngine(tmp_path, Qwen3VLFamily())


def test_sampling_specs_are_checked():
    with pytest.raises(ValueError, match=r"token ids \[4\] are both banned and stop"):
        SamplingSpec(banned_ids=(3, 4), stop_ids=(4,))
    with pytest.raises(ValueError, match="n=0"):
        SamplingSpec(n=0)
    with pytest.raises(ValueError, match=r"temperature=-1"):
        dataclasses.replace(SamplingSpec(), temperature=-1)


def test_model_folders_and_hub_names(tiny_model_dir, tmp_path):
    from rollout.model_folder import model_folder

    assert model_folder(tiny_model_dir) == tiny_model_dir
    with pytest.raises(ValueError, match=r"holds no config.json; give the folder"):
        model_folder(tmp_path)
    with pytest.raises(ValueError, match=r"model_path=nobody/no-such-model is no folder here"):
        model_folder("nobody/no-such-model")
    with pytest.raises(ValueError, match=r"holds no config.json"):
        model_folder("no/such/folder")
