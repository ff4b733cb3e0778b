"""Log-probabilities and entropies of chosen tokens without the [tokens, vocab] matrix.

The output projection and the log-softmax run in chunks of tokens; the backward recomputes each chunk's logits. Peak
memory is one chunk of logits instead of all of them (151,936 columns for Qwen).
"""

from __future__ import annotations

from typing import Any

import torch


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    banned_ids: tuple[int, ...] = (),
    with_entropy: bool = False,
    chunk_size: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature) with `banned_ids` removed.

    Args:
        hidden: [R, D] hidden states that predict the targets.
        weight: [V, D] output projection.
        targets: int64 [R].
        temperature: the sampling temperature; must be positive (a greedy policy has no log-probabilities).
        banned_ids: token ids that sampling never produces.
        with_entropy: also return the entropy of each distribution.
        chunk_size: tokens per chunk.

    Returns:
        (log-probs [R], entropies [R] or None), float32 (float64 for float64 input), differentiable.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: the trainer needs the positive temperature that was sampled with")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1")
    logprobs, entropy = _ChunkedLogProbs.apply(
        hidden, weight, targets, temperature, tuple(banned_ids), with_entropy, chunk_size
    )
    return logprobs, entropy if with_entropy else None


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, temperature: float, banned: list[int]) -> torch.Tensor:
    """[C, V] log-probabilities in at least float32; banned columns are -inf."""
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)
    if banned:
        logits[:, banned] = -torch.inf
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        banned: tuple[int, ...],
        with_entropy: bool,
        chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(targets), dtype=accumulate)
        entropy = hidden.new_zeros(len(targets) if with_entropy else 0, dtype=accumulate)
        for start in range(0, len(targets), chunk_size):
            part = slice(start, start + chunk_size)
            logp = _log_softmax(hidden[part], weight, temperature, list(banned))
            logprobs[part] = logp.gather(1, targets[part, None]).squeeze(1)
            if with_entropy:
                probs = logp.exp()
                entropy[part] = -probs.mul_(logp.nan_to_num_(neginf=0.0)).sum(-1)
                del probs
            del logp  # before the next chunk is made, not after
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.settings = (temperature, banned, with_entropy, chunk_size)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, targets, entropy = ctx.saved_tensors
        temperature, banned, with_entropy, chunk_size = ctx.settings
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=accumulate) if need_weight else None
        for start in range(0, len(targets), chunk_size):
            part = slice(start, start + chunk_size)
            logp = _log_softmax(hidden[part], weight, temperature, list(banned))
            # d logp(y) / d z = onehot(y) - p;  d H / d z = -p (log p + H). In place: one or two [C, V] buffers.
            if with_entropy:
                probs = logp.exp()
                grad = logp.nan_to_num_(neginf=0.0).add_(entropy[part, None]).mul_(grad_entropy[part, None])
                grad.add_(grad_logprobs[part, None]).mul_(probs).neg_()
                del probs
            else:
                grad = logp.exp_().mul_(-grad_logprobs[part, None])
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad = grad.div_(temperature).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                if grad.dtype == accumulate:
                    grad_weight.addmm_(grad.T, hidden[part])
                else:
                    grad_weight += grad.T @ hidden[part]
            del logp, grad
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None
