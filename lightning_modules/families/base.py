"""What the rest of the project needs to know about a model architecture: one file per family implements this.

The data stage, the engines and evaluation know no family: they get one, through the small protocols `MediaFamily`
(datamodules/video/spec.py) and `EngineFamily` (rollout/types.py), which `ModelFamily` fulfils.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning_modules.families.checkpoint import checkpoint_entries

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Self

    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from datamodules.video.spec import MediaSpec
    from lightning_modules.core.types import MicroBatch

Part = Literal["vision_tower", "merger", "language_model"]
PARTS: tuple[Part, ...] = ("vision_tower", "merger", "language_model")

Grid = tuple[int, int, int]
"""(temporal, vertical, horizontal) patches of one image or video before the spatial merge."""


class ModelFamily(ABC):
    """Everything that depends on the architecture and not on the algorithm.

    `open(path)` reads the configuration (no weights) and must come first; `empty` and `load` do it themselves.
    Example: `family = Qwen3VLFamily().open("Qwen/Qwen3-VL-8B-Instruct"); family.positions(ids, [], [(4, 16, 16)])`.
    """

    name: ClassVar[str]
    model_type: ClassVar[str]
    """`model_type` of the configurations this family handles."""
    layouts: ClassVar[frozenset[str]] = frozenset({"padded", "packed", "shared_prefix"})
    """Layouts that are exact for this family."""
    layout_note: ClassVar[str] = ""
    """Why a layout is missing from `layouts`."""
    end_tokens: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>")
    """Tokens that end a response beside the tokenizer's own end token."""
    unread_weights: ClassVar[tuple[str, ...]] = ("mtp.",)
    """Prefixes of checkpoint entries that transformers does not load (heads that predict several tokens ahead)."""

    def __init__(self) -> None:
        self._config: Any = None
        self._path: str | None = None

    def open(self, path: str) -> Self:
        """Read the configuration at `path` (a Hugging Face folder or hub name); cheap and idempotent."""
        if self._path != str(path):
            from transformers import AutoConfig  # a second's import that the command line must not pay

            self._config = AutoConfig.from_pretrained(path)
            self._path = str(path)
            self.check_config()
        return self

    @property
    def config(self) -> Any:
        """transformers' configuration; raises before `open`."""
        if self._config is None:
            raise RuntimeError(f"{type(self).__name__} is not open: call open(model_path) first")
        return self._config

    @classmethod
    def check_layout(cls, layout: str) -> None:
        """Raise ValueError when the layout of that name is not exact for the family."""
        if layout not in cls.layouts:
            raise ValueError(
                f"module/layout={layout} is not available for {cls.name}: {cls.layout_note or 'not exact there'}; "
                f"use one of {', '.join(sorted(cls.layouts))}"
            )

    def check_config(self) -> None:
        """Raise ValueError when the opened configuration belongs to another architecture."""
        wanted, found = self.model_type, self.config.model_type
        if found != wanted:
            raise ValueError(
                f"{self._path} is a {found!r} model, but the config chose the family for {wanted!r}; "
                "choose the model group that fits (conf/model)"
            )

    @abstractmethod
    def empty(self, path: str, dtype: torch.dtype) -> PreTrainedModel:
        """The model with every parameter on the meta device and every buffer real."""

    @abstractmethod
    def load(self, path: str, dtype: torch.dtype) -> PreTrainedModel:
        """The model with its weights, on CPU."""

    @abstractmethod
    def positions(
        self,
        input_ids: torch.Tensor,
        image_grids: Sequence[Grid],
        video_grids: Sequence[Grid],
        video_fps: Sequence[float] = (),
    ) -> torch.Tensor:
        """Rotary positions int64 [3, L] of one sequence int64 [L] (equal rows for a family without M-RoPE).

        `video_fps` is the rate of each video's sampled frames in 1/s, for families whose positions measure time.
        """

    def seconds_per_grid(self, video_fps: Sequence[float]) -> list[float]:
        """Seconds between the temporal patches of each video where positions measure time; elsewhere none."""
        return []

    @abstractmethod
    def media_spec(self, processor: ProcessorMixin) -> MediaSpec:
        """How media are cut into patches and written into the prompt, with the model's Hugging Face processor.

        Raises:
            ValueError: model and processor do not belong together.
        """

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Ids after which a response ends, sorted: the tokenizer's end token and `end_tokens`.

        The model's `generation_config` is not asked: what ends a response must not depend on a file that a fine-tune
        may have changed.

        Raises:
            ValueError: there is no such token.
        """
        vocabulary = tokenizer.get_vocab()
        found = {vocabulary[token] for token in self.end_tokens if token in vocabulary}
        if tokenizer.eos_token_id is not None:
            found.add(int(tokenizer.eos_token_id))
        if not found:
            raise ValueError("the tokenizer has no end token; set sampling.stop_ids")
        return tuple(sorted(found - set(self.banned_ids)))

    @abstractmethod
    def hidden_states(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """Last hidden states [B, L, D], after the final norm.

        All images and videos go through one vision call; a text-only batch runs a minimal one with weight zero, so
        that every rank issues the same collectives whatever it holds.
        """

    @abstractmethod
    def output_weight(self, model: nn.Module) -> torch.Tensor:
        """Weight [vocab, D] of the output projection."""

    @abstractmethod
    def sharding_units(self, policy: nn.Module) -> list[nn.Module]:
        """Modules for `fully_shard`, in order; the last one is `policy` itself and owns whatever is left."""

    @abstractmethod
    def part_of(self, name: str) -> Part:
        """Which part of the model the parameter `name` belongs to (for freezing and learning rates)."""

    @abstractmethod
    def visual_tokens(self, grid: Grid) -> int:
        """Tokens that an image or video of `grid` takes in the prompt."""

    def media_kinds(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Per token int [..., L]: 0 text, 1 placeholder of image features, 2 placeholder of video features."""
        return (input_ids == self.image_token_id).int() + 2 * (input_ids == self.video_token_id).int()

    @property
    @abstractmethod
    def image_token_id(self) -> int:
        """Placeholder token of image features."""

    @property
    @abstractmethod
    def video_token_id(self) -> int:
        """Placeholder token of video features."""

    @property
    @abstractmethod
    def banned_ids(self) -> tuple[int, ...]:
        """Every token that must not appear in a response (vision placeholders and their delimiters)."""

    @property
    def tied(self) -> bool:
        """Whether the output projection is the embedding matrix."""
        config = self.config
        text = getattr(config, "text_config", config)
        return bool(getattr(config, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False))

    def to_checkpoint_name(self, name: str) -> str:
        """Name in released checkpoints (and for the engine) of the policy parameter `name` (with or without `hf.`)."""
        return name.removeprefix("hf.")

    def checkpoint_names(self, folder: str | Path) -> frozenset[str]:
        """Names of the weights saved in `folder` that the policy has, too.

        Raises:
            FileNotFoundError: the folder holds no safetensors weights.
        """
        self.open(str(folder))
        tied = {"lm_head.weight"} if self.tied else set()
        names = checkpoint_entries(folder).keys() - tied
        return frozenset(name for name in names if not name.startswith(self.unread_weights))

    def checkpoint_tensors(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Checkpoint entries that hold the full `tensor` of parameter `name` (several where a checkpoint splits it)."""
        return [(self.to_checkpoint_name(name), tensor)]
