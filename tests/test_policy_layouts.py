"""Layouts are exact: same log-probs, loss and gradients for every layout and every split into micro-batches."""

from __future__ import annotations

import functools

import pytest
import torch
from policy_helpers import KINDS, context, load_processor, make_batch, make_group, prepared_sample

from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.core.attention import AttentionPlan, Segment, segmented_attention
from lightning_modules.families.policy import PolicyModel
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.layouts.base import Piece
from lightning_modules.layouts.packed import PackedLayout
from lightning_modules.layouts.padded import PaddedLayout
from lightning_modules.layouts.shared_prefix import SharedPrefixLayout
from lightning_modules.update.planning import plan_micro_batches
from lightning_modules.update.updater import PolicyUpdater, UpdateSettings

LAYOUTS = (PaddedLayout, PackedLayout, SharedPrefixLayout)


@pytest.fixture(scope="module")
def parts(tiny_model_dir):
    family = Qwen3VLFamily().open(str(tiny_model_dir))
    policy = PolicyModel(family.load(str(tiny_model_dir), torch.float32), family)
    processor = load_processor(tiny_model_dir)
    return family, policy, processor


def loss_and_gradients(parts, layout, budget, kinds=KINDS):
    """Gradient of one GRPO update and its loss, without the optimizer's step."""
    family, policy, processor = parts
    batch = make_batch(processor, kinds, n=3, seed=7)
    settings = UpdateSettings(micro_batch_tokens=budget, clip_norm=None)
    updater = PolicyUpdater(policy, GRPO(clip_high=0.28), layout, context(family, processor), settings)
    policy.zero_grad()
    gradients = {}

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            gradients.update({name: p.grad.clone() for name, p in policy.named_parameters()})

    updates, bag = updater.run(batch, Recorder(policy.parameters(), lr=0.0))
    assert updates == 1
    return bag.reduce(), gradients


@functools.cache
def _reference(parts, kinds):
    return loss_and_gradients(parts, PaddedLayout(), 10**9, kinds)


def relative(a, b):
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


@pytest.mark.parametrize("kinds", [("text",), ("image",), ("video",), ("mixed",), KINDS], ids="+".join)
@pytest.mark.parametrize("budget", [10**9, 150, 1])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda c: c.name)
def test_loss_and_gradients_do_not_depend_on_layout_or_split(parts, layout, budget, kinds):
    want, want_grads = _reference(parts, kinds)
    got, got_grads = loss_and_gradients(parts, layout(), budget, kinds)
    assert got["losses/policy"] == pytest.approx(want["losses/policy"], rel=1e-5, abs=1e-7)
    assert got["policy/entropy"] == pytest.approx(want["policy/entropy"], rel=1e-5)
    assert set(got_grads) == set(want_grads)
    everything = torch.cat([g.flatten() for g in got_grads.values()])
    expected = torch.cat([want_grads[name].flatten() for name in got_grads])
    assert expected.norm() > 1e-3, "the comparison needs a gradient"
    assert relative(everything, expected) < 1e-5
    for name, gradient in got_grads.items():
        floor = 1e-6 * float(expected.norm())
        assert float((gradient - want_grads[name]).norm()) < 2e-5 * float(want_grads[name].norm()) + floor, name


def test_gradient_checkpointing_changes_nothing(parts, tiny_model_dir):
    family, _, processor = parts
    model = family.load(str(tiny_model_dir), torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = PolicyModel(model, family).train()
    _, got = loss_and_gradients((family, policy, processor), SharedPrefixLayout(), 10**9)
    _, want = _reference(parts, KINDS)
    assert relative(*(torch.cat([g.flatten() for g in (d[n] for n in want)]) for d in (got, want))) < 1e-5


def plan_of_three() -> AttentionPlan:
    return AttentionPlan((Segment(0, 5, (2, 1, 3)), Segment(11, 4), Segment(15, 3, (4,))))


def qkv(length, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, 4, length, 8), (1, 2, length, 8), (1, 2, length, 8))
    return [torch.randn(*s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes]


def dense_mask(plan: AttentionPlan) -> torch.Tensor:
    """Bool [1, 1, L, L]: the definition that the fast paths are tested against."""
    mask = torch.zeros(plan.length, plan.length, dtype=torch.bool)
    for segment in plan.segments:
        column = segment.start + segment.prompt
        mask[segment.start : segment.end, segment.start : column] = True
        for length in segment.responses:
            mask[column : column + length, column : column + length] = True
            column += length
    return mask.tril()[None, None]


def test_segmented_attention_equals_the_dense_mask_with_gradients():
    plan = plan_of_three()
    query, key, value = qkv(plan.length)
    module = torch.nn.Identity()
    out, _ = segmented_attention(module, query, key, value, None, scaling=0.3, attention_plan=plan)
    mask = dense_mask(plan)
    keys, values = (t.repeat_interleave(2, dim=1) for t in (key, value))
    scores = (query @ keys.transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf)
    want = (scores.softmax(-1) @ values).transpose(1, 2)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(out.sin().sum(), (query, key, value)),
        torch.autograd.grad(want.sin().sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_dense_mask_by_hand():
    # Columns: prompt p0 p1, response a (1 token), response b (2 tokens).
    mask = dense_mask(AttentionPlan((Segment(0, 2, (1, 2)),)))[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_flex_block_mask_means_the_same():
    from torch.nn.attention.flex_attention import create_mask, flex_attention

    plan = plan_of_three()
    device = torch.device("cpu")
    block = plan.block_mask(device)
    dense = create_mask(block.mask_mod, None, None, plan.length, plan.length, device=device)
    assert torch.equal(dense, dense_mask(plan))
    query, key, value = (t.detach() for t in qkv(plan.length, torch.float32))
    out = flex_attention(query, key, value, block_mask=block, scale=0.3, enable_gqa=True)
    want, _ = segmented_attention(torch.nn.Identity(), query, key, value, None, scaling=0.3, attention_plan=plan)
    torch.testing.assert_close(out.transpose(1, 2), want, rtol=1e-5, atol=1e-6)


def test_gapped_segments_are_refused():
    with pytest.raises(ValueError, match="adjacent"):
        AttentionPlan((Segment(0, 3), Segment(4, 2)))


def pieces_of(processor, lengths, prompt_kind="text"):
    sample = prepared_sample(processor, "plan", prompt_kind)
    group = make_group(sample, 0, n=len(lengths), lengths=lengths)
    return group, [Piece(0, group, (i,)) for i in range(len(lengths))]


def test_shared_prefix_splits_a_group_over_the_budget_by_responses(parts, caplog):
    _, _, processor = parts
    group, _ = pieces_of(processor, (10, 10, 10, 10, 10))
    prompt = len(group.prompt.expanded_ids)
    layout = SharedPrefixLayout()
    pieces = layout.pieces([group], [(0, range(5))], prompt + 25)
    assert pieces == layout.pieces([group], [(0, range(5))], prompt + 25)
    assert len([r for r in caplog.records if "runs in 3 parts" in r.message]) == 1
    assert [p.responses for p in pieces] == [(0, 1), (2, 3), (4,)]
    assert all(p.tokens <= prompt + 25 for p in pieces)


def test_plan_fits_the_budget_balances_cost_and_reaches_the_asked_count(parts):
    _, _, processor = parts
    group, pieces = pieces_of(processor, (40, 30, 20, 10, 5, 5))
    prompt = len(group.prompt.expanded_ids)
    layout = PackedLayout()
    budget = 3 * prompt + 56
    plan = plan_micro_batches(pieces, layout, budget)
    assert sorted(p.responses[0] for part in plan for p in part) == list(range(6))
    assert all(layout.row_tokens(part) <= budget for part in plan)
    assert len(plan) == 2
    sums = [sum(p.response_lengths[0] for p in part) for part in plan]
    assert sorted(sums) == [55, 55]
    assert [len(part) for part in plan_micro_batches(pieces, layout, budget, min_count=8)] == [1] * 6 + [0, 0]
    # Dear ones first, so that the ranks' dear ones run at the same time; dummies last.
    lengths = [
        part[0].response_lengths[0] for part in plan_micro_batches(pieces[::-1], layout, budget, min_count=8)[:6]
    ]
    assert lengths == [40, 30, 20, 10, 5, 5]
    assert plan_micro_batches([], layout, budget, min_count=3) == [[], [], []]
    assert len(plan_micro_batches(pieces, layout, 1)) == 6


def test_padded_budget_counts_padding(parts):
    _, _, processor = parts
    group, pieces = pieces_of(processor, (30, 1, 1, 1))
    longest = len(group.prompt.expanded_ids) + 30
    assert PaddedLayout().row_tokens(pieces) == 4 * longest
    plan = plan_micro_batches(pieces, PaddedLayout(), 2 * longest)
    assert sorted(len(p) for p in plan) == [1, 3]


def test_placeholder_in_a_response_names_the_sample(parts):
    family, _, processor = parts
    group = make_group(prepared_sample(processor, "evil:3", "text"), 0, n=1)
    group.responses[0].token_ids[0] = family.video_token_id
    layout = PackedLayout()
    with pytest.raises(ValueError, match=r"evil:3: response 0 holds vision placeholder"):
        layout.collate(layout.pieces([group], [(0, (0,))], 999), context(family, processor))


def test_layout_that_a_family_does_not_have_is_refused(parts):
    family, policy, processor = parts

    class Other(PaddedLayout):
        name = "spiral"

    with pytest.raises(ValueError, match="layout=spiral is not available for qwen3_vl"):
        PolicyUpdater(policy, GRPO(), Other(), context(family, processor), UpdateSettings())
