"""Settings that every vLLM engine of ours takes, in the trainer's process or in one of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch

from datamodules.prepare import load_processor
from rollout.model_folder import model_folder
from rollout.types import EngineFamily

_BYTES_PER_GIB = 1024**3


@dataclass(eq=False)
class VLLMSettings:
    """Base of the engines: their arguments, checked, and what becomes of them inside vLLM."""

    model_path: str | Path
    """Hugging Face folder or hub name; gives architecture, tokenizer, processor and the first weights."""
    family: EngineFamily
    """The model's family."""
    _: KW_ONLY
    dtype: str = "bfloat16"
    """Engine precision: bfloat16, float16 or float32."""
    max_model_len: int = 4096
    """Longest prompt + response in tokens."""
    tensor_parallel_size: int = 1
    """Devices that share one engine."""
    gpu_memory_utilization: float = 0.5
    """Share of device memory for weights and KV cache (CUDA)."""
    kv_cache_gib: float | None = None
    """KV cache size in GiB; None = from `gpu_memory_utilization` (1 on CPU)."""
    max_num_seqs: int = 256
    """Most responses in flight inside the engine."""
    max_num_batched_tokens: int | None = None
    """Tokens per engine step; longer prompts are prefilled in chunks. None = vLLM's default."""
    limit_images: int = 8
    """Most images per prompt."""
    limit_videos: int = 4
    """Most videos per prompt."""
    enforce_eager: bool = False
    """No CUDA graphs, no compilation: faster start, slower decoding."""
    quiet: bool = True
    """Keep vLLM's logger at errors (unless VLLM_LOGGING_LEVEL says otherwise)."""
    extra_options: Mapping[str, Any] | None = field(default_factory=dict)
    """More arguments of vLLM, as they are; they win over those above."""

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size={self.tensor_parallel_size} must be at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization} is not a share in (0, 1]")
        if self.max_model_len < 1:
            raise ValueError(f"max_model_len={self.max_model_len} must be positive")
        self.model_path = model_folder(self.model_path)
        self.family.open(str(self.model_path))

    def arguments(self, **own: Any) -> dict[str, Any]:
        """Arguments of `vllm.LLM` or `AsyncEngineArgs`: what is fixed here, the settings, `own`, `extra_options`."""
        options: dict[str, Any] = {
            "model": str(self.model_path),
            # The cache of processed inputs would hold every video of the run; a prompt is rendered once anyway.
            "mm_processor_cache_gb": 0,
            "mm_device_do_normalize": one_normalisation(self.model_path),
            # Log-probs of the distribution actually sampled, so that they compare with the trainer's.
            "logprobs_mode": "processed_logprobs",
            # Sampling parameters come from SamplingSpec, never from the model's generation_config.json.
            "generation_config": "vllm",
            "use_tqdm_on_load": False,
            "limit_mm_per_prompt": {"image": self.limit_images, "video": self.limit_videos},
        }
        for name in _SAME_NAME:
            options[name] = getattr(self, name)
        if self.kv_cache_gib is not None and torch.cuda.is_available():
            options["kv_cache_memory_bytes"] = int(self.kv_cache_gib * _BYTES_PER_GIB)
        return {**options, **own, **(self.extra_options or {})}

    def prepare_environment(self, **own: str) -> None:
        """Set what vLLM reads at its import; the user's own values stay, except for the process model in `own`."""
        os.environ.update(own)
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        cuda = torch.cuda.is_available()
        if self.quiet:
            # Its warnings come at every rendered prompt and at every sync, and say nothing that we do not check.
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            for name in ("vllm", *(() if cuda else ("torch.utils.cpp_extension",))):
                logging.getLogger(name).setLevel(logging.ERROR)
        if not cuda:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(self.kv_cache_gib or 1)))
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


_SAME_NAME = (
    "dtype",
    "max_model_len",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
)
"""Settings that vLLM calls the same."""


def one_normalisation(model_path: str | Path) -> bool:
    """Whether images and videos are normalised alike, so that vLLM may do it on the device.

    vLLM takes the image processor's mean and deviation for both. Where the video processor has others the engine
    would see other colours than the trainer, with equal token ids.
    """
    processor = load_processor(model_path)
    image, video = getattr(processor, "image_processor", None), getattr(processor, "video_processor", None)
    if video is None:
        return True

    def plain(source: Any, field: str) -> Any:
        value = getattr(source, field, None)
        return list(value) if isinstance(value, tuple | list) else value

    fields = ("image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize")
    return all(plain(image, field) == plain(video, field) for field in fields)
