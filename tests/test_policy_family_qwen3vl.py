"""Qwen3-VL as a family: empty model, positions, merged vision call, names."""

from __future__ import annotations

import pytest
import torch
from policy_helpers import KINDS, context, load_processor, make_group, prepared_sample

from lightning_modules.families.policy import PolicyModel
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.layouts.base import dummy_micro_batch
from lightning_modules.layouts.padded import PaddedLayout


@pytest.fixture(scope="module")
def family(tiny_model_dir):
    return Qwen3VLFamily().open(str(tiny_model_dir))


@pytest.fixture(scope="module")
def processor(tiny_model_dir):
    return load_processor(tiny_model_dir)


@pytest.fixture(scope="module")
def policy(family, tiny_model_dir):
    return PolicyModel(family.load(str(tiny_model_dir), torch.float32), family)


def hf_logprobs(tiny_model_dir, processor, sample, response, temperature=1.0, banned=()):
    """The plain way: one sequence through transformers, full logits, log-softmax."""
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(tiny_model_dir, dtype=torch.float32)
    ids = torch.tensor([[*sample.expanded_ids, *response.token_ids.tolist()]])
    kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    media = {}
    if sample.images:
        media |= processor.image_processor(
            images=[i.pixels for i in sample.images], do_resize=False, return_tensors="pt"
        )
    if sample.videos:
        media |= processor.video_processor(
            videos=[torch.tensor(v.frames) for v in sample.videos],
            do_resize=False,
            do_sample_frames=False,
            return_tensors="pt",
        )
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds if media else None, **media).logits[0] / temperature
    logits[:, list(banned)] = -torch.inf
    logp = logits.log_softmax(-1)
    n = len(response.token_ids)
    return logp[-n - 1 : -1].gather(1, ids[0, -n:, None]).squeeze(1)


def test_empty_model_has_meta_parameters_and_the_buffers_of_a_loaded_one(family, tiny_model_dir):
    empty = family.empty(str(tiny_model_dir), torch.float32)
    loaded = family.load(str(tiny_model_dir), torch.float32)
    assert all(p.is_meta for p in empty.parameters())
    assert [n for n, _ in empty.named_parameters()] == [n for n, _ in loaded.named_parameters()]
    buffers, expected = dict(empty.named_buffers()), dict(loaded.named_buffers())
    assert set(buffers) == set(expected)
    assert expected, "rotary frequencies are buffers"
    for name, value in expected.items():
        assert torch.equal(buffers[name], value), name


def test_empty_tied_model_keeps_one_matrix(tmp_path):
    from conftest import TINY_CORPUS

    from datamodules.demo.tiny_model import build_tiny_model

    path = str(build_tiny_model(tmp_path / "tied", TINY_CORPUS, tie_word_embeddings=True))
    family = Qwen3VLFamily()
    model = family.empty(path, torch.float32)
    assert family.tied
    assert family.output_weight(model) is model.get_input_embeddings().weight
    names = [name for name, _ in PolicyModel(family.load(path, torch.float32), family).checkpoint_weights()]
    assert "lm_head.weight" not in names
    assert "model.language_model.embed_tokens.weight" in names


@pytest.mark.parametrize("kind", [*KINDS, "two_videos"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_plain_transformers(policy, family, processor, tiny_model_dir, kind, temperature):
    sample = prepared_sample(processor, f"p:{kind}", kind, seed=3)
    group = make_group(sample, 0, n=2, seed=5)
    layout = PaddedLayout()
    pieces = layout.pieces([group], [(0, (0, 1))], 10_000)
    batch = layout.collate(pieces, context(family, processor))
    with torch.no_grad():
        out = policy(batch, temperature, family.banned_ids, with_entropy=True)
    expected = torch.cat(
        [hf_logprobs(tiny_model_dir, processor, sample, r, temperature, family.banned_ids) for r in group.responses]
    )
    torch.testing.assert_close(out.logprobs, expected, rtol=1e-5, atol=1e-5)


def test_positions_at_non_integer_fps_follow_the_hand_made_table(family, processor):
    # 4 frames of 64x64: two temporal patches of 4x4 patches -> 2x2 merged tokens each, each after a text timestamp.
    sample = prepared_sample(processor, "fps", "video", frames=4, fps=1.7)
    ids = torch.tensor(sample.expanded_ids)
    positions = family.positions(ids, [], [sample.videos[0].grid])
    visual = (ids == family.video_token_id).nonzero().squeeze(1).tolist()
    assert len(visual) == 8
    expected = torch.zeros(3, len(ids), dtype=torch.int64)
    position = 0
    column = 0
    while column < len(ids):
        if column in visual:
            for offset, (row, col) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
                expected[:, column + offset] = torch.tensor([position, position + row, position + col])
            position += 2
            column += 4
        else:
            expected[:, column] = position
            position += 1
            column += 1
    assert torch.equal(positions, expected)


def test_text_only_batch_runs_the_vision_tower_with_weight_zero(policy, family, processor):
    batch = dummy_micro_batch(context(family, processor))
    policy.zero_grad()
    out = policy(batch)
    out.logprobs.sum().backward()
    grads = {name: p.grad for name, p in policy.named_parameters()}
    assert all(g is not None for g in grads.values()), [n for n, g in grads.items() if g is None]
    assert all(torch.count_nonzero(g) == 0 for n, g in grads.items() if "visual" in n)
    policy.zero_grad()


def test_placeholder_mismatch_names_the_sample(family, processor):
    import dataclasses

    sample = prepared_sample(processor, "odd:7", "video")
    layout = PaddedLayout()
    place = sample.expanded_ids.index(family.video_token_id)
    for ids, found in (
        ((*sample.expanded_ids[:place], 30, *sample.expanded_ids[place + 1 :]), 7),
        (tuple(t for t in sample.expanded_ids if t != family.video_token_id), 0),
        ((*sample.expanded_ids, family.video_token_id), 9),
    ):
        group = make_group(dataclasses.replace(sample, expanded_ids=ids), 0, n=1)
        with pytest.raises(ValueError, match=rf"odd:7.*{found} video placeholder.*8"):
            layout.collate(layout.pieces([group], [(0, (0,))], 9999), context(family, processor))


def test_parts_and_units(policy, family):
    parts = {family.part_of(name) for name, _ in policy.named_parameters()}
    assert parts == {"vision_tower", "merger", "language_model"}
    assert family.part_of("hf.model.visual.deepstack_merger_list.0.norm.weight") == "merger"
    units = family.sharding_units(policy)
    assert units[-1] is policy
    assert len(units) == 2 + 2 + 1


def test_wrong_family_is_said_at_once(tmp_path):
    from transformers import Qwen2VLConfig

    Qwen2VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'qwen2_vl'.*'qwen3_vl'"):
        Qwen3VLFamily().open(str(tmp_path))


def test_swapped_video_changes_the_logprobs(policy, family, processor):
    layout = PaddedLayout()
    outputs = []
    for seed in (1, 2):
        group = make_group(prepared_sample(processor, "canary", "video", seed=seed), 0, n=1, lengths=(6,))
        batch = layout.collate(layout.pieces([group], [(0, (0,))], 9999), context(family, processor))
        with torch.no_grad():
            outputs.append(policy(batch).logprobs)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2
