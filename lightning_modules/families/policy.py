"""The policy: one root module whose single `forward` does everything that touches parameters.

FSDP2 gathers parameters in the root's forward hooks, so neither the vision tower nor the output projection may be
called from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_modules.core.logprobs import token_logprobs
from lightning_modules.core.types import MicroBatch, TokenOutputs
from lightning_modules.families.base import ModelFamily

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PolicyModel(nn.Module):
    """A vision-language model that scores response tokens.

    Args:
        hf: transformers' model (attribute `hf`; parameter names of this module are `hf.<transformers name>`).
        family: the architecture's description.
        logprob_chunk: tokens per chunk of the output projection.
    """

    def __init__(self, hf: PreTrainedModel, family: ModelFamily, logprob_chunk: int = 1024) -> None:
        super().__init__()
        self.hf = hf
        self.family = family
        self.logprob_chunk = logprob_chunk

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        banned_ids: tuple[int, ...] = (),
        with_entropy: bool = False,
    ) -> TokenOutputs:
        """Log-probabilities (and entropies) of the R response tokens of `batch`."""
        hidden = self.family.hidden_states(self.hf, batch)
        predicting = hidden[batch.target_rows, batch.target_cols]
        weight = self.family.output_weight(self.hf)
        logprobs, entropy = token_logprobs(
            predicting, weight, batch.target_ids, temperature, banned_ids, with_entropy, self.logprob_chunk
        )
        return TokenOutputs(logprobs=logprobs, entropy=entropy)

    def checkpoint_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint name, full tensor) one parameter at a time; a collective on every rank when sharded.

        Tied weights are yielded once, under the embedding's name.
        """
        for name, parameter in self.hf.named_parameters():
            tensor = parameter.detach()
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            yield from self.family.checkpoint_tensors(name, tensor)
