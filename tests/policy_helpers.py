"""Hand-made rollouts for tests of the policy side: real processor, random media and responses, no engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from datamodules.types import PreparedImage, PreparedSample, PreparedVideo, Sample, StepBatch
from lightning_modules.families.base import ModelFamily
from lightning_modules.layouts.base import Context
from lightning_modules.layouts.patchify import Patchifier
from rewards.base import Score
from rollout.types import Response, RolloutGroup

KINDS = ("text", "image", "video", "mixed")


def _message(kind: str, question: str) -> list[dict]:
    media = {
        "text": [],
        "image": ["image"],
        "video": ["video"],
        "mixed": ["image", "video"],
        "two_videos": ["video"] * 2,
    }
    content = [{"type": m} for m in media[kind]] + [{"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def digest(pixels: np.ndarray, *more: object) -> str:
    """Engines cache media by digest, so equal digests must mean equal pixels."""
    return hashlib.sha256(pixels.tobytes() + repr((pixels.shape, more)).encode()).hexdigest()


def prepared_sample(
    processor, uid: str, kind: str, seed: int = 0, frames: int = 4, size: int = 64, fps: float = 2.0
) -> PreparedSample:
    """A sample of random pixels whose `expanded_ids` come from the Hugging Face processor."""
    from transformers.video_utils import VideoMetadata

    rng = np.random.default_rng(seed)
    text = processor.apply_chat_template(_message(kind, f"What is {uid}?"), add_generation_prompt=True, tokenize=False)
    pixels = [rng.integers(0, 256, (3, size, size // 2), dtype=np.uint8)] if kind in ("image", "mixed") else []
    num_videos = {"video": 1, "mixed": 1, "two_videos": 2}.get(kind, 0)
    clips = [rng.integers(0, 256, (frames + 2 * i, 3, size, size), dtype=np.uint8) for i in range(num_videos)]
    metadata = [
        VideoMetadata(
            total_num_frames=len(c) * 10,
            fps=fps * 10,
            frames_indices=[10 * i for i in range(len(c))],
            duration=len(c) / fps,
        )
        for c in clips
    ]
    out = processor(
        text=[text],
        images=pixels or None,
        videos=clips or None,
        video_metadata=metadata or None,
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    image_grids = [tuple(g) for g in out["image_grid_thw"].tolist()] if pixels else []
    video_grids = [tuple(g) for g in out["video_grid_thw"].tolist()] if clips else []
    return PreparedSample(
        sample=Sample(
            uid=uid,
            problem="?",
            answer="A",
            problem_type="multiple choice",
            data_type="video" if kind == "two_videos" else kind,
        ),
        prompt_text=text,
        prompt_ids=tuple(processor.tokenizer(text, add_special_tokens=False)["input_ids"]),
        expanded_ids=tuple(out["input_ids"][0].tolist()),
        images=tuple(PreparedImage(p, g, digest(p)) for p, g in zip(pixels, image_grids, strict=True)),
        videos=tuple(
            PreparedVideo(c, m, g, digest(c, m.fps)) for c, m, g in zip(clips, metadata, video_grids, strict=True)
        ),
    )


def make_group(
    sample: PreparedSample, index: int, n: int = 3, seed: int = 0, lengths: tuple[int, ...] | None = None, low: int = 20
) -> RolloutGroup:
    """`n` random responses of 1 to 6 tokens (or of `lengths`), with random engine log-probs."""
    rng = np.random.default_rng(1000 + seed)
    responses = []
    for k in range(n):
        length = lengths[k] if lengths else int(rng.integers(1, 7))
        ids = rng.integers(low, 250, length).astype(np.int32)
        logprobs = -rng.random(length).astype(np.float32) * 3
        responses.append(Response(ids, logprobs, "stop", f"answer {k}", k))
    return RolloutGroup(index=index, prompt=sample, responses=tuple(responses))


def make_batch(processor, kinds: tuple[str, ...] = KINDS, n: int = 3, seed: int = 0, size: int = 64) -> StepBatch:
    """One group per kind, scored at random (never all equal)."""
    rng = np.random.default_rng(2000 + seed)
    samples = [
        prepared_sample(processor, f"s{i}:{kind}", kind, seed=seed * 100 + i, size=size) for i, kind in enumerate(kinds)
    ]
    groups = [make_group(sample, i, n, seed=seed * 100 + i) for i, sample in enumerate(samples)]
    scores = []
    for _ in groups:
        totals = rng.random(n).round(3)
        scores.append(tuple(Score(float(t), 1.0, float(t)) for t in totals))
    return StepBatch(prompts=samples, groups=groups, scores=scores)


def context(family: ModelFamily, processor) -> Context:
    """CPU context."""
    return Context(family, Patchifier(processor), torch.device("cpu"))


def load_processor(path: str | Path):
    """The processor of a saved model."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(path)


def rank_part(batch: StepBatch, rank: int, ranks: int) -> StepBatch:
    """Every `ranks`-th prompt of a global batch, as that rank would hold it."""
    import dataclasses

    chosen = range(rank, len(batch.groups), ranks)
    return StepBatch(
        prompts=[batch.prompts[i] for i in chosen],
        rl_step=batch.rl_step,
        groups=[dataclasses.replace(batch.groups[i], index=k) for k, i in enumerate(chosen)],
        scores=[batch.scores[i] for i in chosen],
    )


class GradientRecorder(torch.optim.SGD):
    """An optimizer that keeps the gradients of its last step instead of moving the weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.recorded: dict[str, torch.Tensor] = {}
        super().__init__([p for _, p in self.named], lr=0.0)

    def step(self, closure=None) -> None:
        for name, parameter in self.named:
            gradient = parameter.grad
            if gradient is not None and hasattr(gradient, "full_tensor"):
                gradient = gradient.full_tensor()
            self.recorded[name] = gradient.clone() if gradient is not None else torch.zeros(parameter.shape)


def mark_informative(batch: StepBatch, wanted) -> StepBatch:
    """Make group i's accuracies differ only where `wanted[i]`: its first response is right, all others are wrong."""
    for i, good in enumerate(wanted):
        rights = (float(good and k == 0) for k in range(len(batch.groups[i].responses)))
        batch.scores[i] = tuple(Score(right, 1.0, right) for right in rights)
    return batch
