"""Weights, caches, seeds, bans and faults of the engines, on real vLLM."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from rollout_helpers import logprob_gate, make_requests, make_sample, model_token_ids, reference_logprobs

from datamodules.common.seeds import response_seed
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rollout.engines.hf import HFEngine, processed_logprobs
from rollout.types import SampleError, SamplingSpec
from rollout.weight_sync import WeightSync

LONG = "What colour is the square? " * 30
"""More than one block of the prefix cache (128 tokens on CPU): shorter prompts are never cached."""


@pytest.fixture(scope="module")
def processor(tiny_model_dir):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(tiny_model_dir)


@pytest.fixture
def model(tiny_model_dir):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir).eval()


@pytest.fixture(scope="module")
def spec(tiny_model_dir):
    banned, stop = model_token_ids(tiny_model_dir)
    return SamplingSpec(n=2, temperature=1.0, max_tokens=10, banned_ids=banned, stop_ids=stop)


@pytest.fixture(scope="module")
def hf_engine(tiny_model_dir):
    return HFEngine(tiny_model_dir, Qwen3VLFamily())


def scorer(model, processor, spec):
    return lambda prompt, tokens: reference_logprobs(
        model, processor, prompt, tokens, spec.temperature, spec.banned_ids
    )


def perturb(model, part: str, scale: float = 0.5) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name and parameter.ndim > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * parameter.std())


def test_token_ids_of_the_tiny_model(tiny_model_dir, processor):
    vocabulary = processor.tokenizer.get_vocab()
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    banned, stop = model_token_ids(tiny_model_dir)
    assert set(banned) == {vocabulary[name] for name in names}
    assert set(stop) == {vocabulary["<|im_end|>"], vocabulary["<|endoftext|>"]}


@pytest.mark.parametrize("part", ["visual", "language_model"])
def test_engine_follows_perturbed_weights(
    part, vllm_engine, restore_engine_weights, model, processor, spec, tiny_model_dir
):
    prompts = [make_sample(processor, kind, question=LONG) for kind in ("video", "image")]
    requests = make_requests(prompts, spec)
    # The same prompts before the update: their features and keys are cached now.
    logprob_gate(vllm_engine, requests, scorer(model, processor, spec), 1e-5)
    perturb(model, part)
    with pytest.raises(RuntimeError, match=r"sample (video|image):0: engine and trainer disagree about token"):
        logprob_gate(vllm_engine, requests, scorer(model, processor, spec), 1e-5)
    sync = WeightSync(vllm_engine, Qwen3VLFamily().checkpoint_names(tiny_model_dir))
    report = sync.sync(1, model.named_parameters)
    assert report.num_tensors == len(list(model.named_parameters()))
    assert report.num_bytes == sum(p.numel() * 4 for p in model.parameters())
    gap = logprob_gate(vllm_engine, requests, scorer(model, processor, spec), 1e-5)
    assert gap.num_tokens >= 4
    assert sync.sync(1, model.named_parameters) is None


def test_stale_caches_are_what_the_reset_prevents(vllm_engine, restore_engine_weights, model, processor, spec):
    prompts = [make_sample(processor, "video", seed=5, question=LONG)]
    requests = make_requests(prompts, spec)
    dict(vllm_engine.generate(requests))
    perturb(model, "visual")
    # What update_weights would do without its reset of the prefix cache.
    vllm_engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(model.named_parameters())})
    vllm_engine.llm.llm_engine.reset_encoder_cache()
    vllm_engine.llm.llm_engine.reset_mm_cache()
    with pytest.raises(RuntimeError, match="disagree"):
        logprob_gate(vllm_engine, requests, scorer(model, processor, spec), 1e-5)
    vllm_engine.reset_caches()
    logprob_gate(vllm_engine, requests, scorer(model, processor, spec), 1e-5)


def test_hf_engine_follows_weights(tiny_model_dir, model, processor, spec):
    engine = HFEngine(tiny_model_dir, Qwen3VLFamily())
    perturb(model, "visual")
    engine.update_weights(model.named_parameters())
    logprob_gate(engine, make_requests([make_sample(processor, "video")], spec), scorer(model, processor, spec), 1e-5)
    with pytest.raises(RuntimeError, match=r"weights missing.*lm_head"):
        engine.update_weights((n, p) for n, p in model.named_parameters() if n != "lm_head.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("lm_head.weight"), r"weights missing in the engine.*lm_head.weight"),
        (lambda w: w.update(bogus=torch.zeros(1)), "weight bogus is not in the engine's checkpoint"),
        (lambda w: w.update({"lm_head.weight": torch.full((512, 64), float("nan"))}), "lm_head.weight holds NaN"),
    ],
)
def test_bad_weight_streams_are_refused(change, message, vllm_engine, restore_engine_weights, model, tiny_model_dir):
    weights = dict(model.named_parameters())
    change(weights)
    sync = WeightSync(vllm_engine, Qwen3VLFamily().checkpoint_names(tiny_model_dir))
    with pytest.raises(RuntimeError, match=message):
        sync.sync(1, weights.items)
    assert not sync.is_current(1)


def test_seeds_are_a_stable_function():
    # Values fixed here: a change of the hash would change every run.
    assert response_seed(0, 0, "a", 0) == 3740914843212505252
    seeds = {response_seed(s, t, u, k) for s in range(3) for t in range(8) for u in "abc" for k in range(16)}
    assert len(seeds) == 3 * 8 * 3 * 16
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("engine_name", ["vllm_engine", "hf_engine"])
def test_tokens_do_not_depend_on_batching(engine_name, request, processor, spec):
    engine = request.getfixturevalue(engine_name)
    prompts = [make_sample(processor, modality, seed=1) for modality in ("video", "text", "image")]
    requests = make_requests(prompts, spec)
    together = dict(engine.generate(requests))
    shuffled = requests[:]
    random.Random(0).shuffle(shuffled)
    again = dict(engine.generate(shuffled))
    alone = {}
    for one in requests:
        alone |= dict(engine.generate([one]))
    for key, response in together.items():
        assert response.token_ids.tolist() == again[key].token_ids.tolist() == alone[key].token_ids.tolist()
    # Same prompt, other seed: other tokens.
    assert together["0/0"].token_ids.tolist() != together["0/1"].token_ids.tolist()


@pytest.mark.parametrize("engine_name", ["vllm_engine", "hf_engine"])
def test_banned_tokens_never_appear(engine_name, request, processor, spec):
    """Ban all but three tokens: only they may come, and their probabilities add up to one."""
    engine = request.getfixturevalue(engine_name)
    allowed = {100, 200, 300}
    tight = dataclasses.replace(spec, n=8, stop_ids=(), banned_ids=tuple(set(range(512)) - allowed))
    responses = dict(engine.generate(make_requests([make_sample(processor, "text")], tight)))
    first: dict[int, float] = {}
    for response in responses.values():
        assert set(response.token_ids.tolist()) <= allowed
        first[int(response.token_ids[0])] = float(response.logprobs[0])
    if len(first) == 3:
        assert sum(np.exp(value) for value in first.values()) == pytest.approx(1.0, abs=1e-5)
    for response in responses.values():
        assert response.finish_reason == "length"
        assert len(response.token_ids) == tight.max_tokens


@pytest.mark.parametrize("engine_name", ["vllm_engine", "hf_engine"])
def test_stop_token_ends_a_response_and_is_kept(engine_name, request, processor, spec):
    """Every token stops: each response is one token long, whatever the tokenizer calls its end token."""
    engine = request.getfixturevalue(engine_name)
    stops = tuple(set(range(512)) - set(spec.banned_ids))
    responses = dict(
        engine.generate(make_requests([make_sample(processor, "text")], dataclasses.replace(spec, stop_ids=stops)))
    )
    assert [(len(r.token_ids), r.finish_reason) for r in responses.values()] == [(1, "stop")] * 2
    # No stop ids: not even the model's own end token ends it.
    end = processor.tokenizer.eos_token_id
    only_end = dataclasses.replace(spec, stop_ids=(), banned_ids=tuple(i for i in range(512) if i != end), max_tokens=3)
    responses = dict(engine.generate(make_requests([make_sample(processor, "text")], only_end)))
    assert [r.token_ids.tolist() for r in responses.values()] == [[end] * 3] * 2


def test_responses_leave_as_soon_as_they_are_finished(vllm_engine, processor, spec):
    """A short and a long response in one call: the short one arrives while the long one is still generating."""
    prompt = make_sample(processor, "video")
    short, long = make_requests([prompt], dataclasses.replace(spec, stop_ids=()))
    long = dataclasses.replace(long, sampling=dataclasses.replace(long.sampling, max_tokens=40))
    short = dataclasses.replace(short, sampling=dataclasses.replace(short.sampling, max_tokens=2))
    stream = vllm_engine.generate([long, short])
    assert next(stream)[0] == short.request_id
    assert vllm_engine.llm.llm_engine.has_unfinished_requests()
    assert [key for key, _ in stream] == [long.request_id]


def test_a_consumer_that_stops_leaves_an_idle_engine(vllm_engine, processor, spec):
    prompts = [make_sample(processor, "text", seed=i) for i in range(3)]
    stream = vllm_engine.generate(make_requests(prompts, spec))
    next(stream)
    stream.close()
    assert not vllm_engine.llm.llm_engine.has_unfinished_requests()
    assert len(dict(vllm_engine.generate(make_requests(prompts, spec)))) == 6


@pytest.mark.parametrize("engine_name", ["vllm_engine", "hf_engine"])
def test_wrong_prompts_are_named(engine_name, request, processor, spec):
    engine = request.getfixturevalue(engine_name)
    good = make_sample(processor, "video", uid="good")
    moved = dataclasses.replace(good, expanded_ids=(*good.expanded_ids[:5], 99, *good.expanded_ids[6:]))
    moved = dataclasses.replace(moved, sample=dataclasses.replace(good.sample, uid="moved"))
    with pytest.raises(RuntimeError, match=r"sample moved: the engine's prompt differs .* at token 5"):
        dict(engine.generate(make_requests([good, moved], spec)))
    no_frames = dataclasses.replace(good, videos=(), sample=dataclasses.replace(good.sample, uid="blind"))
    if engine_name == "vllm_engine":
        with pytest.raises(RuntimeError, match=r"sample blind"):
            dict(engine.generate(make_requests([no_frames], spec)))
    with pytest.raises(ValueError, match="not unique"):
        dict(engine.generate(make_requests([good], spec) * 2))
    # And the engine is still good for use.
    assert len(dict(engine.generate(make_requests([good], spec)))) == 2


def test_overlong_prompt_is_refused_not_truncated(vllm_engine, processor, spec):
    prompt = make_sample(processor, "text", question="word " * 2100)
    with pytest.raises(SampleError, match=r"sample text:0: prompt of .* exceeds max_model_len=2048"):
        dict(vllm_engine.generate(make_requests([prompt], spec)))


def test_building_and_using_the_engine_keeps_the_random_state(vllm_engine, processor, spec):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    dict(vllm_engine.generate(make_requests([make_sample(processor, "image")], spec)))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, [0, 1, 2, 3]), ({"top_k": 2}, [2, 3]), ({"top_p": 0.6}, [3]), ({"top_p": 0.65}, [2, 3])],
)
def test_processed_logprobs_by_hand(options, kept):
    """softmax of log([1, 2, 3, 10] / 16): the best token holds 0.625, the best two 0.8125."""
    logits = torch.tensor([1.0, 2.0, 3.0, 10.0]).log()
    weights = torch.tensor([1.0, 2.0, 3.0, 10.0])[kept]
    result = processed_logprobs(logits, 1.0, **options)
    assert torch.allclose(result[kept].exp(), weights / weights.sum(), atol=1e-6)
    assert all(result[i] == float("-inf") for i in range(4) if i not in kept)
    # Temperature 0.5 squares the weights: 9 and 100 of 109 when the first two are banned.
    cold = processed_logprobs(logits, 0.5, banned_ids=(0, 1))
    assert torch.allclose(cold[2:].exp(), torch.tensor([9 / 109, 100 / 109]), atol=1e-6)
