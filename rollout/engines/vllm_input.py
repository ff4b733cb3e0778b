"""Our prompts and sampling as vLLM's, and vLLM's answers as ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from rollout.engines.checks import check_prompt_ids, check_response_ids
from rollout.types import Response, SampleError

if TYPE_CHECKING:
    from datamodules.types import PreparedSample
    from rollout.types import EngineFamily, GenerateRequest


def render(renderer: Any, family: EngineFamily, prompt: PreparedSample) -> Any:
    """One sample as vLLM's engine input, with the processor's token ids and times.

    Args:
        renderer: of the vLLM engine.
        family: the model's.
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
        seconds = family.seconds_per_grid([video.metadata.sampled_fps for video in prompt.videos])
        for item, value in zip(engine_input.get("mm_kwargs", {}).get("video", ()), seconds, strict=False):
            if "second_per_grid_ts" in item:  # vLLM filled in the rate of its own choice
                item["second_per_grid_ts"].data = torch.tensor(value)
    return engine_input


def read_response(request: GenerateRequest, output: Any, tokenizer: Any) -> Response:
    """vLLM's finished output as our response.

    Raises:
        RuntimeError: other prompt ids than the processor's, a banned token, or neither stopped nor at its length.
    """
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


def sampling_params(request: GenerateRequest) -> Any:
    """vLLM's SamplingParams of one request: exactly what the SamplingSpec says."""
    from vllm import SamplingParams

    spec = request.sampling
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
