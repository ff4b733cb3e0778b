"""Every family: log-probs equal plain transformers, layouts are exact, names round-trip, positions measure time."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import TINY_CORPUS
from policy_helpers import KINDS, GradientRecorder, context, load_processor, make_batch, make_group, prepared_sample
from tiny_families import BUILDERS, build, family_of

from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.families.policy import PolicyModel
from lightning_modules.layouts.packed import PackedLayout
from lightning_modules.layouts.padded import PaddedLayout
from lightning_modules.layouts.shared_prefix import SharedPrefixLayout
from lightning_modules.update.updater import PolicyUpdater, UpdateSettings


@pytest.fixture(scope="module", params=sorted(BUILDERS))
def parts(request, tmp_path_factory):
    folder = build(request.param, tmp_path_factory.mktemp(request.param), TINY_CORPUS)
    family = family_of(request.param).open(str(folder))
    policy = PolicyModel(family.load(str(folder), torch.float32), family)
    return family, policy, load_processor(folder), folder


SIZE = {"qwen2_vl": 56, "qwen2_5_vl": 56, "glm4v": 56}


def sample_of(family, processor, kind, seed=3, **more):
    return prepared_sample(processor, f"{family.name}:{kind}", kind, seed=seed, size=SIZE.get(family.name, 64), **more)


def plain_logprobs(family, folder, processor, sample, response):
    """One sequence through transformers' own forward, positions included."""
    model = family.model_class.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*sample.expanded_ids, *response.token_ids.tolist()]])
    kinds = family.media_kinds(ids)
    media = {}
    if sample.images:
        media |= processor.image_processor(
            images=[i.pixels for i in sample.images], do_resize=False, return_tensors="pt"
        )
    if sample.videos:
        out = processor.video_processor(
            videos=[torch.tensor(v.frames) for v in sample.videos],
            do_resize=False,
            do_sample_frames=False,
            return_tensors="pt",
        )
        media |= {k: out[k] for k in ("pixel_values_videos", "video_grid_thw")}
        if family.name == "qwen2_5_vl":
            media["second_per_grid_ts"] = torch.tensor([2 / v.metadata.sampled_fps for v in sample.videos])
    n = len(response.token_ids)
    prompt = family.positions(
        ids[0, :-n],
        [i.grid for i in sample.images],
        [v.grid for v in sample.videos],
        [v.metadata.sampled_fps for v in sample.videos],
    )
    # Given explicitly: transformers lets text after a long video reuse the video's positions (tested by hand below).
    positions = torch.cat([prompt, (prompt.max() + 1 + torch.arange(n)).expand(3, -1)], dim=1)[:, None]
    with torch.no_grad():
        out = model(input_ids=ids, mm_token_type_ids=kinds if media else None, position_ids=positions, **media)
    logits = out.logits[0]
    return logits.log_softmax(-1)[-n - 1 : -1].gather(1, ids[0, -n:, None]).squeeze(1)


@pytest.mark.parametrize("kind", [*KINDS, "two_videos"])
def test_logprobs_equal_plain_transformers(parts, kind):
    family, policy, processor, folder = parts
    sample = sample_of(family, processor, kind, fps=1.7)
    group = make_group(sample, 0, n=2, seed=5)
    layout = SharedPrefixLayout()
    batch = layout.collate(layout.pieces([group], [(0, (0, 1))], 10_000), context(family, processor))
    with torch.no_grad():
        got = policy(batch).logprobs
    if (family.name, kind) == ("glm4v", "mixed"):
        # transformers' own forward takes every placeholder for an image's; the family tells them apart.
        with pytest.raises(ValueError, match="Image features and image tokens do not match"):
            plain_logprobs(family, folder, processor, sample, group.responses[0])
        return
    want = torch.cat([plain_logprobs(family, folder, processor, sample, r) for r in group.responses])
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def gradients(parts, layout, budget):
    family, policy, processor, _ = parts
    batch = make_batch(processor, KINDS, n=3, seed=7, size=SIZE.get(family.name, 64))
    settings = UpdateSettings(micro_batch_tokens=budget, clip_norm=None)
    updater = PolicyUpdater(policy, GRPO(), layout, context(family, processor), settings)
    policy.zero_grad()
    recorder = GradientRecorder(policy)
    _, bag = updater.run(batch, recorder)
    metrics = bag.reduce()
    return metrics, torch.cat([g.flatten() for g in recorder.recorded.values()])


def test_layouts_and_splits_are_exact(parts):
    want, expected = gradients(parts, PaddedLayout(), 1)
    assert expected.norm() > 1e-3
    for layout, budget in itertools.product((PaddedLayout(), PackedLayout(), SharedPrefixLayout()), (10**9, 150)):
        got, found = gradients(parts, layout, budget)
        assert got["losses/policy"] == pytest.approx(want["losses/policy"], rel=1e-5, abs=1e-6)
        assert got["policy/entropy"] == pytest.approx(want["policy/entropy"], rel=1e-5)
        assert float((found - expected).norm() / expected.norm()) < 1e-5, (layout.name, budget)


def test_names_of_checkpoint_round_trip(parts):
    from safetensors.torch import load_file

    family, policy, _, folder = parts
    saved = load_file(folder / "model.safetensors")
    streamed = dict(policy.checkpoint_weights())
    assert set(streamed) == set(saved)
    assert all(torch.equal(streamed[name], saved[name]) for name in saved)
    assert {family.part_of(name) for name, _ in policy.named_parameters()} == {
        "vision_tower",
        "merger",
        "language_model",
    }


def test_empty_model_is_filled_without_a_difference(parts):
    family, policy, _, folder = parts
    empty = family.empty(str(folder), torch.float32)
    assert all(p.is_meta for p in empty.parameters())
    expected = dict(policy.hf.named_buffers())
    for name, buffer in empty.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert len(family.sharding_units(policy)) == len(set(map(id, family.sharding_units(policy))))


def test_swapped_video_and_perturbed_tower_change_the_logprobs(parts):
    family, policy, processor, _ = parts
    layout = SharedPrefixLayout()

    def logprobs(seed):
        group = make_group(sample_of(family, processor, "video", seed=seed), 0, n=1, lengths=(6,))
        batch = layout.collate(layout.pieces([group], [(0, (0,))], 9999), context(family, processor))
        with torch.no_grad():
            return policy(batch).logprobs

    first = logprobs(1)
    assert (first - logprobs(2)).abs().max() > 1e-3
    weight = next(p for n, p in policy.named_parameters() if "visual.blocks.1" in n and p.ndim >= 2)
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.add_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    assert (first - logprobs(1)).abs().max() > 1e-3
    with torch.no_grad():
        weight.copy_(saved)


def test_qwen2_5_positions_measure_time(tmp_path):
    folder = build("qwen2_5_vl", tmp_path, TINY_CORPUS)
    family = family_of("qwen2_5_vl").open(str(folder))
    video = family.video_token_id
    # Two text tokens, three temporal patches of one merged token each, one text token; 1.6 frames/s, two per patch.
    ids = torch.tensor([40, 41, video, video, video, 42])
    positions = family.positions(ids, [], [(3, 2, 2)], [1.6])
    # Seconds per patch 2 / 1.6 = 1.25, 2 tokens per second: steps of 2.5 positions, rounded down: 0, 2, 5.
    # Text goes on behind the largest position (transformers alone would say 3).
    assert positions.tolist() == [[0, 1, 2, 4, 7, 8], [0, 1, 2, 2, 2, 8], [0, 1, 2, 2, 2, 8]]
