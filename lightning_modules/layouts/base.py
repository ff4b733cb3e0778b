"""The layout interface: from groups of responses to micro-batches of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from lightning_modules.core.types import MicroBatch
from lightning_modules.layouts.patchify import Patches

if TYPE_CHECKING:
    from datamodules.types import PreparedSample
    from lightning_modules.core.attention import AttentionPlan
    from lightning_modules.families.base import ModelFamily
    from rollout.types import RolloutGroup

Selection = Sequence[tuple[int, Sequence[int]]]
"""Which responses are trained on: (index of the group, indices of its responses)."""


@dataclass(frozen=True)
class Piece:
    """The smallest thing a layout moves as a whole: one prompt with one or more of its responses."""

    group_index: int
    """Place of the group in the step's list."""
    group: RolloutGroup
    responses: tuple[int, ...]
    """Indices of the responses in the group."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, visual ones included."""
        return len(self.group.prompt.expanded_ids)

    @property
    def response_lengths(self) -> tuple[int, ...]:
        """Tokens of each response."""
        return tuple(len(self.group.responses[i].token_ids) for i in self.responses)

    @property
    def tokens(self) -> int:
        """Tokens of prompt and responses together."""
        return self.prompt_tokens + sum(self.response_lengths)

    @property
    def cost(self) -> float:
        """Work of the piece in arbitrary units: linear layers plus attention, which is quadratic."""
        prompt = self.prompt_tokens
        pairs = prompt * prompt / 2 + sum(n * (prompt + n / 2) for n in self.response_lengths)
        return self.tokens + pairs / 8192


@dataclass(frozen=True)
class Context:
    """What turning pieces into tensors needs besides the pieces."""

    family: ModelFamily
    """An opened family."""
    patchify: Callable[[PreparedSample], Patches]
    device: torch.device
    dtype: torch.dtype | None = None
    """Type of the pixel values on the device; None = as the processor made them."""


class Layout(ABC):
    """Arrange pieces in rows. Losses never see which layout was used."""

    name: ClassVar[str]
    keeps_groups: ClassVar[bool] = False
    """Whether the responses of a group stay in one piece."""

    def pieces(self, groups: Sequence[RolloutGroup], selection: Selection, token_budget: int) -> list[Piece]:
        """Cut the selected responses into pieces of at most `token_budget` tokens where that is possible."""
        del token_budget
        return [Piece(index, groups[index], (r,)) for index, responses in selection for r in responses]

    def row_tokens(self, pieces: Sequence[Piece]) -> int:
        """Tokens (padding included) that a micro-batch of `pieces` computes."""
        return sum(piece.tokens for piece in pieces)

    @abstractmethod
    def collate(self, pieces: Sequence[Piece], context: Context) -> MicroBatch:
        """Build the tensors of one micro-batch on the context's device."""


def dummy_micro_batch(context: Context) -> MicroBatch:
    """A one-token prompt and response that belong to nobody: a rank without work runs it with weight zero."""
    device = context.device
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(
        input_ids=ids,
        position_ids=torch.arange(2, device=device).expand(4, 1, 2),
        attention_plan=None,
        target_rows=zero,
        target_cols=zero,
        target_ids=zero,
        response_index=zero,
    )


@dataclass(frozen=True)
class PromptPart:
    """Tensors of one prompt, computed once per piece."""

    ids: torch.Tensor
    """int64 [P]."""
    positions: torch.Tensor
    """int64 [4, P]: text position, then the M-RoPE axes."""

    def continuation(self, length: int) -> torch.Tensor:
        """Positions int64 [4, length] of a response that follows the prompt."""
        first = torch.stack([torch.tensor(len(self.ids)), *([self.positions[1:].max() + 1] * 3)])
        return first[:, None] + torch.arange(length)


def prompt_part(piece: Piece, family: ModelFamily) -> PromptPart:
    """Ids and positions of the piece's prompt; checks placeholders against the media.

    Raises:
        ValueError: visual tokens and features differ, or a response holds a placeholder.
    """
    sample = piece.group.prompt
    ids = torch.tensor(sample.expanded_ids, dtype=torch.int64)
    image_grids = [image.grid for image in sample.images]
    video_grids = [video.grid for video in sample.videos]
    kinds = family.media_kinds(ids)
    for kind, code, grids in (("image", 1, image_grids), ("video", 2, video_grids)):
        features = sum(family.visual_tokens(grid) for grid in grids)
        tokens = int((kinds == code).sum())
        if tokens != features:
            raise ValueError(
                f"sample {sample.uid}: the prompt holds {tokens} {kind} placeholder tokens, its media make {features} "
                f"features (grids {grids})"
            )
    video_fps = [video.metadata.sampled_fps for video in sample.videos]
    positions = family.positions(ids, image_grids, video_grids, video_fps)
    return PromptPart(ids, torch.cat([torch.arange(len(ids))[None], positions]))


def response_ids(piece: Piece, family: ModelFamily) -> list[torch.Tensor]:
    """int64 token ids of the piece's responses.

    Raises:
        ValueError: a response is empty or holds a vision placeholder (the engine's ban failed).
    """
    result = []
    for index in piece.responses:
        ids = torch.as_tensor(piece.group.responses[index].token_ids).to(torch.int64)
        if len(ids) == 0:
            raise ValueError(f"sample {piece.group.uid}: response {index} is empty")
        bad = [token for token in ids.tolist() if token in family.banned_ids]
        if bad:
            raise ValueError(
                f"sample {piece.group.uid}: response {index} holds vision placeholder tokens {sorted(set(bad))}; "
                "they must be banned in sampling (SamplingSpec.banned_ids)"
            )
        result.append(ids)
    return result


@dataclass(frozen=True)
class Row:
    """One finished row on the host, before it meets its neighbours."""

    ids: torch.Tensor
    """int64 [L]."""
    positions: torch.Tensor
    """int64 [4, L]."""
    targets: torch.Tensor
    """int64 [R] columns that predict the response tokens, in (group, response, token) order."""


def assemble(
    rows: Sequence[Row],
    pieces: Sequence[Piece],
    media: Sequence[Patches],
    context: Context,
    attention_plan: AttentionPlan | None = None,
) -> MicroBatch:
    """Right-pad `rows` to one length and gather the media of `media` (in row order) and the bookkeeping of `pieces`."""
    length = max(len(row.ids) for row in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.int64)
    positions = torch.zeros(4, len(rows), length, dtype=torch.int64)
    for i, row in enumerate(rows):
        input_ids[i, : len(row.ids)] = row.ids
        positions[:, i, : len(row.ids)] = row.positions
    responses = [ids for piece in pieces for ids in response_ids(piece, context.family)]
    lengths = torch.tensor([len(ids) for ids in responses])
    image_grids = [grid for patches in media for grid in patches.image_grids]
    video_grids = [grid for patches in media for grid in patches.video_grids]
    pixels = [p.images for p in media if p.images is not None] + [p.videos for p in media if p.videos is not None]

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(context.device, non_blocking=True)

    def put_grids(grids: list) -> torch.Tensor | None:
        return put(torch.tensor(grids, dtype=torch.int64)) if grids else None

    return MicroBatch(
        input_ids=put(input_ids),
        position_ids=put(positions),
        attention_plan=attention_plan,
        target_rows=put(torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(r.targets) for r in rows]))),
        target_cols=put(torch.cat([row.targets for row in rows])),
        target_ids=put(torch.cat(responses)),
        response_index=put(torch.repeat_interleave(lengths)),
        pixel_values=put(torch.cat(pixels)).to(context.dtype) if pixels else None,
        image_grid_thw=put_grids(image_grids),
        video_grid_thw=put_grids(video_grids),
        response_keys=tuple((piece.group_index, r) for piece in pieces for r in piece.responses),
        uids=tuple(dict.fromkeys(piece.group.uid for piece in pieces)),
    )


def sequence_rows(pieces: Sequence[Piece], context: Context) -> tuple[list[Row], list[Patches]]:
    """One row per response ([prompt | response]) with its own copy of the media; prompts are processed once."""
    rows: list[Row] = []
    media: list[Patches] = []
    cache: dict[int, tuple[PromptPart, Patches]] = {}
    for piece in pieces:
        if piece.group_index not in cache:
            cache[piece.group_index] = (prompt_part(piece, context.family), context.patchify(piece.group.prompt))
        prompt, patches = cache[piece.group_index]
        for ids in response_ids(piece, context.family):
            start = len(prompt.ids) - 1
            rows.append(
                Row(
                    ids=torch.cat([prompt.ids, ids]),
                    positions=torch.cat([prompt.positions, prompt.continuation(len(ids))], dim=1),
                    targets=torch.arange(start, start + len(ids)),
                )
            )
            media.append(patches)
    return rows, media
