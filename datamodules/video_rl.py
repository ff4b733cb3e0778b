"""`VideoRLDataModule`: annotation files and media in, one `StepBatch` per optimisation step out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

from datamodules.annotations import ValidationReport, load_samples
from datamodules.prompts import PromptTemplates
from datamodules.roots import anchor
from datamodules.sampling import EpochOrder, MixtureOrder, SequentialOrder, ShuffledOrder
from datamodules.steps import Shard, StepDataset, StepLoader
from datamodules.types import Sample
from datamodules.video.cache import SourceMode, VideoCache
from datamodules.video.decode import check_decoder
from datamodules.video.service import DecodeService
from datamodules.video.spec import ImageSpec, MediaRules, VideoSpec

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from datamodules.lengths import Length
    from datamodules.prepare import SamplePreparer

logger = logging.getLogger(__name__)


class VideoRLDataModule(L.LightningDataModule):
    """Serves image, video, mixed and text samples for RL, supervised warm starts and evaluation.

    The order of training samples is a pure function of (seed, step): step k uses the positions [k*B, (k+1)*B) of the
    endless order, rank r of W its r-th contiguous part. To resume, set `start_step` before fit.

    Args:
        model_path: folder (or hub name) whose processor defines tokenizer, chat template and patch sizes.
        train_files: annotation files of the training split.
        val_files: annotation files of the held-out split; may be empty.
        media_root: relative media paths start here.
        cache_dir: where decoded clips are stored; None = nowhere.
        cache_codec: `raw`, `lossless` or `jpeg`.
        source_mode: `prefer_cache`, `cache_only` or `decode`.
        cache_max_gb: size limit of the cache, evicting the least recently used; None = no limit.
        artifact_dir: folder of EasyVideoR1's `.pt` files, used where a record has `preprocessed_video`; None = decode.
        stage_dir: node-local folder for copies of cached clips; None = read `cache_dir` directly.
        fps: sampled frames per second.
        max_frames: most frames per video.
        min_frames: fewest frames per video.
        video_max_pixels: most pixels per frame; None = the family's rule.
        video_min_pixels: fewest pixels per frame; None = the family's rule.
        video_total_pixels: pixels of all frames of one video; None = the family's rule.
        image_max_pixels: most pixels per image, independent of the videos' budget.
        image_min_pixels: fewest pixels per image.
        decoder: `pyav`, `torchcodec` or `decord`.
        conceal_damage: use what the decoder guesses for damaged parts of a stream; False = such a video is refused.
        decode_timeout_s: seconds after which decoding one clip is given up (in a separate process); None = no limit,
            decode in the loader's process.
        max_prompt_tokens: longer prompts are dropped, never cut; None = no limit.
        filter_overlong: find overlong prompts before training (from metadata, without decoding) instead of meeting
            them in a batch.
        rollout_batch_size: prompts per step over all ranks.
        val_batch_size: prompts per validation batch over all ranks.
        num_workers: loader processes per rank.
        prefetch: steps each worker prepares ahead.
        worker_start_method: how loader processes start.
        prompt_templates: built-in set, folder of templates, or one template file.
        prompt_overrides: problem type -> template file.
        system_prompt: system message; None = the chat template's default.
        problem_types: problem types known in addition to the built-in list.
        mixture_weights: share of each training file; None = in proportion to their sizes.
        order: a sampler's class path result, called with the training samples (see `datamodules.orders`); None =
            shuffled every epoch.
        shuffle: False = file order (ignored with `mixture_weights` or `order`).
        max_train_samples: use only the first so many training samples.
        max_val_samples: use only the first so many held-out samples.
        seed: seed of the order.
        strict: any issue in the annotation files is an error.
        max_steps: steps of the whole run; set by the run's configuration.
    """

    def __init__(
        self,
        model_path: str,
        train_files: Sequence[str] | str = (),
        val_files: Sequence[str] | str = (),
        media_root: str | None = None,
        cache_dir: str | None = None,
        cache_codec: str = "lossless",
        source_mode: SourceMode = "prefer_cache",
        cache_max_gb: float | None = None,
        artifact_dir: str | None = None,
        stage_dir: str | None = None,
        fps: float = 2.0,
        max_frames: int = 128,
        min_frames: int = 4,
        video_max_pixels: int | None = 262144,
        video_min_pixels: int | None = None,
        video_total_pixels: int | None = None,
        image_max_pixels: int | None = 1048576,
        image_min_pixels: int | None = None,
        decoder: str = "pyav",
        conceal_damage: bool = False,
        decode_timeout_s: float | None = None,
        max_prompt_tokens: int | None = None,
        filter_overlong: bool = True,
        rollout_batch_size: int = 8,
        val_batch_size: int = 8,
        num_workers: int = 0,
        prefetch: int = 2,
        worker_start_method: str = "fork",
        prompt_templates: str = "default",
        prompt_overrides: Mapping[str, str] | None = None,
        system_prompt: str | None = None,
        problem_types: Sequence[str] = (),
        mixture_weights: Sequence[float] | None = None,
        order: object | None = None,
        shuffle: bool = True,
        max_train_samples: int | None = None,
        max_val_samples: int | None = None,
        seed: int = 0,
        strict: bool = False,
        max_steps: int = 1,
    ) -> None:
        super().__init__()
        for name, value in (("rollout_batch_size", rollout_batch_size), ("val_batch_size", val_batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.model_path = model_path
        self.train_files, self.val_files = _listed(train_files), _listed(val_files)
        if mixture_weights is not None and len(mixture_weights) != len(self.train_files):
            raise ValueError(f"{len(mixture_weights)} mixture_weights for {len(self.train_files)} train_files")
        self.media_root = media_root
        self.video_options = {
            "fps": fps,
            "min_frames": min_frames,
            "max_frames": max_frames,
            "min_pixels": video_min_pixels,
            "max_pixels": video_max_pixels,
            "total_pixels": video_total_pixels,
            "decoder": decoder,
            "conceal_damage": conceal_damage,
        }
        self.image_options = {"min_pixels": image_min_pixels, "max_pixels": image_max_pixels}
        self.cache = VideoCache(
            cache_dir,
            media_root,
            codec=cache_codec,
            source_mode=source_mode,
            max_bytes=None if cache_max_gb is None else int(cache_max_gb * 1e9),
            stage_dir=stage_dir,
            decode_clip=None if decode_timeout_s is None else DecodeService(decode_timeout_s),
        )
        self.decode_timeout_s = decode_timeout_s
        self.max_prompt_tokens = max_prompt_tokens
        self.filter_overlong = filter_overlong
        self.rollout_batch_size, self.val_batch_size = rollout_batch_size, val_batch_size
        self.num_workers, self.prefetch, self.worker_start_method = num_workers, prefetch, worker_start_method
        self.templates = PromptTemplates(prompt_templates, prompt_overrides, system_prompt)
        self.artifact_dir = artifact_dir
        self.problem_types = tuple(problem_types)
        self.mixture_weights = mixture_weights
        self.order_factory = order
        self.shuffle = shuffle
        self.max_train_samples, self.max_val_samples = max_train_samples, max_val_samples
        self.seed, self.strict = seed, strict
        self.start_step = 0
        """First step that the training loader yields; set before fit to resume."""
        self.max_steps = max_steps
        """Number of steps of the whole run; the loader ends there."""
        self.report: ValidationReport | None = None
        """What was wrong in the training files; after `setup`."""
        self.lengths: list[Length] = []
        """Prompt lengths of all training samples, the dropped ones too; after `setup` with `filter_overlong`."""
        self.dropped: list[tuple[str, int]] = []
        """(uid, tokens) of training samples that are too long; after `setup`."""
        self.train_samples: list[Sample] = []
        self.val_samples: list[Sample] = []
        self._train_groups: list[list[Sample]] = []
        self._shard: Shard | None = None
        self._processor: ProcessorMixin | None = None
        self._preparer: SamplePreparer | None = None
        self._ready = False

    def setup(self, stage: str | None = None) -> None:
        """Read and check the annotation files.

        Raises:
            ValueError: a file cannot be read, nothing is left, or `strict` and there are issues.
        """
        if self._ready:
            return
        check_decoder(self.video_options["decoder"])
        groups, self.report = load_samples(self.train_files, self.problem_types, self.strict, self.artifact_dir)
        groups = [anchor(g, f, self.media_root) for g, f in zip(groups, self.train_files, strict=True)]
        self._train_groups = _limited(groups, self.max_train_samples)
        self.train_samples = [sample for group in self._train_groups for sample in group]
        val_groups, _ = load_samples(self.val_files, self.problem_types, self.strict, self.artifact_dir)
        val_groups = [anchor(g, f, self.media_root) for g, f in zip(val_groups, self.val_files, strict=True)]
        self.val_samples = [sample for group in _limited(val_groups, self.max_val_samples) for sample in group]
        if self.filter_overlong and self.max_prompt_tokens is not None and self.train_samples:
            self._drop_overlong()
        if self.train_files and not self.train_samples:
            raise ValueError(f"no usable sample in train_files {self.train_files}\n{self.report.text()}")
        self._ready = True

    def _drop_overlong(self) -> None:
        """Remove prompts above `max_prompt_tokens`; every rank removes the same ones."""
        from datamodules.lengths import overlong, prompt_lengths

        self.lengths = prompt_lengths(self.train_samples, self.preparer, self.cache.folder)
        found = [(length.uid, length.tokens) for length in overlong(self.lengths, self.max_prompt_tokens)]
        self.dropped = agreed(found)
        if not self.dropped:
            return
        logger.warning(
            "%d of %d samples exceed max_prompt_tokens=%d and are dropped: %s%s",
            len(self.dropped),
            len(self.train_samples),
            self.max_prompt_tokens,
            ", ".join(f"{uid} ({tokens})" for uid, tokens in self.dropped[:10]),
            " ..." if len(self.dropped) > 10 else "",
        )
        gone = {uid for uid, _ in self.dropped}
        self._train_groups = [[s for s in group if s.uid not in gone] for group in self._train_groups]
        self.train_samples = [sample for group in self._train_groups for sample in group]

    def set_rank(self, rank: int, world: int) -> None:
        """Fix this process's data-parallel rank, instead of taking it from the trainer."""
        self._shard = Shard(rank, world)

    @property
    def shard(self) -> Shard:
        """This process's share of every global batch."""
        if self._shard is not None:
            return self._shard
        if self.trainer is not None:
            return Shard(self.trainer.global_rank, self.trainer.world_size)
        return Shard()

    @property
    def processor(self) -> ProcessorMixin:
        """The model's Hugging Face processor, loaded on first use."""
        if self._processor is None:
            from datamodules.prepare import load_processor

            self._processor = load_processor(self.model_path)
        return self._processor

    @property
    def rules(self) -> MediaRules:
        """How the model family writes media into prompts."""
        return MediaRules.from_processor(self.processor)

    @property
    def preparer(self) -> SamplePreparer:
        """Prepares single samples; training and validation share it, and so do evaluation and preprocessing."""
        if self._preparer is None:
            from datamodules.prepare import SamplePreparer

            rules = self.rules
            self._preparer = SamplePreparer(
                self.processor,
                rules,
                VideoSpec.for_rules(rules, **self.video_options),
                ImageSpec.for_rules(rules, **self.image_options),
                self.cache,
                self.templates,
                self.max_prompt_tokens,
            )
        return self._preparer

    def train_order(self) -> EpochOrder:
        """The endless order over `train_samples`."""
        if self.order_factory is not None:
            return self.order_factory(samples=self.train_samples, seed=self.seed, datamodule=self)
        if self.mixture_weights is not None:
            return MixtureOrder([len(g) for g in self._train_groups], self.mixture_weights, self.seed)
        count = len(self.train_samples)
        return ShuffledOrder(count, self.seed) if self.shuffle else SequentialOrder(count)

    def train_dataloader(self) -> StepLoader:
        """Batches of the steps `start_step` .. `max_steps - 1` of this rank.

        Raises:
            ValueError: `rollout_batch_size` does not divide by the number of ranks.
        """
        self.setup()
        shard = self.shard
        _check_divides("rollout_batch_size", self.rollout_batch_size, shard.world)
        dataset = StepDataset(self.train_samples, self.train_order(), self.rollout_batch_size, shard, self.preparer)
        return self._loader(dataset, self.start_step, self.max_steps)

    def val_dataloader(self) -> StepLoader | list:
        """One pass over the held-out split, in file order; every rank gets the same number of batches."""
        self.setup()
        if not self.val_samples:
            return []
        count = len(self.val_samples)
        dataset = StepDataset(
            self.val_samples, SequentialOrder(count), self.val_batch_size, self.shard, self.preparer, count
        )
        return self._loader(dataset, 0, -(-count // self.val_batch_size))

    def _loader(self, dataset: StepDataset, start: int, stop: int) -> StepLoader:
        return StepLoader(dataset, start, stop, self.num_workers, self.prefetch, self.worker_start_method)


def agreed(value: Any) -> Any:
    """Rank 0's value on every rank: nodes may see different files, but must train on the same list."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _listed(files: Sequence[str] | str) -> list[str]:
    return [files] if isinstance(files, (str, Path)) else [str(file) for file in files]


def _limited(groups: list[list[Sample]], limit: int | None) -> list[list[Sample]]:
    if limit is None:
        return groups
    left, out = limit, []
    for group in groups:
        out.append(group[:left])
        left -= len(out[-1])
    return out


def _check_divides(name: str, value: int, world: int) -> None:
    if value % world:
        near = max(world, value // world * world)
        raise ValueError(f"{name}={value} does not divide by {world} data-parallel ranks; use for example {near}")
