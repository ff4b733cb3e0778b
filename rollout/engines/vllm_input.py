"""Our types as vLLM's: prompts with prepared media, and sampling parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamodules.types import PreparedSample
    from rollout.types import GenerateRequest, SamplingSpec


def prompt_dict(prompt: PreparedSample) -> dict[str, Any]:
    """vLLM's prompt of a prepared sample: unexpanded ids, frames with their metadata, and no re-processing.

    The digests serve as cache keys, so that vLLM need not hash gigabytes of pixels.
    """
    result: dict[str, Any] = {"prompt_token_ids": list(prompt.prompt_ids)}
    data: dict[str, list[Any]] = {}
    uuids: dict[str, list[str]] = {}
    if prompt.images:
        from PIL import Image

        data["image"] = [Image.fromarray(image.pixels.transpose(1, 2, 0)) for image in prompt.images]
        uuids["image"] = [image.digest for image in prompt.images]
    if prompt.videos:
        data["video"] = [(video.frames, _metadata_dict(video.metadata)) for video in prompt.videos]
        uuids["video"] = [video.digest for video in prompt.videos]
    if data:
        result["multi_modal_data"] = data
        result["multi_modal_uuids"] = uuids
        result["mm_processor_kwargs"] = {"do_resize": False}
        if prompt.videos:
            result["mm_processor_kwargs"]["do_sample_frames"] = False
    return result


def correct_times(engine_input: Any, seconds: list[float]) -> None:
    """Write the videos' real seconds per temporal patch into vLLM's rendered prompt, where it holds them."""
    import torch

    for item, value in zip(engine_input.get("mm_kwargs", {}).get("video", ()), seconds, strict=False):
        if "second_per_grid_ts" in item:
            item["second_per_grid_ts"].data = torch.tensor(value)


def sampling_params(request: GenerateRequest) -> Any:
    """vLLM's SamplingParams of one request: exactly what the SamplingSpec says."""
    from vllm import SamplingParams

    spec: SamplingSpec = request.sampling
    greedy = spec.temperature == 0
    return SamplingParams(
        n=1,
        temperature=spec.temperature,
        top_p=1.0 if greedy else spec.top_p,
        top_k=0 if greedy or spec.top_k < 0 else spec.top_k,
        max_tokens=spec.max_tokens,
        seed=request.seed,
        stop_token_ids=list(spec.stop_ids),
        # The engine's own idea of an end token is switched off: stop_ids alone decide.
        ignore_eos=True,
        # Exactly minus infinity: a finite bias leaves the token a probability and shifts the log-probs.
        logit_bias={token: float("-inf") for token in spec.banned_ids} or None,
        logprobs=0,
        detokenize=False,
    )


def _metadata_dict(metadata: Any) -> dict[str, Any]:
    """The fields of transformers' VideoMetadata that place frames in time, as plain Python values."""
    return {
        "total_num_frames": int(metadata.total_num_frames),
        "fps": float(metadata.fps),
        "frames_indices": [int(index) for index in metadata.frames_indices],
        "duration": None if metadata.duration is None else float(metadata.duration),
        "video_backend": metadata.video_backend,
        "do_sample_frames": False,
    }
