"""Our types as vLLM's and back: options, prompts with prepared media, sampling parameters, responses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engines.checks import check_prompt_ids, check_response_ids
from rollout.tokens import seconds_per_grid
from rollout.types import Response, SampleError

if TYPE_CHECKING:
    from datamodules.types import PreparedSample
    from rollout.types import GenerateRequest, SamplingSpec

_BYTES_PER_GIB = 1024**3


def fixed_options(model_path: str | Path, kv_cache_gib: float | None) -> dict[str, Any]:
    """Settings of vLLM that are not a choice here, for every engine of ours."""
    import torch

    options: dict[str, Any] = {
        # The cache of processed inputs would hold every video of the run; a prompt is rendered once anyway.
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": one_normalisation(model_path),
        # Log-probs of the distribution actually sampled, so that they compare with the trainer's.
        "logprobs_mode": "processed_logprobs",
        # Sampling parameters come from SamplingSpec, never from the model's generation_config.json.
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
    }
    if kv_cache_gib is not None and torch.cuda.is_available():
        options["kv_cache_memory_bytes"] = int(kv_cache_gib * _BYTES_PER_GIB)
    return options


def one_normalisation(model_path: str | Path) -> bool:
    """Whether images and videos are normalised alike, so that vLLM may do it on the device.

    vLLM takes the image processor's mean and deviation for both. Where the video processor has others the engine
    would see other colours than the trainer, with equal token ids.
    """
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model_path)
    image, video = getattr(processor, "image_processor", None), getattr(processor, "video_processor", None)
    fields = ("image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize")
    return video is None or all(_as_list(image, field) == _as_list(video, field) for field in fields)


def _as_list(processor: Any, field: str) -> Any:
    value = getattr(processor, field, None)
    return list(value) if isinstance(value, tuple | list) else value


def render(renderer: Any, processor: Any, prompt: PreparedSample) -> Any:
    """One sample as vLLM's engine input, with the processor's token ids and times.

    Args:
        renderer: of the vLLM engine.
        processor: the model's.
        prompt: the sample.

    Raises:
        SampleError: it cannot be rendered.
        RuntimeError: vLLM's token ids differ from the processor's.
    """
    try:
        (engine_input,) = renderer.render_cmpl([prompt_dict(prompt)])
    except Exception as error:  # whatever the renderer raises, the user needs to know which sample it was
        raise SampleError(prompt.uid, f"the engine cannot render the prompt: {error}") from error
    check_prompt_ids(prompt, engine_input["prompt_token_ids"])
    if prompt.videos:
        correct_times(engine_input, seconds_per_grid(processor, prompt))
    return engine_input


def read_response(request: GenerateRequest, output: Any, tokenizer: Any) -> Response:
    """vLLM's finished output as our response.

    Raises:
        RuntimeError: other prompt ids than the processor's, a banned token, or an end that is none.
    """
    import numpy as np

    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    check_response_ids(request, tokens)
    check_prompt_ids(request.prompt, output.prompt_token_ids)
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"sample {request.prompt.uid}: the engine ended with {completion.finish_reason!r}")
    logprobs = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
    return Response(
        token_ids=np.asarray(tokens, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        finish_reason=completion.finish_reason,
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        seed=request.seed,
        prompt_token_ids=request.prompt.expanded_ids,
    )


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
