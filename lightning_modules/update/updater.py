"""One optimisation step on one rank's rollouts: advantages, passes, micro-batches, backward, optimizer.

Works without a Trainer (replayed rollouts in tests, debugging of a dumped batch): everything it needs is handed in.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from datamodules.common.distributed import all_reduce, world_size
from lightning_modules.algorithms.base import Algorithm, Counts, TokenBatch, TokenLoss
from lightning_modules.core.metrics import MetricBag
from lightning_modules.layouts.base import Context, Layout, Piece, dummy_micro_batch
from lightning_modules.layouts.patchify import PatchCache
from lightning_modules.update import diagnostics
from lightning_modules.update.collect import Collected, Key, collect
from lightning_modules.update.optim import clip_gradients, learning_rates
from lightning_modules.update.planning import plan_micro_batches
from lightning_modules.update.settings import UpdateSettings

if TYPE_CHECKING:
    from datamodules.types import StepBatch
    from lightning_modules.algorithms.weighting import OffPolicyWeighting
    from lightning_modules.core.types import MicroBatch, TokenOutputs
    from lightning_modules.families.policy import PolicyModel
    from lightning_modules.update.mismatch import MismatchGate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenCache:
    """Per-response values that are computed once and read by several micro-batches."""

    old: dict[Key, torch.Tensor]
    """Log-probs before the step, float32 [L] per response; empty when no pass was needed."""
    ref: dict[Key, torch.Tensor]
    """Reference log-probs; empty with KL off."""
    advantages: dict[Key, torch.Tensor]
    """float32 [] per response."""


class PolicyUpdater:
    """Runs the update of one step.

    Args:
        policy: the policy, whole or sharded.
        algorithm: advantages and loss.
        layout: arrangement of responses in rows.
        context: family, patchifier and device of the micro-batches.
        settings: see `UpdateSettings`.
        backward: replaces `loss.backward()` (Lightning's manual_backward).
        sync_gradients: averages gradients over ranks where the strategy does not do it in backward.
        reference: frozen policy, when the algorithm asks for it.
        gate: refuses samples of an engine that disagrees with the trainer; None = they are only measured.
        park_reference: keep a whole (not sharded) reference in host memory, on the device only for its own pass.
    """

    def __init__(
        self,
        policy: PolicyModel,
        algorithm: Algorithm,
        layout: Layout,
        context: Context,
        settings: UpdateSettings,
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
        sync_gradients: Callable[[Iterable[torch.nn.Parameter]], None] | None = None,
        reference: PolicyModel | None = None,
        gate: MismatchGate | None = None,
        park_reference: bool = False,
    ) -> None:
        context.family.check_layout(layout.name)
        if algorithm.needs.ref_logprobs and reference is None:
            raise ValueError(f"{type(algorithm).__name__} needs a reference model, but none was built")
        self.policy = policy
        self.algorithm = algorithm
        self.layout = layout
        self.patches = PatchCache(context.patchify, settings.patch_cache_mb * 2**20)
        self.context = replace(context, patchify=self.patches)
        self.settings = settings
        self.backward = backward
        self.sync_gradients = sync_gradients
        self.reference = reference
        self.gate = gate
        self.park_reference = park_reference
        self.bad_updates_in_a_row = 0
        self.rejected = False
        """Whether the gate refused the last batch."""
        self.off_policy: OffPolicyWeighting | None = None
        """Replaces the loss of tokens that the policy did not sample; None = the algorithm's own."""

    def run(
        self,
        batch: StepBatch,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> tuple[int, MetricBag]:
        """Update the policy on `batch`; a collective that every rank calls.

        Returns:
            (optimizer steps made, metrics not yet reduced).

        Raises:
            RuntimeError: the gate's patience is over; the policy has not moved.
        """
        bag = MetricBag()
        self.rejected = False
        data = collect(batch)
        self.algorithm.check_rewards(data.rewards, data.uids)
        self.algorithm.begin_step(batch.rl_step)
        for name, value in self.algorithm.scalars().items():
            bag.max(name, value)
        minibatches = self._minibatches(batch, data)
        several = len(minibatches) * self.settings.epochs > 1
        old_needed = several or self.algorithm.needs.old_logprobs
        self.patches.begin(keep=old_needed or self.reference is not None or not self.layout.keeps_groups)
        cache = self._cache(data, bag, old_needed)
        diagnostics.log_sources(bag, data, cache.advantages)
        diagnostics.log_rewards(bag, data, torch.tensor([float(cache.advantages[k]) for k in data.keys]), batch)
        for part, lr in learning_rates(optimizer).items():  # before the scheduler moves them
            bag.max(f"lr/{part}", lr)
        updates = tried = 0
        for keys in minibatches * self.settings.epochs:
            updates += self._update(data, keys, cache, optimizer, scheduler, bag, first=updates == 0)
            tried += 1
            if self.rejected:
                break
        self.patches.begin(keep=False)
        bag.scale("losses/", 1 / tried)
        bag.max("train/updates", updates)
        return updates, bag

    def _minibatches(self, batch: StepBatch, data: Collected) -> list[list[Key]]:
        """Keys of each optimizer step; the number of steps is the same on all ranks."""
        if self.settings.update_batch_size is None:
            return [data.keys]
        if self.settings.update_batch_size % world_size():
            raise ValueError(
                f"update_batch_size={self.settings.update_batch_size} does not divide by {world_size()} ranks"
            )
        # Counted over all ranks: dynamic sampling leaves different numbers of groups on them.
        groups = float(all_reduce(torch.tensor([len(batch.groups)], dtype=torch.float64)))
        count = max(1, math.ceil(groups / self.settings.update_batch_size))
        result: list[list[Key]] = [[] for _ in range(count)]
        for key in data.keys:
            result[key[0] * count // len(batch.groups)].append(key)
        return result

    def _cache(self, data: Collected, bag: MetricBag, old_needed: bool) -> TokenCache:
        """Run the passes that are needed, then turn rewards into advantages."""
        old = self.score(self.policy, data, data.keys) if old_needed else {}
        ref = self._score_reference(data)
        rewards = data.rewards
        kl = self.algorithm.kl
        if kl is not None and kl.where == "reward" and data.keys:
            penalty = torch.stack([kl(old[key], ref[key]).sum() for key in data.keys]).cpu()
            rewards = replace(rewards, total=rewards.total - kl.beta * penalty)
            for key in data.keys:
                bag.tokens("policy/kl_ref", kl(old[key], ref[key]))
        advantages = self.algorithm.advantages(rewards).float().to(self.context.device)
        return TokenCache(old, ref, dict(zip(data.keys, advantages, strict=True)))

    def _score_reference(self, data: Collected) -> dict[Key, torch.Tensor]:
        if self.reference is None:
            return {}
        if self.park_reference:
            self.reference.to(self.context.device)
        try:
            return self.score(self.reference, data, data.keys)
        finally:
            if self.park_reference:
                self.reference.to("cpu")

    @torch.no_grad()
    def score(self, policy: PolicyModel, data: Collected, keys: Sequence[Key]) -> dict[Key, torch.Tensor]:
        """Log-probs of responses under `policy`, without gradient; a collective."""
        result: dict[Key, torch.Tensor] = {}
        for micro_batch in self.micro_batches(data, keys):
            outputs = self._forward(policy, micro_batch, with_entropy=False)
            if micro_batch.response_keys:
                lengths = torch.bincount(micro_batch.response_index).tolist()
                result.update(zip(micro_batch.response_keys, outputs.logprobs.split(lengths), strict=True))
        return result

    def micro_batches(self, data: Collected, keys: Sequence[Key]) -> Iterator[MicroBatch]:
        """Micro-batches of `keys`, built when they are asked for; as many on every rank (short ranks get dummies)."""
        yield from self._collate(self._plan(data, keys))

    def _collate(self, plan: list[list[Piece]]) -> Iterator[MicroBatch]:
        for pieces in plan:
            yield self.layout.collate(pieces, self.context) if pieces else dummy_micro_batch(self.context)

    def _plan(self, data: Collected, keys: Sequence[Key]) -> list[list[Piece]]:
        budget = self.settings.micro_batch_tokens
        pieces = self.layout.pieces(data.groups, data.selection(keys), budget)
        plan = plan_micro_batches(pieces, self.layout, budget)
        # At least one, so that an update without any signal still has gradients (zeros), as an exact one would.
        most = max(1, int(all_reduce(torch.tensor([len(plan)], dtype=torch.float64), "max")))
        return plan if len(plan) == most else plan_micro_batches(pieces, self.layout, budget, most)

    def _forward(self, policy: PolicyModel, micro_batch: MicroBatch, with_entropy: bool) -> TokenOutputs:
        return policy(micro_batch, self.settings.temperature, self.context.family.banned_ids, with_entropy)

    def _update(
        self,
        data: Collected,
        keys: Sequence[Key],
        cache: TokenCache,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        bag: MetricBag,
        first: bool,
    ) -> int:
        """One optimizer step over `keys` of all ranks; returns the number of steps made (0 or 1)."""
        counts = self._counts(data, keys)
        if counts.responses == 0:
            bag.max("train/skipped_empty", 1.0)
            return 0
        optimizer.zero_grad(set_to_none=True)
        finite = True
        bag.add("losses/policy", 0.0)  # exists also where every micro-batch is a dummy
        plan = self._plan(data, self._needed(keys, cache))
        diagnostics.log_balance(bag, plan)
        for micro_batch in self._collate(plan):
            outputs = self._forward(self.policy, micro_batch, self.settings.entropy)
            loss = self._loss(micro_batch, outputs, data, cache, counts, bag, first)
            finite &= bool(torch.isfinite(loss.detach()))
            # Strategies average gradients over ranks; the loss is already a share of the global mean.
            self.backward(loss * world_size())
        if first and self._refused(bag, finite):
            optimizer.zero_grad(set_to_none=True)
            return 0
        return self._apply(optimizer, scheduler, bag, finite)

    def _refused(self, bag: MetricBag, finite: bool) -> bool:
        """Whether the gate refuses the engine's samples, alike on every rank; a non-finite update is skipped anyway."""
        if self.gate is None or _anywhere(not finite):
            return False
        self.rejected = not self.gate.accepts(bag.reduce("mismatch/"))
        if self.rejected:
            bag.max("train/skipped_mismatch", 1.0)
        return self.rejected

    def _needed(self, keys: Sequence[Key], cache: TokenCache) -> list[Key]:
        """Keys whose forward can change the gradient."""
        in_loss = self.algorithm.kl is not None and self.algorithm.kl.where == "loss"
        if not self.settings.skip_zero_advantage or in_loss or self.settings.entropy_bonus:
            return list(keys)
        return [key for key in keys if float(cache.advantages[key]) != 0.0]

    def _counts(self, data: Collected, keys: Sequence[Key]) -> Counts:
        tokens = sum(len(data.groups[g].responses[r].token_ids) for g, r in keys)
        total = all_reduce(torch.tensor([tokens, len(keys)], dtype=torch.float64))
        return Counts(tokens=float(total[0]), responses=float(total[1]))

    def _loss(
        self,
        micro_batch: MicroBatch,
        outputs: TokenOutputs,
        data: Collected,
        cache: TokenCache,
        counts: Counts,
        bag: MetricBag,
        first: bool,
    ) -> torch.Tensor:
        if not micro_batch.response_keys:
            return 0.0 * outputs.logprobs.sum()
        tokens = self._token_batch(micro_batch, outputs, data, cache)
        result = self.algorithm.token_loss(tokens)
        if self.off_policy is not None and tokens.off_policy is not None:
            result = self.off_policy(tokens, result)
        weights = self.algorithm.token_weights(tokens, counts)
        loss = self._policy_loss(tokens, result, weights, bag)
        kl = self.algorithm.kl
        if kl is not None and kl.where == "loss":
            assert tokens.ref_logprobs is not None
            divergence = kl(tokens.logprobs, tokens.ref_logprobs)
            bag.tokens("policy/kl_ref", divergence.detach())
            loss = loss + kl.beta * (divergence * weights).sum()
        if self.settings.entropy_bonus:
            assert tokens.entropy is not None
            loss = loss - self.settings.entropy_bonus * (tokens.entropy * weights).sum()
        bag.add("losses/total", float(loss.detach()))
        diagnostics.log_tokens(bag, tokens, result, first)
        diagnostics.log_mismatch(bag, tokens, micro_batch, data, first)
        return loss

    def _policy_loss(
        self, tokens: TokenBatch, result: TokenLoss, weights: torch.Tensor, bag: MetricBag
    ) -> torch.Tensor:
        token_loss = result.loss
        if self.settings.importance is not None:
            correction, outside = self.settings.importance(tokens)
            token_loss = token_loss * correction
            bag.tokens("mismatch/importance", correction)
            bag.tokens("mismatch/importance_outside", outside)
        loss = (token_loss * weights).sum()
        bag.add("losses/policy", float(loss.detach()))
        return loss

    def _token_batch(
        self, micro_batch: MicroBatch, outputs: TokenOutputs, data: Collected, cache: TokenCache
    ) -> TokenBatch:
        keys = micro_batch.response_keys
        index = micro_batch.response_index
        device = outputs.logprobs.device
        responses = [data.groups[g].responses[r] for g, r in keys]
        offline = np.concatenate([r.offline_mask for r in responses])
        rollout = torch.cat([torch.as_tensor(r.logprobs, dtype=torch.float32) for r in responses]).to(device)
        old = torch.cat([cache.old[key] for key in keys]) if cache.old else outputs.logprobs.detach()
        return TokenBatch(
            logprobs=outputs.logprobs,
            old_logprobs=old,
            advantages=torch.stack([cache.advantages[key] for key in keys])[index],
            response=index,
            lengths=torch.bincount(index, minlength=len(keys)),
            ref_logprobs=torch.cat([cache.ref[key] for key in keys]) if cache.ref else None,
            rollout_logprobs=rollout,
            entropy=outputs.entropy,
            off_policy=torch.from_numpy(offline).to(device) if offline.any() else None,
        )

    def _apply(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        bag: MetricBag,
        finite: bool,
    ) -> int:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.sync_gradients is not None:
            self.sync_gradients(parameters)
        norm = clip_gradients(parameters, self.settings.clip_norm)
        if _anywhere(not (finite and math.isfinite(norm))):
            optimizer.zero_grad(set_to_none=True)
            self.bad_updates_in_a_row += 1
            bag.max("train/skipped_nonfinite", 1.0)
            log.warning("Loss or gradient is not finite (gradient norm %s): this update is skipped", norm)
            return 0
        self.bad_updates_in_a_row = 0
        bag.max("train/grad_norm", norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()
        return 1


def _anywhere(flag: bool) -> bool:
    """Whether `flag` is set on any rank; a collective."""
    return bool(float(all_reduce(torch.tensor([float(flag)], dtype=torch.float64), "max")))
