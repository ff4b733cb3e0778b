"""Prompt tokens, grids and patches against the Hugging Face processors of every family."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_media import numbered_frames, write_video
from PIL import Image
from tiny_families import BUILDERS, family_of

from datamodules.errors import MediaError
from datamodules.lengths import histogram, overlong, prompt_length, prompt_lengths
from datamodules.prepare import OverlongError, SamplePreparer, load_processor
from datamodules.prompts import PromptTemplates, place_media
from datamodules.types import MediaRef, Sample
from datamodules.video.cache import VideoCache
from datamodules.video.spec import ImageSpec, VideoSpec
from lightning_modules.layouts.patchify import Patchifier
from rewards.router import RewardRouter


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    write_video(folder / "a.mp4", numbered_frames(40), fps=10)
    write_video(folder / "b.mp4", numbered_frames(23, 120, 90), fps=7.5)
    write_video(folder / "one.mp4", numbered_frames(1), fps=10)
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (100, 150, 3), dtype=np.uint8)).save(folder / "c.png")
    Image.fromarray(rng.integers(0, 255, (70, 61, 4), dtype=np.uint8), "RGBA").save(folder / "d.png")
    return folder


FAMILIES = ["qwen3_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "glm4v"]


@pytest.fixture(scope="module")
def folders(tiny_model_dir, tmp_path_factory):
    """Folders with the configuration and processor of every family."""
    from transformers import PreTrainedTokenizerFast

    found = {"qwen3_vl": tiny_model_dir}
    for name, builder in BUILDERS.items():
        found[name] = tmp_path_factory.mktemp(name)
        model, processor = builder(PreTrainedTokenizerFast.from_pretrained(tiny_model_dir))
        model.config.save_pretrained(found[name])
        processor.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def processors(folders):
    """Processors of all families: times in the prompt or not, factor 28 or 32, a placeholder for each medium or one."""
    return {name: load_processor(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def rules(folders, processors):
    """What each family says about its processor."""
    return {name: family_of(name).open(str(folders[name])).media_spec(processors[name]) for name in folders}


SAMPLES = {
    "text": Sample("t", "Is 7 larger than 3?", "yes", "boolean", "text"),
    "image": Sample("i", "What is <image> this?", "A", "multiple choice", "image", images=(MediaRef("c.png"),)),
    "video": Sample("v", "When?", "[1, 2]", "temporal grounding", "video", videos=(MediaRef("a.mp4"),)),
    "one_frame": Sample("o", "What?", "x", "open-ended", "video", videos=(MediaRef("one.mp4"),)),
    "clip": Sample("k", "When?", "3", "numerical", "video", videos=(MediaRef("a.mp4", start=0.7, end=3.1),)),
    "two_videos": Sample(
        "vv",
        "Compare <video> with <video> please.",
        "x",
        "open-ended",
        "video",
        videos=(MediaRef("a.mp4"), MediaRef("b.mp4", fps=1.0)),
    ),
    "image_video": Sample(
        "m",
        "First <video>, then <image> and <image>?",
        "x",
        "open-ended",
        "mixed",
        images=(MediaRef("c.png"), MediaRef("d.png")),
        videos=(MediaRef("b.mp4"),),
    ),
}


def make_preparer(processor, rules, media, cache_dir=None, **options):
    return SamplePreparer(
        processor,
        rules,
        VideoSpec.for_rules(rules, min_pixels=4096, max_pixels=40_000),
        ImageSpec.for_rules(rules, max_pixels=20_000),
        VideoCache(cache_dir, media),
        PromptTemplates(),
        **options,
    )


def processor_output(processor, prepared):
    kwargs = {}
    if hasattr(processor.video_processor, "cap_pixels_per_frame"):
        kwargs["cap_pixels_per_frame"] = False
    if prepared.images:
        kwargs["images"] = [torch.from_numpy(image.pixels) for image in prepared.images]
    if prepared.videos:
        kwargs["videos"] = [np.asarray(video.frames) for video in prepared.videos]
        kwargs["video_metadata"] = [dict(video.metadata) for video in prepared.videos]
    return processor(
        text=[prepared.prompt_text],
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
        **kwargs,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", list(SAMPLES))
def test_prompt_equals_the_processor(processors, rules, folders, media, family, kind):
    processor = processors[family]
    preparer = make_preparer(processor, rules[family], media)
    prepared = preparer.prepare(SAMPLES[kind])
    expected = processor_output(processor, prepared)
    assert prepared.expanded_ids == tuple(expected["input_ids"][0].tolist())
    assert prompt_length(SAMPLES[kind], preparer) == prepared.num_prompt_tokens
    pads = {preparer.rules.image_token_id, preparer.rules.video_token_id}
    assert sum(token in pads for token in prepared.prompt_ids) == len(prepared.images) + len(prepared.videos)
    patches = Patchifier(processor)(prepared)
    for ours, grids, key, grid_key in (
        (patches.images, patches.image_grids, "pixel_values", "image_grid_thw"),
        (patches.videos, patches.video_grids, "pixel_values_videos", "video_grid_thw"),
    ):
        assert (ours is None) == (key not in expected)
        if ours is not None:
            torch.testing.assert_close(ours, expected[key], rtol=0, atol=0)
            assert [list(grid) for grid in grids] == expected[grid_key].tolist()
    if family == "qwen2_5_vl" and prepared.videos:
        seconds = (
            family_of(family)
            .open(str(folders[family]))
            .seconds_per_grid([video.metadata.sampled_fps for video in prepared.videos])
        )
        assert seconds == pytest.approx([float(x) for x in expected["second_per_grid_ts"]])


def test_golden_prompt_with_times(processors, rules, media):
    prepared = make_preparer(processors["qwen3_vl"], rules["qwen3_vl"], media).prepare(SAMPLES["video"])
    tokenizer = processors["qwen3_vl"].tokenizer
    text = tokenizer.decode(prepared.expanded_ids)
    # 40 frames at 10 fps: indices 0 6 11 17 22 28 33 39; middles 0.3 1.4 2.5 3.6 s; 64x96 -> 2*3 tokens
    run = "<|vision_start|>" + "<|video_pad|>" * 6 + "<|vision_end|>"
    times = "".join(f"<{t} seconds>{run}" for t in ("0.3", "1.4", "2.5", "3.6"))
    assert text.startswith(f"<|im_start|>user\n<|vision_start|>{times}<|vision_end|>When?")


def test_golden_prompt_of_glm(processors, rules, media):
    prepared = make_preparer(processors["glm4v"], rules["glm4v"], media).prepare(SAMPLES["video"])
    text = processors["glm4v"].tokenizer.decode(prepared.expanded_ids)
    # First frames 0 11 22 33 at 10 fps: whole seconds 0 1 2 3; 64x96 -> 56x84 -> 2*3 tokens, written as image tokens
    run = "<|begin_of_image|>" + "<|image|>" * 6 + "<|end_of_image|>"
    frames = "".join(f"{run}{second}" for second in range(4))
    assert text.startswith(f"<|im_start|>user\n<|begin_of_video|>{frames}<|end_of_video|>When?")


@pytest.mark.parametrize(("family", "other"), [("qwen3_vl", "glm4v"), ("glm4v", "qwen2_vl"), ("qwen2_vl", "glm4v")])
def test_a_processor_of_another_family_is_refused(processors, folders, family, other):
    with pytest.raises(ValueError, match="they do not belong together"):
        family_of(family).open(str(folders[family])).media_spec(processors[other])


@pytest.mark.parametrize(("family", "token"), [("glm4v", "<|end_of_video|>"), ("qwen2_vl", "<|vision_end|>")])
def test_delimiters_in_user_text_are_refused(processors, rules, media, family, token):
    preparer = make_preparer(processors[family], rules[family], media)
    assert token in preparer.rules.reserved_tokens
    with pytest.raises(ValueError, match="reserved token"):
        preparer.prepare(replace(SAMPLES["text"], problem=f"What is {token}?"))


def test_reserved_tokens_in_user_text_are_refused(processors, rules, media):
    preparer = make_preparer(processors["qwen3_vl"], rules["qwen3_vl"], media)
    with pytest.raises(ValueError, match=r"reserved token <\|video_pad\|>"):
        preparer.prepare(replace(SAMPLES["text"], problem="What is <|video_pad|>?"))


def test_overlong_prompts_raise_and_are_never_cut(processors, rules, media):
    preparer = make_preparer(processors["qwen3_vl"], rules["qwen3_vl"], media, max_prompt_tokens=50)
    with pytest.raises(OverlongError, match=r"sample v: the prompt has 1.. tokens, max_prompt_tokens is 50"):
        preparer.prepare(SAMPLES["video"])


def test_media_tags_and_media_must_agree():
    assert place_media("a <video> b <image>", 1, 1) == [
        {"type": "text", "text": "a"},
        {"type": "video"},
        {"type": "text", "text": "b"},
        {"type": "image"},
    ]
    assert [part["type"] for part in place_media("only text", 1, 2)] == ["image", "video", "video", "text"]
    with pytest.raises(ValueError, match="holds 2 <video> tags, the sample 1 videos"):
        place_media("<video> <video>", 0, 1)


def test_own_templates(tmp_path):
    (tmp_path / "mine.jinja").write_text("Q: {{ problem }} [{{ extra.level }}]")
    sample = replace(SAMPLES["text"], extra={"level": 3})
    assert PromptTemplates(tmp_path / "mine.jinja").render(sample) == "Q: Is 7 larger than 3? [3]"
    overridden = PromptTemplates("default", {"boolean": str(tmp_path / "mine.jinja")})
    assert overridden.render(sample).startswith("Q: ")
    assert not overridden.render(replace(sample, problem_type="numerical")).startswith("Q: ")
    (tmp_path / "broken.jinja").write_text("{{ problem ")
    with pytest.raises(ValueError, match=r"prompt template default\.jinja on sample"):
        PromptTemplates(tmp_path / "broken.jinja").render(sample)
    with pytest.raises(ValueError, match=r"'level' is undefined|no attribute 'level'"):
        overridden.render(SAMPLES["text"])
    with pytest.raises(ValueError, match="neither a built-in set"):
        PromptTemplates("no_such_set")


def test_every_known_problem_type_renders():
    for name in ("default", "tiny"):
        templates = PromptTemplates(name)
        for problem_type in RewardRouter().tasks:
            sample = replace(SAMPLES["text"], problem_type=problem_type, options=("A. yes", "B. no"))
            text = templates.render(sample)
            assert "<answer>" in text
            assert "A. yes" in text


def test_lengths_are_remembered_and_follow_changes(processors, rules, media, tmp_path):
    preparer = make_preparer(processors["qwen3_vl"], rules["qwen3_vl"], media, tmp_path)
    samples = [replace(sample, uid=f"{sample.uid}{i}") for i in range(20) for sample in SAMPLES.values()]
    samples.append(replace(SAMPLES["video"], uid="gone", videos=(MediaRef("absent.mp4"),)))
    first = prompt_lengths(samples, preparer, tmp_path)
    assert [x.tokens for x in first[:-1]] == [preparer.prepare(s).num_prompt_tokens for s in samples[:-1]]
    assert first[-1].tokens is None
    assert "No such file" in first[-1].reason
    assert prompt_lengths(samples, preparer, tmp_path) == first
    (file,) = (tmp_path / "lengths").iterdir()
    remembered = json.loads(file.read_text())
    remembered[0]["tokens"] = 12_345  # what the file says is believed: nothing was measured again
    file.write_text(json.dumps(remembered))
    assert prompt_lengths(samples, preparer, tmp_path)[0].tokens == 12_345
    prompt_lengths([replace(samples[0], problem="other"), *samples[1:]], preparer, tmp_path)
    assert len(list((tmp_path / "lengths").iterdir())) == 2
    for file in (tmp_path / "lengths").iterdir():
        file.write_text("{")
    assert prompt_lengths(samples, preparer, tmp_path) == first
    longest = max(x.tokens for x in first[:-1])
    assert {uid[:-1].rstrip("1") for uid, _ in overlong(first, longest - 1)} == {"vv"}
    assert "1 unreadable" in histogram(first, 100)


def test_bad_image_is_bad_media(processors, rules, media, tmp_path):
    (media / "bad.png").write_bytes((media / "c.png").read_bytes()[:300])
    preparer = make_preparer(processors["qwen3_vl"], rules["qwen3_vl"], media)
    with pytest.raises(MediaError, match="cannot be used as an image"):
        preparer.prepare(replace(SAMPLES["image"], images=(MediaRef("bad.png"),)))


def test_media_survive_json(rules):
    assert (rules["qwen3_vl"].factor, rules["qwen3_vl"].timestamp_style) == (32, "seconds")
    assert rules["qwen2_5_vl"].factor == 28
    assert json.loads(json.dumps(VideoSpec.for_rules(rules["qwen3_vl"]).fingerprint()))["patch_size"] == 16


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_lengths_equal_the_processor_on_real_clips(processors, rules, shared_data, family):
    processor = processors[family]
    preparer = SamplePreparer(
        processor,
        rules[family],
        VideoSpec.for_rules(rules[family], max_frames=6, max_pixels=131_072),
        ImageSpec.for_rules(rules[family]),
        VideoCache(None, shared_data / "videos"),
        PromptTemplates(),
    )
    for path in sorted((shared_data / "videos").iterdir()):
        sample = replace(SAMPLES["video"], uid=path.name, videos=(MediaRef(path.name),))
        prepared = preparer.prepare(sample)
        expected = processor_output(processor, prepared)
        assert prompt_length(sample, preparer) == len(expected["input_ids"][0]), path.name
        assert prepared.videos[0].grid == tuple(expected["video_grid_thw"][0].tolist()), path.name
