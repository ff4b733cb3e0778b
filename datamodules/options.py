"""The settings of `VideoRLDataModule`, explained where they are defined; `conf/data/base.yaml` lists the same keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from datamodules.video.cache import SourceMode

if TYPE_CHECKING:
    from datamodules.sampling import EpochOrder


@dataclass(frozen=True)
class DataOptions:
    """Plain, typed settings; relations between them are checked here."""

    media_root: str | None = None
    """Relative media paths start here."""
    cache_dir: str | None = None
    """Where decoded clips are stored; None = nowhere."""
    cache_codec: Literal["raw", "lossless", "jpeg"] = "lossless"
    """`raw` (memory-mapped), `lossless` or `jpeg` (lossy)."""
    source_mode: SourceMode = "prefer_cache"
    """`prefer_cache` decodes and stores what is missing, `cache_only` reports it as lost, `decode` uses no cache."""
    cache_max_gb: float | None = None
    """Size limit of the cache, evicting what was used longest ago; None = no limit."""
    artifact_dir: str | None = None
    """Folder of EasyVideoR1's `.pt` files, used where a record has `preprocessed_video`; None = decode the video."""
    stage_dir: str | None = None
    """Node-local folder for copies of cached clips (slow shared storage); None = read `cache_dir` directly."""
    fps: float = 2.0
    """Sampled frames per second of video."""
    max_frames: int = 128
    """Most frames per video."""
    min_frames: int = 4
    """Fewest frames per video."""
    video_max_pixels: int | None = 262144
    """Most pixels per frame; None = the family's rule."""
    video_min_pixels: int | None = None
    """Fewest pixels per frame; None = 128 visual tokens."""
    video_total_pixels: int | None = None
    """Pixels of all frames of one video; None = the family's rule."""
    image_max_pixels: int | None = 1048576
    """Most pixels per image, independent of the videos' budget."""
    image_min_pixels: int | None = None
    """Fewest pixels per image; None = 4 visual tokens."""
    decoder: Literal["pyav", "torchcodec", "decord"] = "pyav"
    """`pyav`, `torchcodec` or `decord`."""
    conceal_damage: bool = False
    """Use what the decoder guesses for damaged parts of a stream; False = such a video is refused."""
    decode_timeout_s: float | None = None
    """Seconds after which decoding one clip is given up (in a process of its own); None = decode in the loader."""
    max_prompt_tokens: int | None = None
    """Longer prompts are dropped, never cut; None = no limit."""
    filter_overlong: bool = True
    """Find overlong prompts before training, from metadata, instead of meeting them in a batch."""
    rollout_batch_size: int = 8
    """Prompts per step over all ranks."""
    val_batch_size: int = 8
    """Prompts per validation batch over all ranks."""
    num_workers: int = 0
    """Loader processes per rank; 0 = prepare in the trainer's process."""
    prefetch: int = 2
    """Steps each loader process prepares ahead."""
    worker_start_method: Literal["fork", "spawn", "forkserver"] = "fork"
    """`fork`, `spawn` or `forkserver`."""
    prompt_templates: str = "default"
    """Built-in set, folder of templates, or one template file."""
    prompt_overrides: Mapping[str, str] | None = None
    """Problem type -> template file, on top of the set."""
    system_prompt: str | None = None
    """System message; None = the chat template's default."""
    mixture_weights: Sequence[float] | None = None
    """Share of each training file; None = in proportion to their sizes."""
    order: Callable[..., EpochOrder] | None = None
    """Makes the order of training samples, see `datamodules.orders`; None = shuffled every epoch."""
    shuffle: bool = True
    """False = file order (without `mixture_weights` and `order`)."""
    max_train_samples: int | None = None
    """Use only the first so many training samples."""
    max_val_samples: int | None = None
    """Use only the first so many held-out samples."""
    seed: int = 0
    """Seed of the order."""
    strict: bool = False
    """Any issue in the annotation files is an error."""
    max_steps: int = 1
    """Steps of the whole run."""

    def __post_init__(self) -> None:
        for name in ("rollout_batch_size", "val_batch_size", "prefetch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers} must not be negative")
        if self.worker_start_method not in ("fork", "spawn", "forkserver"):
            raise ValueError(f"worker_start_method={self.worker_start_method!r}: use fork, spawn or forkserver")
        if self.order is not None and self.mixture_weights is not None:
            raise ValueError("order and mixture_weights are both set; an order decides the mixture itself")

    def video_settings(self) -> dict[str, Any]:
        """Arguments of `VideoSpec` that do not come from the model family."""
        return {
            "fps": self.fps,
            "min_frames": self.min_frames,
            "max_frames": self.max_frames,
            "min_pixels": self.video_min_pixels,
            "max_pixels": self.video_max_pixels,
            "total_pixels": self.video_total_pixels,
            "decoder": self.decoder,
            "conceal_damage": self.conceal_damage,
        }

    def image_settings(self) -> dict[str, Any]:
        """Arguments of `ImageSpec` that do not come from the model family."""
        return {"min_pixels": self.image_min_pixels, "max_pixels": self.image_max_pixels}
