"""Prepared samples of every modality, made with the Hugging Face processor directly, and its reference log-probs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from datamodules.common.seeds import response_seed
from datamodules.types import PreparedImage, PreparedSample, PreparedVideo, Sample
from lightning_modules.families.positions import chain_positions
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rollout.callback import resolve_sampling
from rollout.types import Engine, GenerateRequest, SamplingSpec

MODALITIES = ("text", "image", "video", "two videos", "image and video")


def make_video(
    seed: int, frames: int = 8, height: int = 64, width: int = 96, fps: float = 8.0, patch: int = 16
) -> PreparedVideo:
    """Random frames whose four-frame stride at `fps` gives non-trivial timestamps; sizes are for patches of 16."""
    from transformers.video_utils import VideoMetadata

    height, width = height // 16 * patch, width // 16 * patch
    pixels = np.random.default_rng(seed).integers(0, 255, (frames, 3, height, width), dtype=np.uint8)
    metadata = VideoMetadata(
        total_num_frames=frames * 4,
        fps=fps,
        frames_indices=list(range(0, frames * 4, 4)),
        width=width,
        height=height,
        duration=frames * 4 / fps,
        video_backend="pyav",
    )
    grid = (frames // 2, height // patch, width // patch)
    return PreparedVideo(pixels, metadata, grid, hashlib.sha256(pixels.tobytes() + str(fps).encode()).hexdigest())


def make_image(seed: int, height: int = 96, width: int = 64, patch: int = 16) -> PreparedImage:
    height, width = height // 16 * patch, width // 16 * patch
    pixels = np.random.default_rng(seed).integers(0, 255, (3, height, width), dtype=np.uint8)
    return PreparedImage(pixels, (1, height // patch, width // patch), hashlib.sha256(pixels.tobytes()).hexdigest())


def make_sample(processor, modality: str, uid: str | None = None, seed: int = 0, question: str = "What colour?"):
    """One prepared sample of a modality, its ids from the processor."""
    patch = processor.image_processor.patch_size
    images = [make_image(seed + 10, patch=patch)] if "image" in modality else []
    videos = [make_video(seed + 20, patch=patch)] if "video" in modality else []
    if modality == "two videos":
        # 29.97 fps: timestamps that are no round numbers.
        videos.append(make_video(seed + 30, frames=4, height=96, width=64, fps=29.97, patch=patch))
    content = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
    message = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
    text = processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    inputs = processor_inputs(processor, text, images, videos)
    data_type = "mixed" if images and videos else "image" if images else "video" if videos else "text"
    sample = Sample(uid or f"{modality}:{seed}", question, "red", "open-ended", data_type)
    return PreparedSample(
        sample=sample,
        prompt_text=text,
        prompt_ids=tuple(processor.tokenizer(text)["input_ids"]),
        expanded_ids=tuple(inputs["input_ids"][0].tolist()),
        images=tuple(images),
        videos=tuple(videos),
    )


def processor_inputs(processor, text, images, videos):
    options = {}
    if images:
        options["images"] = [torch.from_numpy(image.pixels) for image in images]
    if videos:
        options["videos"] = [torch.from_numpy(video.frames) for video in videos]
        options["video_metadata"] = [video.metadata for video in videos]
        options["do_sample_frames"] = False
    if options:
        options["do_resize"] = False
    return processor(text=[text], return_tensors="pt", **options)


def reference_logprobs(model, processor, prompt, token_ids, temperature=1.0, banned=()) -> np.ndarray:
    """Log-probs of a response by one full forward of the transformers model (sdpa, float32)."""
    inputs = processor_inputs(processor, prompt.prompt_text, prompt.images, prompt.videos)
    response = torch.tensor([[int(t) for t in token_ids]])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], response], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if prompt.images or prompt.videos:
        kinds = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(response)], dim=1)
        inputs["mm_token_type_ids"] = kinds
        grids = {
            key: inputs[key] for key in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts") if key in inputs
        }
        positions, _ = model.base_model.get_rope_index(inputs["input_ids"], mm_token_type_ids=kinds, **grids)
        inputs["position_ids"] = chain_positions(positions[:, 0], kinds[0])[:, None]
    else:
        inputs.pop("mm_token_type_ids", None)
        model.base_model.rope_deltas = None
    with torch.inference_mode():
        logits = model(**inputs).logits[0, -response.shape[1] - 1 : -1].float()
        logits[:, list(banned)] = float("-inf")
        return (logits / temperature).log_softmax(-1).gather(1, response.T)[:, 0].numpy()


def model_token_ids(folder, family=None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(banned ids, stop ids) of a saved model; the tiny Qwen3-VL without a family."""
    spec = resolve_sampling(SamplingSpec(), folder, family or Qwen3VLFamily())
    return spec.banned_ids, spec.stop_ids


def make_requests(prompts, spec: SamplingSpec, seed: int = 0, step: int = 0) -> list[GenerateRequest]:
    """n requests per prompt with the seeds that a run would use."""
    return [
        GenerateRequest(f"{i}/{k}", prompt, spec, response_seed(seed, step, prompt.uid, k))
        for i, prompt in enumerate(prompts)
        for k in range(spec.n)
    ]


@dataclass(frozen=True)
class LogprobGap:
    """How far engine and trainer disagree about sampled tokens."""

    max_difference: float
    """Largest absolute difference of log-probs."""
    kl: float
    """Mean of engine minus trainer log-prob over the sampled tokens: an estimate of KL(engine, trainer)."""
    num_tokens: int


def logprob_gate(
    engine: Engine,
    requests: Sequence[GenerateRequest],
    score: Callable[[PreparedSample, np.ndarray], np.ndarray],
    bound: float,
) -> LogprobGap:
    """Generate and compare the engine's log-probs with the trainer's.

    Args:
        engine: the engine under test.
        requests: what to generate.
        score: gives the trainer's log-probs float32 [L] of response token ids int32 [L] to a prompt, under the same
            temperature and ban.
        bound: largest tolerated absolute difference (1e-5 is right for float32; bfloat16 needs about 0.1).

    Raises:
        RuntimeError: a token exceeds the bound; names sample, token, position and both values.
    """
    prompts = {request.request_id: request.prompt for request in requests}
    total, tokens, worst = 0.0, 0, 0.0
    for request_id, response in engine.generate(requests):
        prompt = prompts[request_id]
        expected = np.asarray(score(prompt, response.token_ids), dtype=np.float64)
        difference = response.logprobs.astype(np.float64) - expected
        place = int(np.abs(difference).argmax())
        # `not <=` also catches NaN.
        if not abs(difference[place]) <= bound:
            raise RuntimeError(
                f"sample {prompt.uid}: engine and trainer disagree about token {int(response.token_ids[place])} at "
                f"response position {place}: log-prob {response.logprobs[place]:.6f} against {expected[place]:.6f}, "
                f"bound {bound:g}. Training would reinforce what another model said"
            )
        total, tokens = total + float(difference.sum()), tokens + len(difference)
        worst = max(worst, abs(float(difference[place])))
    return LogprobGap(worst, total / max(tokens, 1), tokens)
