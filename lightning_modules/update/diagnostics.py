"""What is logged about every step: rewards, advantages, ratios, entropy, engine-trainer mismatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_modules.algorithms.advantage import group_std
from lightning_modules.algorithms.base import TokenBatch, TokenLoss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from datamodules.types import StepBatch
    from lightning_modules.core.metrics import MetricBag
    from lightning_modules.core.types import MicroBatch
    from lightning_modules.layouts.base import Piece
    from lightning_modules.update.collect import Collected, Key


def log_rewards(bag: MetricBag, data: Collected, advantages: torch.Tensor, batch: StepBatch) -> None:
    """Rewards per task and part, advantages, groups without signal, lengths, losses of samples."""
    rewards = data.rewards
    bag.tokens("reward/total", rewards.total)
    for name, values in rewards.parts.items():
        bag.tokens(f"reward/{name}", values[~values.isnan()])  # of the responses that have such a part
    for index, task in enumerate(rewards.tasks):
        bag.tokens(f"reward_by_task/{task or 'unnamed'}", rewards.total[rewards.group == index])
    bag.tokens("advantage/mean", advantages)
    bag.tokens("advantage/abs_mean", advantages.abs())
    if len(advantages):
        bag.max("advantage/max", float(advantages.max()))
        bag.min("advantage/min", float(advantages.min()))
    spread = group_std(rewards.total, rewards.group)
    for index in range(rewards.num_groups):
        bag.mean("groups/zero_variance", float(spread[rewards.group == index].max() == 0))
    bag.add("groups/lost", len(batch.lost))
    bag.add("groups/masked", sum(data.masked.values()))
    bag.add("groups/trained", rewards.num_groups)
    bag.add("groups/responses", len(rewards.total))
    _log_responses(bag, data)


def log_sources(bag: MetricBag, data: Collected, advantages: Mapping[Key, torch.Tensor]) -> None:
    """Advantages, lengths and shares of the policy's own responses and of those from elsewhere, apart.

    A response counts as `prefixed` when only some of its tokens come from elsewhere.
    """
    for row, key in enumerate(data.keys):
        mask = data.groups[key[0]].responses[key[1]].offline_mask
        source = "offline" if mask.all() else "prefixed" if mask.any() else "online"
        bag.mean(f"{source}/advantage", float(advantages[key]))
        bag.mean(f"{source}/advantage_abs", abs(float(advantages[key])))
        bag.mean(f"{source}/length", len(mask))
        bag.mean(f"{source}/accuracy", float(data.rewards.parts["accuracy"][row]))
        bag.mean("offline/response_share", float(mask.any()))
        bag.mean("offline/token_share", float(mask.mean()), len(mask))


def _log_responses(bag: MetricBag, data: Collected) -> None:
    for group, response in data.keys:
        item = data.groups[group].responses[response]
        bag.mean("response/length", len(item.token_ids))
        bag.max("response/length_max", len(item.token_ids))
        bag.mean("response/truncated", float(item.finish_reason == "length"))
        bag.add("tokens/response", len(item.token_ids))
    for group in {g for g, _ in data.keys}:
        bag.add("tokens/prompt", data.groups[group].prompt.num_prompt_tokens)


def log_balance(bag: MetricBag, plan: Sequence[Sequence[Piece]]) -> None:
    """Micro-batches of an update and how evenly its work lies on the ranks.

    `balance/cost_max` over `balance/cost_mean` is the time of the slowest rank against that of an even division.
    """
    cost = sum(piece.cost for pieces in plan for piece in pieces)
    bag.max("train/micro_batches", len(plan))
    bag.max("balance/cost_max", cost)
    bag.mean("balance/cost_mean", cost)


@torch.no_grad()
def log_tokens(bag: MetricBag, tokens: TokenBatch, result: TokenLoss, first: bool) -> None:
    """Ratios, the algorithm's own diagnostics (clip fractions), entropy.

    Args:
        first: whether no update was made on the batch yet, so that the ratio must be 1.
    """
    difference = tokens.logprobs - tokens.old_logprobs
    ratio = difference.exp()
    for name, values in result.diagnostics.items():
        bag.tokens(f"policy/{name}", values)
    bag.tokens("policy/ratio", ratio)
    bag.max("policy/ratio_max", float(ratio.max()))
    bag.min("policy/ratio_min", float(ratio.min()))
    # k3 estimator of KL(old || new), http://joschu.net/blog/kl-approx.html
    bag.tokens("policy/kl_old", ratio - 1 - difference)
    # Also of micro-batches without such tokens: how responses lie in micro-batches must not change a mean.
    own = slice(None) if tokens.off_policy is None else ~tokens.off_policy
    bag.tokens("online/ratio", ratio[own])
    bag.tokens("online/logprob", tokens.logprobs[own])
    if tokens.off_policy is not None:
        bag.tokens("offline/ratio", ratio[tokens.off_policy])
        bag.tokens("offline/logprob", tokens.logprobs[tokens.off_policy])
        if tokens.rollout_logprobs is not None:
            known = tokens.off_policy & tokens.rollout_logprobs.isfinite()  # of the policy that wrote the tokens
            bag.tokens("offline/behaviour_ratio", (tokens.logprobs - tokens.rollout_logprobs)[known].exp())
    if first and tokens.off_policy is None:
        bag.max("policy/first_ratio_error", float((ratio - 1).abs().max()))
    if tokens.entropy is not None:
        bag.tokens("policy/entropy", tokens.entropy)


@torch.no_grad()
def log_mismatch(bag: MetricBag, tokens: TokenBatch, micro_batch: MicroBatch, data: Collected, first: bool) -> None:
    """Engine against trainer log-probs of the same tokens and weights, over all and per modality.

    Only the step's first update compares equal weights; later ones are left out.
    """
    if not first or tokens.rollout_logprobs is None:
        return
    trainer, engine = tokens.logprobs.double(), tokens.rollout_logprobs.double()
    kinds = [data.groups[group].prompt.sample.data_type for group, _ in micro_batch.response_keys]
    for kind in ("", *sorted(set(kinds))):
        member = torch.tensor([kind in ("", k) for k in kinds], device=trainer.device)[tokens.response]
        if tokens.off_policy is not None:
            member &= ~tokens.off_policy  # the engine never sampled these
        if not bool(member.any()):
            continue
        suffix = f"_{kind}" if kind else ""
        x, y = engine[member], trainer[member]
        bag.tokens(f"mismatch/kl{suffix}", (y - x).exp() - 1 - (y - x))
        # A maximum over ranks may lose NaN; infinity stays.
        bag.max(f"mismatch/max_diff{suffix}", float((x - y).abs().nan_to_num(nan=torch.inf).max()))
        bag.correlation(f"mismatch/pearson{suffix}", x, y)
