"""The objects that leave the data stage. Everything downstream (rollout, rewards, trainer, evaluation) reads these.

The stages in order: a record of the user's file becomes a `Sample`; its media become `PreparedVideo` and
`PreparedImage`; together with the tokenised prompt they form a `PreparedSample`; one optimisation step's samples
travel in one `StepBatch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from transformers.video_utils import VideoMetadata

DataType = Literal["text", "image", "video", "mixed"]


@dataclass(frozen=True)
class MediaRef:
    """Where one image or video lies, before anything is decoded.

    Example: `MediaRef(path="charades/0F7LW.mp4", start=2.0, end=9.5)` is seven and a half seconds of a clip.
    """

    path: str
    """Path as written in the record: absolute, or relative to `media_root`."""
    start: float | None = None
    """Start of the used part in seconds; None = from the beginning. Videos only."""
    end: float | None = None
    """End of the used part in seconds; None = to the end. Videos only."""
    fps: float | None = None
    """Sampled frames per second of this video; None = the spec's. Videos only."""


@dataclass(frozen=True)
class Sample:
    """One record of an annotation file, checked and normalised.

    Example: `Sample(uid="charades:17", problem="When does the person sit down?", answer="[3.0, 7.5]",
    problem_type="temporal grounding", data_type="video", videos=(MediaRef("0F7LW.mp4"),))`.
    """

    uid: str
    """Stable, unique identifier: the record's `problem_id` or its place, prefixed by its source. Never renumbered."""
    problem: str
    """The question as the user wrote it; `<image>` and `<video>` in it say where the media belong."""
    answer: str
    """Ground truth without tags; the form depends on `problem_type`."""
    problem_type: str
    """Chooses the prompt template and the reward."""
    data_type: DataType
    """Which modalities the sample holds; `mixed` = images and videos."""
    options: tuple[str, ...] = ()
    """Answer options with their letters ("A. a cup"), empty unless the task has options."""
    images: tuple[MediaRef, ...] = ()
    videos: tuple[MediaRef, ...] = ()
    data_source: str = ""
    """Name of the data set, for per-source metrics."""
    offline_output: str | None = None
    """An answer written by another policy (offline trajectory), or None."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every other field of the record, untouched (tests of code tasks, frame size of boxes, pass rate, ...)."""


@dataclass(frozen=True)
class PreparedVideo:
    """Sampled, resized frames of one video with everything later stages need to place them in time.

    Example: 8 frames of 64x96 with patch 16, merge 2 and temporal patch 2 have `grid == (4, 4, 6)` and become
    4*4*6 / 2**2 = 24 visual tokens.
    """

    frames: np.ndarray
    """uint8 [T, 3, H, W], RGB; possibly a read-only memory map."""
    metadata: VideoMetadata
    """transformers' VideoMetadata; `frames_indices` are the T source indices, `fps` the source rate in 1/s."""
    grid: tuple[int, int, int]
    """(temporal, vertical, horizontal) patches before the spatial merge: (T/temporal_patch, H/patch, W/patch)."""
    digest: str
    """Hex digest of frames and metadata: equal digests mean equal model input."""


@dataclass(frozen=True)
class PreparedImage:
    """One image, resized."""

    pixels: np.ndarray
    """uint8 [3, H, W], RGB."""
    grid: tuple[int, int, int]
    """(1, vertical, horizontal) patches before the spatial merge."""
    digest: str


@dataclass(frozen=True)
class PreparedSample:
    """A sample ready for the engine and the trainer: the only thing that rollout, trainer and evaluation accept."""

    sample: Sample
    prompt_text: str
    """Chat-templated prompt with one placeholder per medium."""
    prompt_ids: tuple[int, ...]
    """Token ids of `prompt_text`, *unexpanded*: one placeholder per medium. This is what the engine is given."""
    expanded_ids: tuple[int, ...]
    """Token ids with every visual token, equal to the Hugging Face processor's `input_ids`. The trainer reads these."""
    images: tuple[PreparedImage, ...] = ()
    videos: tuple[PreparedVideo, ...] = ()

    @property
    def uid(self) -> str:
        """The sample's identifier."""
        return self.sample.uid

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt including visual tokens."""
        return len(self.expanded_ids)


@dataclass
class StepBatch:
    """One optimisation step's data on one rank; the only mutable object that stages share.

    The DataLoader fills `prompts`; the engine callback adds `groups`; the reward callback adds `scores`;
    `training_step` reads all three. It stays on the host: tensors are built per micro-batch.
    """

    prompts: list[PreparedSample]
    """This rank's prompts, in order."""
    rl_step: int = 0
    """The step these prompts belong to (0-based); a pure function of the samples consumed."""
    lost: list[tuple[str, str]] = field(default_factory=list)
    """(uid, reason) of samples of this step and rank that could not be prepared; nothing replaces them."""
    groups: list[Any] = field(default_factory=list)
    """`rollout.types.RolloutGroup` per prompt, in the order of `prompts`."""
    scores: list[Any] = field(default_factory=list)
    """Per group a tuple of `rewards.base.Score`, one per response, in the order of `groups`."""
    greedy_scores: list[Any] = field(default_factory=list)
    """Per group the `Score` of its greedy baseline response, or None; in the order of `groups`."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds spent per phase of this step (wait, sync, generate, score, ...)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Scalars of this step and rank for the loggers: `_count` names are summed over ranks, `_max` names maximised."""
