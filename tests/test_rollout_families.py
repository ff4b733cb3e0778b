"""Parity of engine ids and log-probs for the other model families, and where text continues after a video."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import TINY_CORPUS
from rollout_helpers import MODALITIES, logprob_gate, make_requests, make_sample, model_token_ids, reference_logprobs
from tiny_families import BUILDERS, FAMILIES, build, family_of

from lightning_modules.families.positions import chain_positions
from rollout.engines.hf import HFEngine
from rollout.engines.vllm import VLLMEngine
from rollout.types import SamplingSpec
from rollout.weight_sync import WeightSync

BOUND = {"glm4v": 3e-5, "qwen3_5": 3e-5}
"""Largest difference of log-probs in float32 where it is not 1e-5: sharper random weights amplify rounding."""
BFLOAT16_BOUND = 0.25
"""vLLM's CPU kernels for linear attention are bfloat16 only; log-probs of the test model spread by about 0.9."""
LIMITS = {
    ("glm4v", "two videos"): "At most 1 video",  # vLLM's limit for this model
    ("glm4v", "image and video"): "Image features and image tokens do not match",  # transformers' own forward
}


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_5", "glm4v"])
def family(request, tmp_path_factory, vllm_engine):
    """(name, folder, processor, model, vLLM engine, transformers engine) of one family."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    name = request.param
    folder = tmp_path_factory.mktemp(name)
    build_qwen3_5(folder) if name == "qwen3_5" else build(name, folder, TINY_CORPUS)
    engine = VLLMEngine(
        folder,
        family_of(name),
        dtype="bfloat16" if name == "qwen3_5" else "float32",
        max_model_len=1024,
        max_num_seqs=16,
        limit_images=2,
        limit_videos=2,
        enforce_eager=True,
    )
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    yield name, folder, AutoProcessor.from_pretrained(folder), model, engine, HFEngine(folder, family_of(name))
    engine.close()


def build_qwen3_5(folder) -> None:
    """The tiny Qwen3.5 with the head sizes that vLLM's CPU kernels need."""
    from transformers import Qwen3_5ForConditionalGeneration

    from datamodules.demo.tiny_model import train_tokenizer

    torch.manual_seed(0)
    small, processor = BUILDERS["qwen3_5"](train_tokenizer(TINY_CORPUS))
    small.config.text_config.linear_key_head_dim = small.config.text_config.linear_value_head_dim = 128
    model = Qwen3_5ForConditionalGeneration(small.config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)


def gate(family, engine, modality):
    name, folder, processor, model, *_ = family
    banned, stop = model_token_ids(folder, family_of(name))
    spec = SamplingSpec(n=2, max_tokens=8, banned_ids=banned, stop_ids=stop)
    return logprob_gate(
        engine,
        make_requests([make_sample(processor, modality)], spec),
        lambda prompt, tokens: reference_logprobs(model, processor, prompt, tokens, 1.0, banned),
        BFLOAT16_BOUND if name == "qwen3_5" and isinstance(engine, VLLMEngine) else BOUND.get(name, 1e-5),
    )


@pytest.mark.parametrize("modality", MODALITIES)
def test_ids_and_logprobs_equal_the_models(family, modality):
    name, *_, engine, hf_engine = family
    if (name, modality) in LIMITS:
        with pytest.raises((RuntimeError, ValueError), match=LIMITS[name, modality]):
            gate(family, engine, modality)
        return
    assert gate(family, engine, modality).num_tokens > 0
    assert gate(family, hf_engine, modality).num_tokens > 0


def test_weights_follow_under_checkpoint_names(family):
    name, folder, _, model, *engines = family
    checkpoint_name = family_of(name).to_checkpoint_name
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5 * parameter.std())
    for engine in engines:
        with pytest.raises(RuntimeError, match="disagree about token"):
            gate(family, engine, "video")
        WeightSync(engine, family_of(name).checkpoint_names(folder)).sync(
            1, lambda: ((checkpoint_name(n), p) for n, p in model.named_parameters())
        )
        gate(family, engine, "video")


def test_text_continues_after_the_longest_axis():
    """Two text tokens, a video of 4 x 2 x 3 merged patches, two text tokens; transformers' rule as the input."""
    patches = torch.from_numpy(np.indices((4, 2, 3)).reshape(3, -1))
    text = torch.arange(2).expand(3, -1)
    transformers_rule = torch.cat([text, patches + 2, text + 2 + 3], dim=1)
    kinds = torch.tensor([0, 0] + [2] * 24 + [0, 0])
    chained = chain_positions(transformers_rule, kinds)
    assert chained[:, :26].tolist() == transformers_rule[:, :26].tolist()
    assert chained[:, 26:].tolist() == [[6, 7]] * 3
    # An image is wider than it is long in time: nothing changes.
    image = torch.from_numpy(np.indices((1, 2, 3)).reshape(3, -1))
    positions = torch.cat([text, image + 2, text + 2 + 3], dim=1)
    assert chain_positions(positions, torch.tensor([0, 0] + [1] * 6 + [0, 0])).tolist() == positions.tolist()


def test_seconds_per_grid_come_from_the_metadata():
    """8 and 29.97 fps, every fourth frame, two frames per patch: 8/8 and 8/29.97 s; only where they matter."""
    from transformers import Qwen2_5_VLConfig

    rates = [8 / 4, 29.97 / 4]
    family = family_of("qwen2_5_vl")
    family._config = Qwen2_5_VLConfig()
    assert family.seconds_per_grid(rates) == pytest.approx([1.0, 8 / 29.97])
    assert all(family_of(name).seconds_per_grid(rates) == [] for name in FAMILIES if name != "qwen2_5_vl")
