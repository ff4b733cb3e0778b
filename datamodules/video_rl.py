"""`VideoRLDataModule`: annotation files and media in, one `StepBatch` per optimisation step out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

from datamodules.annotations import ValidationReport, load_samples
from datamodules.common.distributed import from_rank_zero
from datamodules.options import DataOptions
from datamodules.prompts import PromptTemplates
from datamodules.roots import anchor
from datamodules.sampling import EpochOrder, MixtureOrder, SequentialOrder, ShuffledOrder
from datamodules.steps import Shard, StepDataset, StepLoader, prompt_cost
from datamodules.types import Sample
from datamodules.video.cache import VideoCache
from datamodules.video.decode import check_decoder
from datamodules.video.service import DecodeService
from datamodules.video.spec import ImageSpec, VideoSpec

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from datamodules.lengths import Length
    from datamodules.prepare import SamplePreparer
    from datamodules.video.spec import MediaFamily, MediaSpec

logger = logging.getLogger(__name__)


class VideoRLDataModule(L.LightningDataModule):
    """Serves image, video, mixed and text samples for RL, supervised warm starts and evaluation.

    The order of training samples is a pure function of (seed, step): step k uses the positions [k*B, (k+1)*B) of the
    endless order. Where prompt lengths are known (`filter_overlong`) ranks get even shares of a step's work, otherwise
    contiguous parts. To resume, set `start_step` before fit.

    Args:
        model_path: folder (or hub name) whose processor defines tokenizer, chat template and patch sizes.
        family: the model's family, one of `lightning_modules.families`: how it writes media into prompts.
        train_files: annotation file(s) of the training split.
        val_files: annotation file(s) of the held-out split; may be empty.
        options: fields of `DataOptions`.

    Raises:
        ValueError: an option, or a combination of them, is wrong.
    """

    def __init__(
        self,
        model_path: str,
        train_files: Sequence[str] | str = (),
        val_files: Sequence[str] | str = (),
        *,
        family: MediaFamily,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = DataOptions(**options)
        self.model_path = model_path
        self.family = family
        self.train_files, self.val_files = _listed(train_files), _listed(val_files)
        weights = self.options.mixture_weights
        if weights is not None and len(weights) != len(self.train_files):
            raise ValueError(f"{len(weights)} mixture_weights for {len(self.train_files)} train_files")
        self.cache = make_cache(self.options)
        self.templates = PromptTemplates(
            self.options.prompt_templates, self.options.prompt_overrides, self.options.system_prompt
        )
        self.start_step = 0
        """First step that the training loader yields; set before fit to resume."""
        self.max_steps = self.options.max_steps
        """Number of steps of the whole run; the loader ends there."""
        self.report: ValidationReport | None = None
        """What was wrong in the training files; after `setup`."""
        self.lengths: list[Length] = []
        """Prompt lengths of all training samples, the dropped ones too; after `setup` with `filter_overlong`."""
        self.dropped: list[tuple[str, int]] = []
        """(uid, tokens) of training samples that are too long; after `setup`."""
        self._tokens: dict[str, int] = {}
        self.train_samples: list[Sample] = []
        self.val_samples: list[Sample] = []
        self._train_groups: list[list[Sample]] = []
        self._shard: Shard | None = None
        self._processor: ProcessorMixin | None = None
        self._preparer: SamplePreparer | None = None
        self._ready = False

    @property
    def rollout_batch_size(self) -> int:
        """Prompts per step over all ranks."""
        return self.options.rollout_batch_size

    def setup(self, stage: str | None = None) -> None:
        """Read and check the annotation files.

        Raises:
            ValueError: a file cannot be read, nothing is left, or `strict` and there are issues.
        """
        if self._ready:
            return
        check_decoder(self.options.decoder)
        self._train_groups, self.report = self._read(self.train_files, self.options.max_train_samples)
        self.train_samples = [sample for group in self._train_groups for sample in group]
        self.val_samples = [s for group in self._read(self.val_files, self.options.max_val_samples)[0] for s in group]
        if self.options.filter_overlong and self.options.max_prompt_tokens is not None and self.train_samples:
            self._drop_overlong()
        if self.train_files and not self.train_samples:
            raise ValueError(f"no usable sample in train_files {self.train_files}\n{self.report.text()}")
        self._ready = True

    def _read(self, files: list[str], limit: int | None) -> tuple[list[list[Sample]], ValidationReport]:
        options = self.options
        groups, report = load_samples(files, options.problem_types, options.strict, options.artifact_dir)
        groups = [anchor(group, file, options.media_root) for group, file in zip(groups, files, strict=True)]
        return _limited(groups, limit), report

    def _drop_overlong(self) -> None:
        """Remove prompts above `max_prompt_tokens`; every rank removes the same ones."""
        from datamodules.lengths import overlong, prompt_lengths

        self.lengths = prompt_lengths(self.train_samples, self.preparer, self.cache.folder)
        found = [(length.uid, length.tokens) for length in overlong(self.lengths, self.options.max_prompt_tokens)]
        # What rank 0 cannot read counts as empty: it is likely lost.
        tokens = {length.uid: length.tokens or 0 for length in self.lengths}
        self.dropped, self._tokens = from_rank_zero((found, tokens))
        if not self.dropped:
            return
        logger.warning(
            "%d of %d samples exceed max_prompt_tokens=%d and are dropped: %s%s",
            len(self.dropped),
            len(self.train_samples),
            self.options.max_prompt_tokens,
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
    def rules(self) -> MediaSpec:
        """How the model family writes media into prompts."""
        return self.family.open(self.model_path).media_spec(self.processor)

    @property
    def preparer(self) -> SamplePreparer:
        """Prepares single samples; training and validation share it, and so do evaluation and preprocessing."""
        if self._preparer is None:
            from datamodules.prepare import SamplePreparer

            rules = self.rules
            self._preparer = SamplePreparer(
                self.processor,
                rules,
                VideoSpec.for_rules(rules, **self.options.video_settings()),
                ImageSpec.for_rules(rules, **self.options.image_settings()),
                self.cache,
                self.templates,
                self.options.max_prompt_tokens,
            )
        return self._preparer

    def train_order(self) -> EpochOrder:
        """The endless order over `train_samples`."""
        if self.options.order is not None:
            return self.options.order(samples=self.train_samples, seed=self.options.seed, datamodule=self)
        if self.options.mixture_weights is not None:
            return MixtureOrder([len(g) for g in self._train_groups], self.options.mixture_weights, self.options.seed)
        count = len(self.train_samples)
        return ShuffledOrder(count, self.options.seed) if self.options.shuffle else SequentialOrder(count)

    def train_dataloader(self) -> StepLoader:
        """Batches of the steps `start_step` .. `max_steps - 1` of this rank.

        Raises:
            ValueError: `rollout_batch_size` does not divide by the number of ranks.
        """
        self.setup()
        shard = self.shard
        _check_divides("rollout_batch_size", self.rollout_batch_size, shard.world)
        costs = [prompt_cost(self._tokens[s.uid]) for s in self.train_samples] if self._tokens else None
        dataset = StepDataset(
            self.train_samples, self.train_order(), self.rollout_batch_size, shard, self.preparer, costs=costs
        )
        return self._loader(dataset, self.start_step, self.max_steps)

    def val_dataloader(self) -> StepLoader | list:
        """One pass over the held-out split, in file order; every rank gets the same number of batches."""
        self.setup()
        if not self.val_samples:
            return []
        count = len(self.val_samples)
        dataset = StepDataset(
            self.val_samples, SequentialOrder(count), self.options.val_batch_size, self.shard, self.preparer, count
        )
        return self._loader(dataset, 0, -(-count // self.options.val_batch_size))

    def _loader(self, dataset: StepDataset, start: int, stop: int) -> StepLoader:
        return StepLoader(
            dataset, start, stop, self.options.num_workers, self.options.prefetch, self.options.worker_start_method
        )


def make_cache(options: DataOptions) -> VideoCache:
    """The clip cache that some options describe."""
    return VideoCache(
        options.cache_dir,
        options.media_root,
        codec=options.cache_codec,
        source_mode=options.source_mode,
        max_bytes=None if options.cache_max_gb is None else int(options.cache_max_gb * 1e9),
        stage_dir=options.stage_dir,
        decode_clip=None if options.decode_timeout_s is None else DecodeService(options.decode_timeout_s),
    )


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
