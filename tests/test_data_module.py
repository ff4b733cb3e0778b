"""`VideoRLDataModule`: order, sharding, resuming, workers, lost samples, filtering."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from datamodules.common.frames import SharedFrames
from datamodules.demo.synthetic import TASKS, build_synthetic_dataset
from datamodules.sampling import MixtureOrder, ShuffledOrder, permutation, positions
from datamodules.steps import Shard, prompt_cost
from datamodules.video.decode import decode_spec
from datamodules.video.spec import VideoSpec
from datamodules.video_rl import VideoRLDataModule
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.launch.config import build, compose


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return build_synthetic_dataset(tmp_path_factory.mktemp("synthetic"), train_per_task=5, val_per_task=3)


@pytest.fixture
def make(data, tiny_model_dir, tmp_path):
    def build(**options):
        defaults = {
            "model_path": str(tiny_model_dir),
            "family": Qwen3VLFamily(),
            "train_files": [str(data / "train.jsonl")],
            "val_files": [str(data / "val.jsonl")],
            "media_root": str(data),
            "cache_dir": str(tmp_path / "cache"),
            "video_min_pixels": 2048,
            "image_min_pixels": 2048,
            "prompt_templates": "tiny",
            "rollout_batch_size": 4,
            "val_batch_size": 8,
            "max_steps": 10,
        }
        return VideoRLDataModule(**{**defaults, **options})

    return build


GOLDEN_PERMUTATION = [6, 7, 1, 2, 9, 0, 5, 8, 3, 4]


def uids(loader):
    return [(batch.rl_step, [prompt.uid for prompt in batch.prompts]) for batch in loader]


def test_steps_are_slices_of_concatenated_permutations(make):
    module = make()
    steps = uids(module.train_dataloader())
    assert [step for step, _ in steps] == list(range(10))
    flat = [uid for _, batch in steps for uid in batch]
    names = [sample.uid for sample in module.train_samples]
    expected = [names[i] for epoch in range(2) for i in permutation(0, epoch, 35)]
    assert flat == expected[:40]
    assert sorted(flat[:35]) == sorted(names)
    assert flat[:5] != flat[35:]  # the second epoch is another permutation


def test_order_never_changes_between_versions():
    assert permutation(0, 0, 10).tolist() == GOLDEN_PERMUTATION
    assert positions(ShuffledOrder(10, 0), 7, 12)[:3] == GOLDEN_PERMUTATION[7:]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_take_contiguous_parts_of_the_global_batch(make, world):
    whole = uids(make().train_dataloader())
    parts = []
    for rank in range(world):
        module = make()
        module.set_rank(rank, world)
        parts.append(uids(module.train_dataloader()))
    for step, batch in whole:
        assert [uid for part in parts for uid in part[step][1]] == batch
        assert {len(part[step][1]) for part in parts} == {4 // world}


def test_batch_must_divide_by_ranks(make):
    module = make(rollout_batch_size=6)
    module.set_rank(0, 4)
    with pytest.raises(ValueError, match="rollout_batch_size=6 does not divide by 4 data-parallel ranks"):
        module.train_dataloader()


@pytest.mark.parametrize("start", [3, 7, 8, 10])
def test_resuming_continues_the_order_also_across_epochs(make, start):
    whole = uids(make().train_dataloader())
    module = make()
    module.start_step = start
    loader = module.train_dataloader()
    assert len(loader) == 10 - start
    assert uids(loader) == whole[start:]


def test_workers_give_the_same_batches(make):
    here, there = list(make().train_dataloader()), list(make(num_workers=2).train_dataloader())
    assert uids(here) == uids(there)
    for a, b in zip(here, there, strict=True):
        for x, y in zip(a.prompts, b.prompts, strict=True):
            assert x.expanded_ids == y.expanded_ids
            assert [v.digest for v in x.videos] == [v.digest for v in y.videos]
            for v, w in zip(x.videos, y.videos, strict=True):
                np.testing.assert_array_equal(v.frames, w.frames)
            for v, w in zip(x.images, y.images, strict=True):
                np.testing.assert_array_equal(v.pixels, w.pixels)


def test_validation_is_one_pass_with_equally_many_batches_per_rank(make):
    parts = []
    for rank in range(4):
        module = make(val_batch_size=5)
        module.set_rank(rank, 4)
        parts.append(uids(module.val_dataloader()))
    assert {len(part) for part in parts} == {4}  # 18 samples in batches of 5, 5, 5, 3
    names = [uid for step in range(4) for part in parts for uid in part[step][1]]
    assert names == [sample.uid for sample in module.val_samples]


def test_bad_media_are_lost_not_replaced_and_do_not_move_the_others(make, data, tmp_path):
    whole = uids(make().train_dataloader())
    records = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    broken = [record for record in records if record.get("videos")][:2]
    broken[0]["videos"] = ["media/missing.mp4"]
    (data / "media" / "broken.mp4").write_bytes(b"\0" * 5000)
    broken[1]["videos"] = ["media/broken.mp4"]
    names = {f"{record['data_source']}:{record['problem_id']}" for record in broken}
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    module = make(train_files=str(tmp_path / "train.jsonl"), decode_timeout_s=60)
    lost = {}
    for batch, (_, expected) in zip(module.train_dataloader(), whole, strict=True):
        assert [prompt.uid for prompt in batch.prompts] == [uid for uid in expected if uid not in names]
        assert [uid for uid, _ in batch.lost] == [uid for uid in expected if uid in names]
        lost.update(batch.lost)
    assert set(lost) == names
    assert "No such file" in lost[f"{broken[0]['data_source']}:{broken[0]['problem_id']}"]
    assert [entry["name"] for entry in module.cache.quarantine.entries()] == ["media/broken.mp4"]


def test_overlong_prompts_are_dropped_and_listed(make):
    module = make(max_prompt_tokens=80)
    module.setup()
    lengths = dict(module.dropped)
    assert lengths
    assert all(length > 80 for length in lengths.values())
    free = make()
    free.setup()
    every = {sample.uid: free.preparer.prepare(sample).num_prompt_tokens for sample in free.train_samples}
    assert lengths == {uid: tokens for uid, tokens in every.items() if tokens > 80}
    assert {sample.uid for sample in module.train_samples} == set(every) - set(lengths)


def test_mixture_weights_fix_the_shares():
    order = MixtureOrder((90, 10), (1, 1), seed=3)
    for epoch in range(3):
        indices = order.epoch(epoch)
        assert Counter(index >= 90 for index in indices.tolist()) == {False: 50, True: 50}
    first_source = [i for e in range(9) for i in order.epoch(e).tolist() if i < 90]
    # 450 draws are exactly five passes over the 90 samples of the first source.
    assert set(Counter(first_source).values()) == {5}
    with pytest.raises(ValueError, match="2 mixture weights for 1 sources"):
        MixtureOrder((5,), (1, 2))


def test_mixture_in_the_module(make, data):
    files = [str(data / "train.jsonl"), str(data / "val.jsonl")]
    module = make(train_files=files, mixture_weights=[1, 3])
    module.setup()
    # 35 and 18 records: an epoch of 53, a quarter and three quarters of it.
    counts = Counter(i >= 35 for i in module.train_order().epoch(0).tolist())
    assert counts == {True: 40, False: 13}


def test_shards_cover_everything_once():
    for count in (0, 1, 7, 48):
        for world in (1, 2, 5):
            items = list(range(count))
            parts = [items[Shard(rank, world).slice(count)] for rank in range(world)]
            assert [item for part in parts for item in part] == items
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        Shard(2, 2)


def test_balanced_shards_cover_everything_once_with_even_sums():
    assert [Shard(rank, 2).balanced([8, 6, 1, 1]) for rank in range(2)] == [[0, 3], [1, 2]]
    assert [Shard(rank, 2).balanced([9, 5, 4, 3, 3, 2]) for rank in range(2)] == [[0, 3, 5], [1, 2, 4]]
    assert Shard(0, 1).balanced([3, 9, 1]) == [0, 1, 2]
    for count in (0, 1, 7, 48):
        costs = [(i * 7919) % 97 for i in range(count)]
        for world in (1, 2, 5):
            parts = [Shard(rank, world).balanced(costs) for rank in range(world)]
            assert sorted(place for part in parts for place in part) == list(range(count))
            sizes = [len(range(count)[Shard(rank, world).slice(count)]) for rank in range(world)]
            assert [len(part) for part in parts] == sizes
    sums = [sum(costs[i] for i in part) for part in parts]  # 48 items on five ranks, sum 2307
    assert max(sums) < 1.1 * sum(sums) / len(sums)


def test_ranks_share_a_steps_work(make):
    """Known lengths decide; each step's samples are those of one rank."""

    def served(world, **options):
        module = make(rollout_batch_size=8, max_steps=3, num_workers=0, **options)
        steps = []
        for rank in range(world):
            module.set_rank(rank, world)
            steps.append([[p.uid for p in b.prompts] for b in module.train_dataloader()])
        tokens = {length.uid: length.tokens for length in module.lengths}
        return [list(step) for step in zip(*steps, strict=True)], tokens

    alone, tokens = served(1, max_prompt_tokens=4096)
    shared, _ = served(2, max_prompt_tokens=4096)
    halves, _ = served(2, filter_overlong=False)
    for (whole,), parts, contiguous in zip(alone, shared, halves, strict=True):
        assert sorted(parts[0] + parts[1]) == sorted(whole)
        assert [len(part) for part in parts] == [4, 4]
        assert contiguous == [whole[:4], whole[4:]]
        cost = [sum(prompt_cost(tokens[uid]) for uid in part) for part in parts]
        plain = [sum(prompt_cost(tokens[uid]) for uid in part) for part in contiguous]
        assert max(cost) <= max(plain)
    assert shared != halves, "the samples differ in length"


class Recorder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.automatic_optimization = False
        self.seen, self.val_seen = [], 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def training_step(self, batch, _):
        self.seen.append((batch.rl_step, [p.uid for p in batch.prompts]))

    def validation_step(self, batch, _):
        self.val_seen += len(batch.prompts)


def test_in_the_trainer(make, tmp_path):
    module, model = make(), Recorder()
    module.start_step = 4
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, module)
    assert model.seen == uids(make().train_dataloader())[4:]
    assert model.val_seen == 18


def test_frames_travel_by_reference(make):
    module = make(cache_codec="raw")
    list(module.train_dataloader())
    batch = next(iter(module.train_dataloader()))
    video = next(video for prompt in batch.prompts for video in prompt.videos)
    assert isinstance(video.frames, SharedFrames)
    sent = pickle.dumps(video.frames)
    assert len(sent) < 400  # a path, not 150 kB of pixels
    np.testing.assert_array_equal(pickle.loads(sent), video.frames)
    assert video.frames.nbytes == 8 * 3 * 64 * 96


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_host_memory_grows_with_the_clips_not_with_copies(make, data, tmp_path, codec):
    """Two workers prefetching: private memory stays far below the frames handed over, shared memory at their size.

    Raw clips are mapped files; what lossless ones become lies once in shared memory.
    """
    from data_media import write_video

    rng = np.random.default_rng(0)
    records = []
    for i in range(4):
        frames = rng.integers(0, 255, (32, 256, 256, 3), dtype=np.uint8)
        write_video(tmp_path / f"{i}.mp4", frames, fps=2)
        records.append({"problem": "?", "answer": "1", "problem_type": "numerical", "videos": [f"{i}.mp4"]})
    (tmp_path / "big.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = {"train_files": str(tmp_path / "big.jsonl"), "media_root": str(tmp_path), "cache_codec": codec}
    list(make(**options, max_steps=1).train_dataloader())  # fill the cache
    module = make(**options, max_steps=6, num_workers=2)
    loader = iter(module.train_dataloader())
    first = next(loader)
    before = private_bytes()
    held = [first, *loader]
    total = sum(v.frames.nbytes for batch in held for p in batch.prompts for v in p.videos)
    assert total == 24 * 32 * 3 * 256 * 256
    assert private_bytes() - before < 0.1 * total
    touched = sum(int(v.frames.max()) > 0 for batch in held for p in batch.prompts for v in p.videos)
    assert touched == 24
    assert private_bytes() - before < 0.1 * total
    shared = resident_bytes("RssShmem")
    assert shared < 0.1 * total if codec == "raw" else 0.8 * total < shared < 1.1 * total


def private_bytes() -> int:
    """Anonymous memory of this process: mapped files and shared memory not counted."""
    return resident_bytes("RssAnon")


def resident_bytes(kind: str) -> int:
    """A kind of resident memory of this process (`RssAnon`, `RssFile`, `RssShmem`)."""
    with open(f"/proc/{os.getpid()}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[kind].split()[0]) * 1024


def test_synthetic_tasks_are_balanced_reproducible_and_held_out(data, tmp_path):
    again = build_synthetic_dataset(tmp_path / "again", train_per_task=5, val_per_task=3)
    files = sorted(path.relative_to(data) for path in data.rglob("*.*") if "broken" not in path.name)
    assert len(files) == 4 * (5 + 3) + (2 * 5 + 3) + 3, "circle_time has twice the training records"
    for file in files:
        if file.suffix == ".mp4":
            ours, theirs = (decode_spec(folder / file, VideoSpec(min_pixels=1024))[0] for folder in (again, data))
            np.testing.assert_array_equal(ours, theirs)
        else:
            assert (again / file).read_bytes() == (data / file).read_bytes()
    stamp = (again / "train.jsonl").stat().st_mtime_ns
    build_synthetic_dataset(again, train_per_task=5, val_per_task=3)
    assert (again / "train.jsonl").stat().st_mtime_ns == stamp
    questions = {}
    for split in ("train", "val"):
        lines = [json.loads(line) for line in (data / f"{split}.jsonl").read_text().splitlines()]
        assert {record["data_source"] for record in lines} == set(TASKS)
        questions[split] = {record["problem"] for record in lines if record["data_type"] == "text"}
    assert not questions["train"] & questions["val"]
    with pytest.raises(ValueError, match=r"unknown synthetic tasks \['nope'\]"):
        build_synthetic_dataset(tmp_path / "x", tasks=["nope"])


def test_wrong_options_say_the_value(make):
    for options, message in (
        ({"rollout_batch_size": 0}, "rollout_batch_size=0 must be at least 1"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"worker_start_method": "thread"}, "use fork, spawn or forkserver"),
        ({"mixture_weights": [1, 2]}, "2 mixture_weights for 1 train_files"),
        ({"source_mode": "maybe"}, "use one of prefer_cache, cache_only, decode"),
        ({"cache_codec": "zip"}, "use one of raw, lossless, jpeg"),
        ({"prompt_templates": "nope"}, "neither a built-in set"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)
    with pytest.raises(TypeError, match="max_frame"):
        make(max_frame=3)
    with pytest.raises(ValueError, match="no processor at model_path="):
        make(model_path="/does/not/exist").train_dataloader()


def test_yaml_lists_every_option():
    from dataclasses import fields

    from omegaconf import OmegaConf

    from datamodules.options import DataOptions

    base = OmegaConf.load(Path(__file__).parents[1] / "conf" / "data" / "base.yaml")
    own = {"_target_", "model_path", "family", "train_files", "val_files"}
    # The number of steps is the run's, not the data's.
    assert set(base) - own == {field.name for field in fields(DataOptions)} - {"max_steps"}


@pytest.mark.parametrize("name", ["curriculum", "length_grouped"])
def test_orders_by_configuration(make, data, tmp_path, name):
    order = build(compose("train", [f"data={name}"]).data.order)
    records = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    for i, record in enumerate(records):
        record["pass_rate"] = i / len(records)
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    module = make(train_files=str(tmp_path / "train.jsonl"), order=order, max_steps=7)
    chosen = [uid for _, batch in uids(module.train_dataloader()) for uid in batch]
    assert len(set(chosen)) == 28  # seven of the epoch's steps: nothing twice
    rates = {sample.uid: sample.extra["pass_rate"] for sample in module.train_samples}
    if name == "curriculum":
        assert min(rates[uid] for uid in chosen[:6]) > max(rates[uid] for uid in chosen[24:])
    else:
        lengths = {sample.uid: module.preparer.prepare(sample).num_prompt_tokens for sample in module.train_samples}
        spreads = [
            max(lengths[u] for u in chosen[i : i + 4]) - min(lengths[u] for u in chosen[i : i + 4])
            for i in range(0, 28, 4)
        ]
        assert np.mean(spreads) < 15
