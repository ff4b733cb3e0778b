"""Two gloo ranks: no pair of modalities hangs, and loss and gradients equal one rank's."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import TINY_CORPUS
from policy_helpers import KINDS, GradientRecorder, context, load_processor, make_batch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_families import FAMILIES, build

from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.kl import KLPenalty
from lightning_modules.families.policy import PolicyModel
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.layouts.padded import PaddedLayout
from lightning_modules.update.updater import PolicyUpdater, UpdateSettings

FOUR = list(KINDS)
PAIRS = [{"name": f"{a}-{b}", "kinds": [a, b], "seed": 3} for a, b in itertools.product(KINDS, KINDS)]
SAME = [
    *({"name": f"fsdp-{layout}", "kinds": FOUR, "layout": layout} for layout in ("padded", "packed", "shared_prefix")),
    {"name": "fsdp-split", "kinds": FOUR, "budget": 100},
    {"name": "fsdp-padded-split", "kinds": FOUR, "budget": 100, "layout": "padded"},
    {"name": "fsdp-checkpointing", "kinds": FOUR, "checkpointing": True},
    {"name": "ddp", "kinds": FOUR, "strategy": "ddp", "budget": 100},
    # Three prompts: rank 0 has two, rank 1 one, so rank 1 runs dummies.
    {"name": "uneven", "kinds": ["video", "text", "image"], "budget": 1},
]
OTHER = [
    {"name": "no-work", "kinds": ["video", "text"], "lost_ranks": [1]},
    {"name": "nothing", "kinds": ["video", "text"], "lost_ranks": [0, 1]},
    {"name": "frozen", "kinds": ["text", "video"], "frozen": ["vision_tower", "merger"]},
    {"name": "several", "kinds": FOUR, "update_batch_size": 2},
    {"name": "kl", "kinds": FOUR, "kl": True},
    {"name": "poison", "kinds": FOUR, "poison_rank": 1},
    {"name": "kl-offload", "kinds": FOUR, "kl": True, "reference_offload": True},
    {"name": "stale", "kinds": FOUR, "gate_patience": 2, "stale_rank": 1},
    {"name": "stale-stop", "kinds": FOUR, "gate_patience": 1, "stale_rank": 1},
    {"name": "in-step", "kinds": FOUR, "gate_patience": 1, "stale_rank": None},
    {"name": "parts", "kinds": FOUR, "part_rank": 1},
    {
        "name": "filter",
        "kinds": FOUR,
        "update_batch_size": 2,
        "target": 3,
        "informative": [[[1, 1], [1, 1]], [[0, 0], [0, 1]]],
    },
]


@pytest.fixture(scope="module")
def two_ranks(tiny_model_dir, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("ranks")
    results = run_ranks(
        "policy_ranks",
        tmp,
        timeout_s=900,
        model=str(tiny_model_dir),
        family="lightning_modules.families.qwen3_vl.Qwen3VLFamily",
        cases=[*PAIRS, *SAME, *OTHER],
        folder=str(tmp),
    )
    return results, tmp


@pytest.fixture(scope="module")
def one_rank(tiny_model_dir):
    family = Qwen3VLFamily().open(str(tiny_model_dir))
    policy = PolicyModel(family.load(str(tiny_model_dir), torch.float32), family)
    processor = load_processor(tiny_model_dir)

    def run(case, drop=(), kl=False):
        penalty = KLPenalty(beta=0.1, kind="k2") if kl else None
        reference = PolicyModel(family.load(str(tiny_model_dir), torch.float32), family) if kl else None
        if reference is not None:
            for parameter in reference.parameters():
                parameter.data.mul_(1.01)
        settings = UpdateSettings(clip_norm=None)
        algorithm = GRPO(clip_high=0.28, kl=penalty)
        updater = PolicyUpdater(
            policy, algorithm, PaddedLayout(), context(family, processor), settings, reference=reference
        )
        batch = make_batch(processor, tuple(case["kinds"]), n=3, seed=case.get("seed", 7))
        for index in sorted(drop, reverse=True):
            del batch.groups[index], batch.scores[index]
        recorder = GradientRecorder(policy)
        _, bag = updater.run(batch, recorder)
        return bag.reduce(), recorder.recorded

    return run


def assert_same(two_ranks, name, want):
    results, folder = two_ranks
    metrics, gradients = want
    got = load_file(folder / f"{name}.safetensors")
    for key in (
        "losses/policy",
        "train/grad_norm",
        "policy/entropy",
        "reward/total",
        "tokens/response",
        "mismatch/kl",
        "mismatch/pearson",
    ):
        assert results[name][key] == pytest.approx(metrics[key], rel=1e-5, abs=1e-6), key
    a, b = (torch.cat([g[n].flatten() for n in gradients]) for g in (got, gradients))
    assert b.norm() > 1e-3
    assert float((a - b).norm() / b.norm()) < 1e-5


@pytest.mark.parametrize("case", [*PAIRS, *SAME], ids=lambda c: c["name"])
def test_two_ranks_equal_one(two_ranks, one_rank, case):
    assert_same(two_ranks, case["name"], one_rank(case))


def test_a_rank_without_work_runs_dummies_and_the_normaliser_shrinks(two_ranks, one_rank):
    assert_same(two_ranks, "no-work", one_rank(OTHER[0], drop=[1]))


def test_a_batch_lost_everywhere_makes_no_step(two_ranks):
    results, _ = two_ranks
    assert results["nothing"]["updates"] == 0
    assert results["nothing"]["train/skipped_empty"] == 1


def test_frozen_vision_tower_keeps_the_collectives_in_step(two_ranks, one_rank):
    results, folder = two_ranks
    got = load_file(folder / "frozen.safetensors")
    _, want = one_rank(OTHER[2])
    assert results["frozen"]["updates"] == 1
    assert got
    assert not any("visual" in name for name in got)
    a, b = (torch.cat([g[n].flatten() for n in got]) for g in (got, want))
    assert float((a - b).norm() / b.norm()) < 1e-5


def test_sharded_reference_gives_the_same_penalty(two_ranks, one_rank):
    results, _ = two_ranks
    metrics, _ = one_rank(OTHER[4], kl=True)
    assert metrics["policy/kl_ref"] > 1e-6
    assert results["kl"]["policy/kl_ref"] == pytest.approx(metrics["policy/kl_ref"], rel=1e-4)
    assert_same(two_ranks, "kl", one_rank(OTHER[4], kl=True))
    assert_same(two_ranks, "kl-offload", one_rank(OTHER[4], kl=True))


def test_an_engine_that_disagrees_on_one_rank_stops_the_optimizer_on_all(two_ranks):
    """Rank 0 writes these results; the samples of rank 1 alone are off."""
    results, folder = two_ranks
    assert results["stale"]["updates"] == 0
    assert results["stale"]["train/skipped_mismatch"] == 1
    assert "engine and trainer disagree: mismatch/kl" in results["stale-stop"]["error"]
    assert results["in-step"]["updates"] == 1
    assert not [name for name in ("stale", "stale-stop") if (folder / f"{name}.safetensors").exists()]


def test_a_non_finite_loss_on_one_rank_skips_the_update_on_all(two_ranks):
    assert two_ranks[0]["poison"]["updates"] == 0
    assert two_ranks[0]["poison"]["train/skipped_nonfinite"] == 1


def test_a_reward_part_of_one_ranks_tasks_stops_nobody(two_ranks, tiny_model_dir):
    """GDPO weights a part that only rank 1's task has; its mean is over the responses that have it."""
    scores = make_batch(load_processor(tiny_model_dir), tuple(FOUR), n=3, seed=7).scores
    values = [score.total for index in (1, 3) for score in scores[index]]
    assert two_ranks[0]["parts"]["updates"] == 1
    assert two_ranks[0]["parts"]["reward/tiou"] == pytest.approx(sum(values) / 6)


def test_several_updates_happen_on_every_rank(two_ranks):
    assert two_ranks[0]["several"]["updates"] == 2
    assert two_ranks[0]["several"]["policy/first_ratio_error"] < 1e-5


def test_dynamic_sampling_fills_over_all_ranks(two_ranks):
    """Four groups of rank 0 and one of rank 1 after two rounds; the target of three takes two and one."""
    metrics = two_ranks[0]["filter"]
    wanted = {"rounds": 2, "prompts": 8, "kept_fraction": 5 / 8, "dropped": 2, "accuracy": 5 / 24}
    assert {name: metrics[f"dynamic_sampling/{name}"] for name in wanted} == pytest.approx(wanted)
    assert (metrics["groups/trained"], metrics["groups/zero_variance"]) == (3, 0)
    assert metrics["updates"] == 2, "three groups in updates of two, on both ranks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_5", "glm4v"])
def test_every_family_runs_all_pairs_on_two_ranks(name, tmp_path):
    """No pair of modalities hangs, forward and backward, and the layouts agree."""
    model = build(name, tmp_path / name, TINY_CORPUS)
    size = 64 if name == "qwen3_5" else 56
    cases = [{**case, "size": size} for case in (*PAIRS, *SAME[:4])]
    results = run_ranks(
        "policy_ranks",
        tmp_path,
        timeout_s=900,
        model=str(model),
        family=FAMILIES[name],
        cases=cases,
        folder=str(tmp_path),
    )
    assert all(results[case["name"]]["updates"] == 1 for case in cases)
    vectors = {case["name"]: load_file(tmp_path / f"{case['name']}.safetensors") for case in SAME[:4]}
    want = torch.cat([g.flatten() for g in vectors["fsdp-padded"].values()])
    for other in ("fsdp-packed", "fsdp-shared_prefix", "fsdp-split"):
        got = torch.cat([vectors[other][n].flatten() for n in vectors["fsdp-padded"]])
        assert float((got - want).norm() / want.norm()) < 1e-5, other
