"""Gated DeltaNet (Qwen3.5's linear attention) over packed rows and shared prefixes, exactly.

A recurrent layer must not carry its state across the sequences of a row. Every segment starts from zero; every
response of a shared prompt starts from the prompt's final recurrent state and the last inputs of its convolution, and
gradients flow back through both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

if TYPE_CHECKING:
    from torch import nn

    from lightning_modules.core.attention import AttentionPlan, Segment


def make_segmented(model: nn.Module) -> int:
    """Let every Gated DeltaNet layer of `model` obey attention plans; returns how many there are."""
    layers = [module for module in model.modules() if isinstance(module, qwen.Qwen3_5GatedDeltaNet)]
    for layer in layers:
        layer.__class__ = SegmentedGatedDeltaNet
    return len(layers)


class SegmentedGatedDeltaNet(qwen.Qwen3_5GatedDeltaNet):
    """Without a plan the original; with a plan every segment of the row on its own."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, attention_plan: AttentionPlan | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """[B, L, D] -> [B, L, D]; B is 1 with a plan."""
        if attention_plan is None:
            return super().forward(hidden_states, *args, **kwargs)
        inputs = _project(self, hidden_states)
        outputs = [part for segment in attention_plan.segments for part in _segment(self, inputs, segment)]
        core = torch.cat(outputs, dim=1)
        gate = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        core = self.norm(core.reshape(-1, self.head_v_dim), gate)
        return self.out_proj(core.reshape(*hidden_states.shape[:2], -1))


def _project(layer: Any, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """What does not depend on neighbours: convolution input [1, L, C], beta and log-decay [1, L, H]."""
    decay = torch.nn.functional.softplus(layer.in_proj_a(hidden).float() + layer.dt_bias)
    return {
        "qkv": layer.in_proj_qkv(hidden),
        "beta": layer.in_proj_b(hidden).sigmoid(),
        "decay": -layer.A_log.float().exp() * decay,
    }


def _segment(layer: Any, inputs: dict[str, torch.Tensor], segment: Segment) -> list[torch.Tensor]:
    """Outputs [1, n, H, V] of the prompt and of each response of one segment."""
    split = segment.start + segment.prompt
    prompt = {name: tensor[:, segment.start : split] for name, tensor in inputs.items()}
    out, state = _scan(layer, prompt, None, None)
    if not segment.responses:
        return [out]
    parts = {name: tensor[0, split : segment.end].split(segment.responses) for name, tensor in inputs.items()}
    # Padding on the right reaches neither earlier outputs nor a state that anyone reads.
    batch = {name: pad_sequence(list(pieces), batch_first=True) for name, pieces in parts.items()}
    count = len(segment.responses)
    # The last inputs of the convolution, zeros before a short prompt.
    length = layer.conv_kernel_size - 1
    missing = max(0, length - prompt["qkv"].shape[1])
    history = torch.nn.functional.pad(prompt["qkv"], (0, 0, missing, 0))[:, -length:]
    branches, _ = _scan(layer, batch, history.expand(count, -1, -1), state.expand(count, -1, -1, -1))
    return [out, *(branches[i : i + 1, :n] for i, n in enumerate(segment.responses))]


def _scan(
    layer: Any, inputs: dict[str, torch.Tensor], history: torch.Tensor | None, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolution and delta rule over [N, T]; returns outputs [N, T, H, V] and the final state."""
    qkv = inputs["qkv"] if history is None else torch.cat([history, inputs["qkv"]], dim=1)
    weight = layer.conv1d.weight.squeeze(1)
    mixed = qwen.causal_conv1d_fn(qkv.transpose(1, 2), weight, layer.conv1d.bias, activation=layer.activation)
    mixed = mixed.transpose(1, 2)[:, -inputs["qkv"].shape[1] :]
    query, key, value = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    query, key = (t.reshape(*t.shape[:2], -1, layer.head_k_dim) for t in (query, key))
    repeat = layer.num_v_heads // layer.num_k_heads
    if repeat > 1:
        query, key = (t.repeat_interleave(repeat, dim=2) for t in (query, key))
    return qwen.torch_chunk_gated_delta_rule(
        query,
        key,
        value.reshape(*value.shape[:2], -1, layer.head_v_dim),
        g=inputs["decay"],
        beta=inputs["beta"],
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
