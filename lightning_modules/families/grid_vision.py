"""Machinery of models with one vision tower over patch grids, M-RoPE and placeholder tokens (Qwen-VL, GLM-V)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from datamodules.video.spec import MediaSpec, TimestampStyle
from lightning_modules.core.attention import register
from lightning_modules.families.base import Grid, ModelFamily, Part
from lightning_modules.families.positions import chain_positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from transformers import PreTrainedModel, ProcessorMixin

    from lightning_modules.core.types import MicroBatch


class GridVisionFamily(ModelFamily):
    """Base of such families; a subclass names its transformers classes and what it does differently."""

    architecture: ClassVar[str]
    """Stem of transformers' classes: `<stem>ForConditionalGeneration`, and `<stem>Model` for its multimodal body."""
    merger_names: tuple[str, ...] = ("visual.merger.",)
    """Substrings of the parameter names that project vision features into the language model."""
    delimiter_keys: tuple[str, ...] = ("vision_start_token_id", "vision_end_token_id")
    """Keys of the configuration: tokens around a temporal patch, then others that only media bring."""
    timestamp_style: TimestampStyle = "none"
    """How the prompt tells the time of a video's frames, see `MediaSpec`."""

    @property
    def model_class(self) -> Any:
        """transformers' conditional-generation class."""
        return self._transformers_class("ForConditionalGeneration")

    def _transformers_class(self, role: str) -> Any:
        import transformers  # the model's code takes seconds to import, and whoever asks for token ids needs none

        return getattr(transformers, self.architecture + role)

    def empty(self, path: str, dtype: torch.dtype) -> PreTrainedModel:
        """See `ModelFamily.empty`."""
        from accelerate import init_empty_weights

        self.open(path)
        with init_empty_weights(include_buffers=False):
            model = self.model_class._from_config(self.config, dtype=dtype)
        if self.tied:
            model.tie_weights()
        return self._prepare(model)

    def load(self, path: str, dtype: torch.dtype) -> PreTrainedModel:
        """See `ModelFamily.load`."""
        self.open(path)
        return self._prepare(self.model_class.from_pretrained(path, dtype=dtype))

    def _prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        # Only the language model: the vision tower attends in full within frames and keeps transformers' kernel.
        model.model.language_model.config._attn_implementation = register()
        model.config.use_cache = False
        return model

    def positions(
        self,
        input_ids: torch.Tensor,
        image_grids: Sequence[Grid],
        video_grids: Sequence[Grid],
        video_fps: Sequence[float] = (),
    ) -> torch.Tensor:
        """See `ModelFamily.positions`: transformers' `get_rope_index` without instantiating the model.

        Text after a medium continues behind its largest position, as the models were trained and as the engine does.
        """
        if not image_grids and not video_grids:
            return torch.arange(len(input_ids), device=input_ids.device).expand(3, -1).clone()
        kinds = self.media_kinds(input_ids)
        body = self._transformers_class("Model")
        stand_in = SimpleNamespace(config=self.config)
        stand_in.get_vision_position_ids = body.get_vision_position_ids.__get__(stand_in)
        positions, _ = body.get_rope_index(
            stand_in,
            input_ids[None],
            mm_token_type_ids=kinds[None],
            image_grid_thw=torch.tensor(list(image_grids), dtype=torch.int64) if image_grids else None,
            video_grid_thw=torch.tensor(list(video_grids), dtype=torch.int64) if video_grids else None,
            **({"second_per_grid_ts": seconds} if (seconds := self.seconds_per_grid(video_fps)) else {}),
        )
        return chain_positions(positions[:, 0], kinds)

    def media_spec(self, processor: ProcessorMixin) -> MediaSpec:
        """See `ModelFamily.media_spec`: tokens from the configuration, patch sizes from the processor."""
        ids = self.banned_ids
        tokens = processor.tokenizer.convert_ids_to_tokens(list(ids))
        image, video, frame_start, frame_end = tokens[:4]
        named = [getattr(processor, name, None) for name in ("image_token", "video_token")]
        if named != [image, video] or None in tokens:
            raise ValueError(
                f"the configuration of {self._path} names the placeholders {tokens}, its processor "
                f"{named[0]} and {named[1]}: they do not belong together"
            )
        sizes = processor.video_processor
        return MediaSpec(
            patch_size=sizes.patch_size,
            merge_size=sizes.merge_size,
            temporal_patch=sizes.temporal_patch_size,
            image_token=image,
            video_token=video,
            image_token_id=self.image_token_id,
            video_token_id=self.video_token_id,
            frame_start=frame_start,
            frame_end=frame_end,
            timestamp_style=self.timestamp_style,
            reserved_tokens=tuple(tokens),
        )

    def hidden_states(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """See `ModelFamily.hidden_states`."""
        body: Any = model.model
        outputs = body(
            position_ids=batch.position_ids[1:],
            attention_mask=None,
            attention_plan=batch.attention_plan,
            use_cache=False,
            **self._inputs(body, batch, self._vision(body, batch)),
        )
        return outputs.last_hidden_state

    def _inputs(self, body: Any, batch: MicroBatch, vision: Any) -> dict[str, Any]:
        """Token embeddings with vision features in the place of placeholders."""
        embeds = body.get_input_embeddings()(batch.input_ids)
        if batch.pixel_values is None:
            return {"inputs_embeds": embeds + self._zero(vision).to(embeds.dtype)}
        features = vision.pooler_output.to(embeds.dtype)
        kinds = self.media_kinds(batch.input_ids)[..., None]
        images = 0 if batch.image_grid_thw is None else int((kinds == 1).sum())
        embeds = embeds.masked_scatter(kinds == 1, features[:images])
        return {"inputs_embeds": embeds.masked_scatter(kinds == 2, features[images:])}

    def _vision(self, body: Any, batch: MicroBatch) -> Any:
        """One vision call over all images, then all videos, of the micro-batch (or the dummy)."""
        visual = body.visual
        if batch.pixel_values is None:
            merge = self.config.vision_config.spatial_merge_size
            grid = torch.tensor([[1, merge, merge]], device=batch.input_ids.device)
            pixels = torch.zeros(int(grid.prod()), self.patch_channels, device=grid.device)
        else:
            videos = None if batch.video_grid_thw is None else self._tower_grids(batch.video_grid_thw)
            grid = torch.cat([g for g in (batch.image_grid_thw, videos) if g is not None])
            pixels = batch.pixel_values
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(p.requires_grad for p in visual.parameters())):
            return visual(pixels.to(visual.dtype), grid_thw=grid, return_dict=True)

    def _tower_grids(self, video_grids: torch.Tensor) -> torch.Tensor:
        """Grids of the videos as the tower wants them."""
        return video_grids

    def _zero(self, vision: Any) -> torch.Tensor:
        """A zero that depends on every output of the vision tower, so that its backward runs."""
        return 0.0 * vision.pooler_output.sum()

    def output_weight(self, model: nn.Module) -> torch.Tensor:
        """See `ModelFamily.output_weight`."""
        hf: Any = model
        return hf.get_output_embeddings().weight

    def sharding_units(self, policy: nn.Module) -> list[nn.Module]:
        """Vision blocks, decoder layers, then the policy (embeddings, mergers, norms and head live in the root)."""
        body: Any = policy.get_submodule("hf.model")
        return [*body.visual.blocks, *body.language_model.layers, policy]

    def part_of(self, name: str) -> Part:
        """See `ModelFamily.part_of`."""
        if any(merger in name for merger in self.merger_names):
            return "merger"
        return "vision_tower" if "visual." in name else "language_model"

    def visual_tokens(self, grid: Grid) -> int:
        """See `ModelFamily.visual_tokens`."""
        return grid[0] * grid[1] * grid[2] // self.config.vision_config.spatial_merge_size**2

    @property
    def patch_channels(self) -> int:
        """Values of one flattened patch: channels * temporal patch * patch^2."""
        vision = self.config.vision_config
        channels = getattr(vision, "in_channels", None) or vision.in_chans
        return channels * vision.temporal_patch_size * vision.patch_size**2

    @property
    def image_token_id(self) -> int:
        """See `ModelFamily.image_token_id`."""
        return self.config.image_token_id

    @property
    def video_token_id(self) -> int:
        """See `ModelFamily.video_token_id`."""
        return self.config.video_token_id

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """See `ModelFamily.banned_ids`."""
        return (self.image_token_id, self.video_token_id, *(getattr(self.config, key) for key in self.delimiter_keys))
