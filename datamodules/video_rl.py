"""`VideoRLDataModule`: annotation files and media in, one `StepBatch` per optimisation step out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

from datamodules.annotations import ValidationReport, load_samples
from datamodules.common.distributed import from_rank_zero
from datamodules.lengths import overlong, prompt_lengths
from datamodules.options import DataOptions
from datamodules.prepare import SamplePreparer, load_processor
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
        type_name: the one name of a problem type, whatever its spelling or alias (`RewardRouter.type_name`); records
            of a type that it refuses are left out. None = every type is taken as it is written.
        options: fields of `DataOptions`.

    Raises:
        ValueError: an option, or a combination of them, is wrong.
    """

    forwards_to = DataOptions
    """What reads `**options`."""

    def __init__(
        self,
        model_path: str,
        train_files: Sequence[str] | str = (),
        val_files: Sequence[str] | str = (),
        *,
        family: MediaFamily,
        type_name: Callable[[str], str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = DataOptions(**options)
        self.model_path, self.type_name = model_path, type_name
        self.family = family
        self.train_files, self.val_files = _listed(train_files), _listed(val_files)
        weights = self.options.mixture_weights
        if weights is not None and len(weights) != len(self.train_files):
            raise ValueError(f"{len(weights)} mixture_weights for {len(self.train_files)} train_files")
        self.cache = make_cache(self.options)
        self.templates = PromptTemplates(
            self.options.prompt_templates, self.options.prompt_overrides, self.options.system_prompt, type_name
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
        limit = self.options.max_prompt_tokens
        if self.options.filter_overlong and limit is not None and self.train_samples:
            self._drop_overlong(limit)
        if self.train_files and not self.train_samples:
            raise ValueError(f"no usable sample in train_files {self.train_files}\n{self.report.text()}")
        self._ready = True

    def _read(self, files: list[str], limit: int | None) -> tuple[list[list[Sample]], ValidationReport]:
        options = self.options
        groups, report = load_samples(files, self.type_name, options.strict, options.artifact_dir)
        groups = [anchor(group, file, options.media_root) for group, file in zip(groups, files, strict=True)]
        if limit is not None:
            for number, group in enumerate(groups):
                groups[number] = group[:limit]
                limit -= len(groups[number])
        return groups, report

    def _drop_overlong(self, limit: int) -> None:
        """Remove prompts above `max_prompt_tokens`; every rank removes the same ones."""
        self.lengths = prompt_lengths(self.train_samples, self.preparer, self.cache.folder)
        found = overlong(self.lengths, limit)
        # What rank 0 cannot read counts as empty: it is likely lost.
        tokens = {length.uid: length.tokens or 0 for length in self.lengths}
        self.dropped, self._tokens = from_rank_zero((found, tokens))
        if not self.dropped:
            return
        logger.warning(
            "%d of %d samples exceed max_prompt_tokens=%d and are dropped: %s%s",
            len(self.dropped),
            len(self.train_samples),
            limit,
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
            self._processor = load_processor(self.model_path)
        return self._processor

    @property
    def rules(self) -> MediaSpec:
        """How the model family writes media into prompts."""
        processor = self.processor  # says in words when there is no model
        return self.family.open(self.model_path).media_spec(processor)

    @property
    def preparer(self) -> SamplePreparer:
        """Prepares single samples; training and validation share it, and so do evaluation and preprocessing."""
        if self._preparer is None:
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
        if self.rollout_batch_size % shard.world:
            raise ValueError(
                f"rollout_batch_size={self.rollout_batch_size} does not divide by {shard.world} data-parallel ranks; "
                f"use for example {max(shard.world, self.rollout_batch_size // shard.world * shard.world)}"
            )
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
