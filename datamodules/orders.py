"""Other orders than a plain shuffle: from easy to hard, and batches of similar length.

Chosen by configuration, for example:

    order: {_target_: datamodules.orders.CurriculumOrder, _partial_: true, bands: 4}
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from datamodules.lengths import prompt_lengths
from datamodules.sampling import ShuffledOrder, permutation

if TYPE_CHECKING:
    from datamodules.types import Sample
    from datamodules.video_rl import VideoRLDataModule


class CurriculumOrder:
    """Easy samples first: bands of falling pass rate, shuffled within each band anew in every epoch.

    Example: 100 samples in 4 bands: positions 0-24 hold the quarter with the highest pass rates.

    Args:
        samples: training samples; `extra[key]` is their pass rate (see scripts/filter_by_pass_rate.py).
        seed: seed of the shuffles.
        datamodule: not used.
        key: field of the record.
        rates_file: JSON {sample id: pass rate}, as scripts/filter_by_pass_rate.py writes it, instead of the field.
        bands: number of bands; 1 = plain shuffle.
        easy_first: False = hard samples first.
        epochs: after so many epochs the order is a plain shuffle; None = never.

    Raises:
        ValueError: a sample has no pass rate.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        seed: int = 0,
        datamodule: VideoRLDataModule | None = None,
        key: str = "pass_rate",
        rates_file: str | None = None,
        bands: int = 5,
        easy_first: bool = True,
        epochs: int | None = None,
    ) -> None:
        known = {sample.uid: sample.extra.get(key) for sample in samples} if rates_file is None else _rates(rates_file)
        found = [known.get(sample.uid) for sample in samples]
        missing = [
            sample.uid
            for sample, rate in zip(samples, found, strict=True)
            if not isinstance(rate, (int, float)) or not math.isfinite(rate)
        ]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(samples)} samples have no number {key!r}, for example {missing[0]}"
            )
        if not 1 <= bands <= len(samples):
            raise ValueError(f"bands={bands} must lie between 1 and the number of samples ({len(samples)})")
        rates = np.asarray(found, dtype=np.float64)
        ranked = np.argsort(-rates if easy_first else rates, kind="stable")
        self.bands = np.array_split(ranked, bands)
        self.plain = ShuffledOrder(len(samples), seed)
        self.epoch_length = len(samples)
        self.seed, self.epochs = seed, epochs

    def epoch(self, number: int) -> np.ndarray:
        """int64 [number of samples]."""
        if self.epochs is not None and number >= self.epochs:
            return self.plain.epoch(number)
        shuffled = [band[permutation(self.seed + 104729 * i, number, len(band))] for i, band in enumerate(self.bands)]
        return np.concatenate(shuffled).astype(np.int64)


def _rates(file: str) -> dict[str, Any]:
    try:
        rates = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"no pass rates at {file}: measure them with scripts/filter_by_pass_rate.py") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(rates, dict):
        raise ValueError(f"{file} holds no object of sample ids and pass rates")
    return rates


class LengthGroupedOrder:
    """Batches of prompts of similar length: less padding, and ranks that finish at the same time.

    Every epoch is shuffled, cut into chunks of `group` batches, sorted by length within each chunk, and the batches are
    shuffled again. An epoch's incomplete last batch stays last.

    Args:
        samples: training samples.
        seed: seed of the shuffles.
        datamodule: gives the batch size, and the lengths where `lengths` is None.
        lengths: tokens per sample.
        batch_size: global batch; None = the data module's.
        group: batches per chunk; larger = more similar, less random.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        seed: int = 0,
        datamodule: VideoRLDataModule | None = None,
        lengths: Sequence[int] | None = None,
        batch_size: int | None = None,
        group: int = 50,
    ) -> None:
        if group < 1:
            raise ValueError(f"group={group} must be at least 1")
        if datamodule is not None:
            batch_size = batch_size or datamodule.rollout_batch_size
            if lengths is None:
                known = {length.uid: length.tokens for length in datamodule.lengths}
                if not all(sample.uid in known for sample in samples):
                    measured = prompt_lengths(samples, datamodule.preparer, datamodule.cache.folder)
                    known = {length.uid: length.tokens for length in measured}
                # Unreadable samples will be lost anyway; they count as short.
                lengths = [known[sample.uid] or 0 for sample in samples]
        if batch_size is None or lengths is None:
            raise ValueError("LengthGroupedOrder needs a datamodule, or lengths and batch_size")
        self.batch_size = batch_size
        self.lengths: np.ndarray = np.asarray(lengths)
        if len(self.lengths) != len(samples):
            raise ValueError(f"{len(self.lengths)} lengths for {len(samples)} samples")
        self.group = group
        self.plain = ShuffledOrder(len(samples), seed)
        self.epoch_length = len(samples)
        self.seed = seed

    def epoch(self, number: int) -> np.ndarray:
        """int64 [number of samples]."""
        shuffled = self.plain.epoch(number)
        whole = len(shuffled) // self.batch_size * self.batch_size
        chunk = self.group * self.batch_size
        batches = []
        for start in range(0, whole, chunk):
            part = shuffled[start : min(start + chunk, whole)]
            part = part[np.argsort(self.lengths[part], kind="stable")]
            batches += list(part.reshape(-1, self.batch_size))
        order = permutation(self.seed + 15485863, number, len(batches))
        return np.concatenate([*(batches[i] for i in order), shuffled[whole:]]).astype(np.int64)
