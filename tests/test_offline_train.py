"""Offline training through `train.py`: two ranks, exact resume with a replay buffer, and the cold start's claim."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_helpers import assert_same_run, rows, run

from scripts.bench.mix_policy import run as bench_run

SHORT = ("callbacks.evaluation=null", "callbacks.checkpoint.every_n_steps=2", "data.rollout_batch_size=8")
REPLAY = ("offline=replay", "offline.min_accuracy=0.0", "offline.group_threshold=1.0", "offline.prompts_per_step=2")


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mix")
    run("experiment=tiny_mix_policy", f"assets_dir={folder}", script="scripts/build_assets.py")
    return folder


def train(assets: Path, name: str, *overrides: str) -> Path:
    folder = assets / "runs" / name
    run("experiment=tiny_mix_policy", f"assets_dir={assets}", f"run_dir={folder}", *SHORT, *overrides)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("offline", [REPLAY, ("offline=mix", "offline.ratio.start=0.5")], ids=["replay", "mix"])
def test_a_resumed_run_is_one_that_never_stopped(assets, offline):
    name = offline[0].partition("=")[2]
    # One thread: how many share a sum may differ from run to run on a busy machine, and with it the last bits.
    offline = (*offline, "trainer.threads_per_rank=1")
    straight = train(assets, f"{name}_straight", "max_steps=4", *offline)
    train(assets, f"{name}_resumed", "max_steps=2", *offline)
    resumed = train(assets, f"{name}_resumed", "max_steps=4", *offline)
    assert_same_run(straight, resumed)
    if name == "replay":
        assert float(rows(resumed)[4]["replay/replayed_count"]) > 0, "the buffer of the checkpoint was used"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offline", "counts"),
    [
        (("offline=mix",), {"offline/injected_count": 8, "offline/response_share": 1 / 6}),
        (("offline=mix", "offline.group_threshold=0.5"), {"offline/failing_groups_count": 8}),
        (("offline=luffy",), {"offline/accuracy": 1.0}),
        (("offline=prefix",), {"offline/prefixes_count": 16}),
        (("offline=sft_interleave",), {"sft/trajectories": 8}),
        (REPLAY, {"replay/kept_count": 8}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_two_ranks_do_what_one_does(assets, offline, counts):
    name = str(abs(hash(offline)))
    one = rows(train(assets, f"one{name}", "max_steps=2", *offline))
    two = rows(train(assets, f"two{name}", "max_steps=2", "trainer.devices=2", "strategy=fsdp", *offline))
    for metric, want in counts.items():
        assert float(one[1][metric]) == pytest.approx(want)
    # The first step's rollouts come from equal weights: same tokens, same scores, same loss up to rounding.
    shared = [k for k in one[1] if k.split("/")[0] in ("offline", "online", "prefixed", "sft", "replay", "losses")]
    for metric in shared:
        if metric not in ("replay/size_count", "offline/prefix_length"):
            assert float(two[1][metric]) == pytest.approx(float(one[1][metric]), rel=2e-3, abs=1e-5), metric
    assert len(two) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_mixing_leaves_the_cold_start_and_plain_grpo_does_not(assets, seed):
    plain = bench_run("grpo", seed, assets / "bench", [])
    mixed = bench_run("mix", seed, assets / "bench", [])
    for result in (plain, mixed):
        assert result["held_out"][0] < 0.02
        assert result["online"][1] < 0.02
    assert max(plain["held_out"].values()) < 0.02
    assert max(plain["online"].values()) < 0.02
    assert mixed["held_out"][60] >= 0.8


@pytest.mark.slow
def test_the_bench_keeps_finished_runs_of_the_same_settings_only(assets):
    out = assets / "again"
    left = out / "runs" / "grpo_seed0"  # as an interrupted run leaves it
    left.mkdir(parents=True)
    (left / "status.json").write_text('{"state": "running"}')
    (left / "metrics.csv").write_text("step,val/accuracy_mean\n0,0.9\n")
    first = bench_run("grpo", 0, out, ["max_steps=1", "data.rollout_batch_size=4"])
    assert first["held_out"][0] < 0.02
    assert list(first["online"]) == [1]
    assert bench_run("grpo", 0, out, ["max_steps=1", "data.rollout_batch_size=4"]) == first
    second = bench_run("grpo", 0, out, ["max_steps=2", "data.rollout_batch_size=4"])
    assert list(second["online"]) == [1, 2]
