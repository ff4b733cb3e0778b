"""Machinery of models with one vision tower over patch grids, M-RoPE and placeholder tokens (Qwen-VL, GLM-V)."""

from __future__ import annotations

from abc import abstractmethod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning_modules.families.base import Grid, ModelFamily, Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from lightning_modules.core.types import MicroBatch


class GridVisionFamily(ModelFamily):
    """Base of such families; a subclass names its transformers classes and what it does differently."""

    merger_names: tuple[str, ...] = ("visual.merger.",)
    """Substrings of the parameter names that project vision features into the language model."""

    @property
    @abstractmethod
    def model_class(self) -> type[PreTrainedModel]:
        """transformers' conditional-generation class."""

    @property
    @abstractmethod
    def body_class(self) -> type[PreTrainedModel]:
        """transformers' multimodal body, which defines the rotary positions."""

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
        from lightning_modules.core.attention import register

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
        import torch

        from rollout.positions import chain_positions

        if not image_grids and not video_grids:
            return torch.arange(len(input_ids), device=input_ids.device).expand(3, -1).clone()
        kinds = self.media_kinds(input_ids)
        body = self.body_class
        stand_in = SimpleNamespace(config=self.config)
        stand_in.get_vision_position_ids = body.get_vision_position_ids.__get__(stand_in)
        positions, _ = body.get_rope_index(
            stand_in,
            input_ids[None],
            mm_token_type_ids=kinds[None],
            image_grid_thw=torch.tensor(list(image_grids), dtype=torch.int64) if image_grids else None,
            video_grid_thw=torch.tensor(list(video_grids), dtype=torch.int64) if video_grids else None,
            **self._rope_arguments(video_fps),
        )
        return chain_positions(positions[:, 0], kinds)

    def _rope_arguments(self, video_fps: Sequence[float]) -> dict[str, Any]:
        return {}

    def hidden_states(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """See `ModelFamily.hidden_states`."""
        outputs = model.model(
            position_ids=batch.position_ids[1:],
            attention_mask=None,
            attention_plan=batch.attention_plan,
            use_cache=False,
            **self._inputs(model, batch, self._vision(model, batch)),
        )
        return outputs.last_hidden_state

    def _inputs(self, model: nn.Module, batch: MicroBatch, vision: Any) -> dict[str, Any]:
        """Token embeddings with vision features in the place of placeholders."""
        embeds = model.model.get_input_embeddings()(batch.input_ids)
        if batch.pixel_values is None:
            return {"inputs_embeds": embeds + self._zero(vision).to(embeds.dtype)}
        features = vision.pooler_output.to(embeds.dtype)
        kinds = self.media_kinds(batch.input_ids)[..., None]
        images = 0 if batch.image_grid_thw is None else int((kinds == 1).sum())
        embeds = embeds.masked_scatter(kinds == 1, features[:images])
        return {"inputs_embeds": embeds.masked_scatter(kinds == 2, features[images:])}

    def _vision(self, model: nn.Module, batch: MicroBatch) -> Any:
        """One vision call over all images, then all videos, of the micro-batch (or the dummy)."""
        import torch

        visual = model.model.visual
        if batch.pixel_values is None:
            grid = self._dummy_grid(batch.input_ids.device)
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

    def _dummy_grid(self, device: torch.device) -> torch.Tensor:
        import torch

        merge = self.config.vision_config.spatial_merge_size
        return torch.tensor([[1, merge, merge]], device=device)

    def _zero(self, vision: Any) -> torch.Tensor:
        """A zero that depends on every output of the vision tower, so that its backward runs."""
        return 0.0 * vision.pooler_output.sum()

    def output_weight(self, model: nn.Module) -> torch.Tensor:
        """See `ModelFamily.output_weight`."""
        return model.get_output_embeddings().weight

    def sharding_units(self, policy: nn.Module) -> list[nn.Module]:
        """Vision blocks, decoder layers, then the policy (embeddings, mergers, norms and head live in the root)."""
        body = policy.hf.model
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
        config = self.config
        return (config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id)
