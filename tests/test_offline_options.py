"""Clip schedule, curriculum by pass rate and dense shaping on the demo: each changes what it says, nothing else."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from policy_helpers import load_processor, make_batch
from test_policy_grpo import token_batch
from test_policy_update import make_module
from train_helpers import run

from datamodules.demo.cold_start import build_cold_start_dataset
from datamodules.sampling import positions
from eval.heldout import EvalRecord
from lightning_modules.launch.config import ConfigError, build, compose
from rewards.tasks.temporal_grounding import TemporalGrounding
from scripts.filter_by_pass_rate import kept_records, named_records, pass_rates

RIGHT = "<answer>[1, 2]</answer>"


def test_the_clip_range_moves_with_the_step(tiny_model_dir):
    algorithm = build(compose("train", ["experiment=tiny_cpu", "algorithm=clip_schedule"]).algorithm)
    batch = token_batch([0.3], [0.0], [1.0], [0])  # ratio 1.35
    losses = []
    for step in (0, 50, 100, 1000):
        algorithm.begin_step(step)
        losses.append(float(algorithm.token_loss(batch).loss))
    assert losses == pytest.approx([-1.2, -1.3, -1.3498588, -1.3498588]), "the bound goes 1.2, 1.3, 1.4"
    # Two updates per batch, so that the second meets the clip; what held is in the step's metrics.
    module = make_module(tiny_model_dir, algorithm, lr=0.05, update_batch_size=2)
    optimizer = module.configure_optimizers()["optimizer"]
    fractions = []
    for step, want in ((0, 0.2), (100, 0.4)):
        batch = make_batch(load_processor(tiny_model_dir), ("text",) * 4, seed=3)
        batch.rl_step = step
        module.update(batch, optimizer)
        fractions.append(module.step_metrics["policy/clip_high"])
        assert module.step_metrics["clip/high"] == pytest.approx(want)
        assert module.step_metrics["clip/low"] == pytest.approx(0.2)
    assert fractions[0] > 0, "with these steps the clip is not inert"
    fixed = build(compose("train", ["experiment=tiny_cpu"]).algorithm)
    assert fixed.scalars() == {}


def cold_config(folder, *overrides: str):
    return compose(
        "train",
        ["experiment=tiny_cpu", f"data.train_files=[{folder}/cold_train.jsonl]", "data.val_files=[]",
         f"data.media_root={folder}", "data.cache_dir=null", "data.filter_overlong=false", *overrides],
    )  # fmt: skip


def test_a_curriculum_goes_from_high_to_low_pass_rates(tmp_path):
    folder = build_cold_start_dataset(tmp_path / "data", train_count=20, val_count=1)
    rates = {f"cold_start:train-{i}": (7 * i % 20) / 20 for i in range(20)}
    file = tmp_path / "pass_rates.json"
    file.write_text(json.dumps(rates))

    def order(*overrides: str) -> list[float]:
        data = build(cold_config(folder, *overrides).data, model_path="unused")
        data.setup()
        return [rates[data.train_samples[i].uid] for i in positions(data.train_order(), 0, 20)]

    chosen = ("data=synthetic_curriculum", f"data.order.rates_file={file}")
    easy = order(*chosen)
    bands = [easy[i : i + 4] for i in range(0, 20, 4)]
    assert all(min(a) > max(b) for a, b in itertools.pairwise(bands))
    assert easy != sorted(easy, reverse=True), "shuffled within each band"
    hard = order(*chosen, "data.order.easy_first=false")
    assert max(hard[:4]) < min(hard[-4:])
    plain = order()
    assert sorted(plain) == sorted(easy)
    assert plain != easy
    file.write_text(json.dumps(dict(list(rates.items())[1:])))
    with pytest.raises(ValueError, match=r"1 of 20 samples have no number .*cold_start:train-0"):
        order(*chosen)
    for content, message in (
        (json.dumps({**rates, "cold_start:train-0": float("nan")}), "1 of 20 samples have no number"),
        (json.dumps(list(rates.items())), "holds no object of sample ids and pass rates"),
        ('{"cold_start:train-0": ', r"pass_rates\.json is not JSON"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            order(*chosen)
    file.unlink()
    with pytest.raises(ValueError, match="measure them with scripts/filter_by_pass_rate"):
        order(*chosen)


def totals(router, problem_type, gold, *answers, **fields):
    texts = [f"<answer>{a}</answer>" for a in answers]
    return [router.score(response=t, ground_truth=gold, problem_type=problem_type, **fields).total for t in texts]


def test_the_demo_rewards_exact_ends_and_short_answers_but_reports_the_overlap():
    router = build(compose("train", ["experiment=tiny_cpu"]).reward)
    kind, gold = "temporal grounding", "[1, 3]"
    # 0.1 format + 0.9 for tIoU >= 0.7 + half a point per exact end.
    right, start, end, beside = totals(router, kind, gold, "[1, 3]", "[1, 2]", "[0, 3]", "[0, 4]", num_tokens=8)
    assert right == pytest.approx(2.0)
    assert start == end == pytest.approx(0.6)
    assert beside == pytest.approx(0.1), "an interval around the gold one has overlap 0.5 and earns nothing"
    score = router.score(response="<answer>[0, 4]</answer>", ground_truth=gold, problem_type=kind)
    assert score.accuracy == score.parts["tiou"] == pytest.approx(0.5)
    longer = [totals(router, kind, gold, "[1, 3]", num_tokens=n)[0] for n in (9, 10, 11)]
    assert longer == [pytest.approx(1.75), pytest.approx(1.5), pytest.approx(1.5)]
    assert totals(router, "numerical", "3", "4", "3", num_tokens=4) == [pytest.approx(0.1), pytest.approx(1.0)]
    router.close()
    with pytest.raises(ValueError, match=r"reward_threshold=1\.5 must lie in"):
        TemporalGrounding(reward_threshold=1.5)


def test_shaping_ranks_near_misses_that_the_reward_calls_equal():
    shaped = build(compose("train", ["experiment=tiny_cpu", "reward=shaped"]).reward)
    plain = build(compose("train", ["experiment=tiny_cpu", "reward=default"]).reward)

    # No overlap with [0, 1]: ends 2 and 2, then 3 and 3 seconds off; weight 0.2, scale 4.
    answers = ("[2, 3]", "[3, 4]", "[0, 1]", "soon")
    near, far, right, none = totals(shaped, "temporal grounding", "[0, 1]", *answers)
    base = totals(plain, "temporal grounding", "[0, 1]", *answers)
    assert base[0] == base[1] == pytest.approx(0.1), "format only: a group of these two has no signal"
    assert (near, far) == (pytest.approx(0.1 + 0.2 * 0.5), pytest.approx(0.1 + 0.2 * 0.25))
    assert right == pytest.approx(base[2] + 0.2)
    assert none == base[3] == pytest.approx(base[3])
    assert totals(shaped, "numerical", "3", "4", "9") == [pytest.approx(0.1 + 0.2 * 0.75), pytest.approx(0.1)]
    # Other types keep their reward.
    for kind, gold, answer in (("boolean", "yes", "no"), ("open ended", "a red square", "a square")):
        assert totals(shaped, kind, gold, answer) == totals(plain, kind, gold, answer)
    parts = shaped.score(response=RIGHT, ground_truth="[1, 3]", problem_type="temporal grounding").parts
    assert parts["closeness"] == pytest.approx(0.2 * (1 - 0.5 / 4))
    for router in (shaped, plain):
        router.close()


def record(uid: str, accuracy: float) -> EvalRecord:
    return EvalRecord(
        uid=uid, state="ok", problem_type="ocr", data_type="image", data_source="cold_start", accuracy=accuracy,
        format=1.0, total=accuracy, parts={}, response="", answer="", num_tokens=1, finish_reason="stop", reason="",
    )  # fmt: skip


def test_pass_rates_and_what_is_kept(tmp_path):
    rounds = [
        [record("cold_start:train-0", a), record("cold_start:train-1", b)] for a, b in ((1, 0), (0.4, 0), (0.5, 0))
    ]
    rates = pass_rates(rounds, right=0.5)
    assert rates == {"cold_start:train-0": pytest.approx(2 / 3), "cold_start:train-1": 0.0}
    # Records are found by the ids that the data module gives them, in every format that it reads.
    folder = build_cold_start_dataset(tmp_path, train_count=2, val_count=1)
    lines = (folder / "cold_train.jsonl").read_text().splitlines()
    odd = {**json.loads(lines[0]), "problem_id": 7, "data_source": "", "problem": "a\u2028b"}
    array = folder / "odd.v2.json"
    array.write_text(json.dumps([odd], ensure_ascii=False))
    files = [str(folder / "cold_train.jsonl"), str(array)]
    named = named_records(files)
    data = build(cold_config(folder, f"data.train_files=[{','.join(files)}]").data, model_path="unused")
    data.setup()
    assert [uid for uid, _ in named] == [sample.uid for sample in data.train_samples]
    kept = kept_records(named, {"odd:7": 0.5, "cold_start:train-0": 2 / 3})
    assert kept == [{**json.loads(lines[0]), "pass_rate": 2 / 3}, {**odd, "pass_rate": 0.5}]
    array.write_text(json.dumps([{**odd, "problem_id": ""}]))
    with pytest.raises(ConfigError, match=r"problem_id; .*odd\.v2\.json:1 has none"):
        named_records(files)
    with pytest.raises(ConfigError, match=r"gone\.jsonl does not exist"):
        named_records(["gone.jsonl"])


def test_what_is_wrong_with_the_records_is_said_before_anything_is_measured(tmp_path):
    file = build_cold_start_dataset(tmp_path, train_count=1, val_count=1) / "cold_train.jsonl"
    file.write_text(file.read_text().replace('"problem_id"', '"id"'))
    arguments = ("experiment=tiny_cpu", f"data.train_files=[{file}]", "model.path=nowhere", f"--keep={tmp_path}/kept")
    assert "cold_train.jsonl:1 has none" in run(*arguments, script="scripts/filter_by_pass_rate.py", check=2)


def test_offline_settings_compose_and_say_what_is_wrong():
    from lightning_modules.algorithms.weighting import ClippedRatio, Shaped

    assert not compose("train", ["experiment=tiny_cpu"]).callbacks.offline
    luffy = build(compose("train", ["experiment=tiny_mix_policy", "offline=luffy"]).offline)
    assert isinstance(luffy.weighting, Shaped)
    assert build(compose("train", ["experiment=tiny_mix_policy", "offline.enable=false"]).offline).enable is False
    assert isinstance(build(compose("train", ["offline=replay", "data.train_files=x"]).offline).weighting, ClippedRatio)
    for name in ("mix", "prefix", "sft_interleave"):
        assert build(compose("train", ["experiment=tiny_cpu", f"offline={name}"]).offline).enable
    with pytest.raises(ConfigError, match=r"group_threshold=1\.5 is out of range"):
        build(compose("train", ["experiment=tiny_mix_policy", "offline.group_threshold=1.5"]).offline)
    with pytest.raises(ConfigError, match=r"start=2\.0 is out of range"):
        build(compose("train", ["experiment=tiny_mix_policy", "offline.ratio.start=2.0"]).offline)
    with pytest.raises(ConfigError, match="offline=mixx does not exist"):
        compose("train", ["offline=mixx"])


def test_dense_reward_gives_a_silent_group_an_advantage():
    from lightning_modules.algorithms.base import RewardTable

    algorithm = build(compose("train", ["experiment=tiny_cpu"]).algorithm)
    group = torch.tensor([0, 0])
    flat = RewardTable(torch.tensor([0.1, 0.1], dtype=torch.float64), group)
    dense = RewardTable(torch.tensor([0.2, 0.15], dtype=torch.float64), group)
    assert algorithm.advantages(flat).tolist() == [0.0, 0.0]
    assert algorithm.advantages(dense)[0] > 0.7 > -0.7 > algorithm.advantages(dense)[1]
