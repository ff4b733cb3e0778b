"""Write a scored batch to disk and read it back, to repeat an update that went wrong."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from datamodules.types import PreparedSample, StepBatch
    from rewards.base import Score
    from rollout.types import Response, RolloutGroup


def dump_batch(batch: StepBatch, path: Path) -> Path:
    """Save `batch` (media included) as tensors and plain values; loadable with `weights_only=True`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(pack_batch(batch), path)
    return path


def load_batch(path: Path) -> StepBatch:
    """Read what `dump_batch` wrote."""
    return unpack_batch(torch.load(path, weights_only=True))


def pack_batch(batch: StepBatch) -> dict[str, Any]:
    """`batch` as tensors and plain values."""
    return {
        "rl_step": batch.rl_step,
        "lost": [list(item) for item in batch.lost],
        "groups": [_group(group) for group in batch.groups],
        "scores": [[_score(score) for score in scores] for scores in batch.scores],
        "greedy_scores": [_score(s) if s is not None else None for s in getattr(batch, "greedy_scores", None) or []],
    }


def unpack_batch(content: dict[str, Any]) -> StepBatch:
    """Undo `pack_batch`."""
    from datamodules.types import StepBatch
    from rewards.base import Score

    groups = [_read_group(item) for item in content["groups"]]
    batch = StepBatch(
        prompts=[group.prompt for group in groups],
        rl_step=content["rl_step"],
        lost=[tuple(item) for item in content["lost"]],
        groups=groups,
        scores=[tuple(Score(**score) for score in scores) for scores in content["scores"]],
    )
    if content["greedy_scores"]:
        batch.greedy_scores = [Score(**s) if s is not None else None for s in content["greedy_scores"]]
    return batch


def _score(score: Score) -> dict[str, Any]:
    return _plain(asdict(score))


def _plain(value: Any) -> Any:
    """Containers and numbers that `weights_only` loading accepts; other objects become text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)


def _group(group: RolloutGroup) -> dict[str, Any]:
    return {
        "index": group.index,
        "prompt": _prompt(group.prompt),
        "responses": [_response(response) for response in group.responses],
        "greedy": _response(group.greedy) if group.greedy is not None else None,
    }


def _response(response: Response) -> dict[str, Any]:
    return {
        "token_ids": torch.as_tensor(response.token_ids),
        "logprobs": torch.as_tensor(response.logprobs),
        "finish_reason": response.finish_reason,
        "text": response.text,
        "seed": response.seed,
        "offline": response.offline,
        "source": torch.as_tensor(response.source) if response.source is not None else None,
    }


def _prompt(prompt: PreparedSample) -> dict[str, Any]:
    sample = prompt.sample
    return {
        "sample": {
            "uid": sample.uid,
            "problem": sample.problem,
            "answer": sample.answer,
            "problem_type": sample.problem_type,
            "data_type": sample.data_type,
            "data_source": sample.data_source,
        },
        "prompt_text": prompt.prompt_text,
        "prompt_ids": list(prompt.prompt_ids),
        "expanded_ids": list(prompt.expanded_ids),
        "images": [{"pixels": torch.tensor(i.pixels), "grid": list(i.grid), "digest": i.digest} for i in prompt.images],
        "videos": [
            {
                "frames": torch.tensor(v.frames),
                "metadata": _metadata(v.metadata),
                "grid": list(v.grid),
                "digest": v.digest,
            }
            for v in prompt.videos
        ],
    }


def _metadata(metadata: Any) -> dict[str, Any]:
    values = {key: getattr(metadata, key, None) for key in ("total_num_frames", "fps", "width", "height", "duration")}
    indices = metadata.frames_indices
    return {**_plain(values), "frames_indices": [int(i) for i in indices] if indices is not None else None}


def _read_group(item: dict[str, Any]) -> RolloutGroup:
    from rollout.types import Response, RolloutGroup

    def response(values: dict[str, Any]) -> Response:
        arrays = {key: values[key].numpy() for key in ("token_ids", "logprobs", "source") if values[key] is not None}
        return Response(**{**values, **arrays})

    return RolloutGroup(
        index=item["index"],
        prompt=_read_prompt(item["prompt"]),
        responses=tuple(response(values) for values in item["responses"]),
        greedy=response(item["greedy"]) if item["greedy"] is not None else None,
    )


def _read_prompt(item: dict[str, Any]) -> PreparedSample:
    from transformers.video_utils import VideoMetadata

    from datamodules.types import PreparedImage, PreparedSample, PreparedVideo, Sample

    return PreparedSample(
        sample=Sample(**item["sample"]),
        prompt_text=item["prompt_text"],
        prompt_ids=tuple(item["prompt_ids"]),
        expanded_ids=tuple(item["expanded_ids"]),
        images=tuple(PreparedImage(i["pixels"].numpy(), tuple(i["grid"]), i["digest"]) for i in item["images"]),
        videos=tuple(
            PreparedVideo(v["frames"].numpy(), VideoMetadata(**v["metadata"]), tuple(v["grid"]), v["digest"])
            for v in item["videos"]
        ),
    )
