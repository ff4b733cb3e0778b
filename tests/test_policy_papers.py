"""Every algorithm's whole loss against its paper's objective, written out once more in plain Python.

Nothing here shares code with the algorithms: rewards, lengths and log-probs go in as lists, one number comes out.
"""

from __future__ import annotations

import itertools
import math
from statistics import fmean, pstdev, stdev

import pytest
import torch
from test_policy_grpo import table, token_batch

from lightning_modules.algorithms.base import Counts
from lightning_modules.algorithms.cispo import CISPO
from lightning_modules.algorithms.dapo import DAPO
from lightning_modules.algorithms.dr_grpo import DrGRPO
from lightning_modules.algorithms.gdpo import GDPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.gspo import GSPO, GSPOToken
from lightning_modules.algorithms.luffy import Luffy
from lightning_modules.algorithms.passk import PassK
from lightning_modules.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from lightning_modules.algorithms.remax import ReMax
from lightning_modules.algorithms.rloo import RLOO
from lightning_modules.algorithms.sapo import SAPO

# Two prompts with three responses each. A case: (rewards, greedy rewards, lengths, seed of the log-ratios, their size).
CASES = {
    "mixed": ([1.0, 0.0, 0.4, 0.0, 1.0, 1.0], [0.4, 1.0], [3, 1, 4, 2, 2, 5], 1, 0.4),
    "on policy": ([0.9, 0.1, 1.0, 0.1, 0.1, 0.9], [1.0, 0.0], [1, 2, 3, 4, 5, 6], 2, 0.0),
    "one group without spread": ([0.7, 0.7, 0.7, 0.0, 0.9, 0.2], [0.7, 0.2], [2, 2, 2, 1, 1, 1], 3, 1.2),
}
GROUPS = (range(3), range(3, 6))
EPS = 1e-6


def numbers(case):
    """(rewards, greedy, lengths, new log-probs, old log-probs) of a case; log-probs per response."""
    rewards, greedy, lengths, seed, size = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    old = [(-2 * torch.rand(n, generator=generator, dtype=torch.float64)).tolist() for n in lengths]
    new = [[o + size * float(torch.randn((), generator=generator, dtype=torch.float64)) for o in row] for row in old]
    return rewards, greedy, lengths, new, old


def flat(rows):
    return list(itertools.chain.from_iterable(rows))


def clip(x, low, high):
    return min(max(x, low), high)


def per_group(rewards, function):
    return [function(i, [rewards[j] for j in group]) for group in GROUPS for i in group]


def normalised(rewards):
    return per_group(rewards, lambda i, g: (rewards[i] - fmean(g)) / (stdev(g) + EPS))


def centred(rewards):
    return per_group(rewards, lambda i, g: rewards[i] - fmean(g))


def whitened(values, lengths):
    tokens = [v for v, n in zip(values, lengths, strict=True) for _ in range(n)]
    return [(v - fmean(tokens)) / (pstdev(tokens) + EPS) for v in values]


def ppo(low, high):
    return lambda r, a: min(r * a, clip(r, 1 - low, 1 + high) * a)


def token_objectives(term, advantages, new, old):
    """term(ratio, advantage) of every token, per response."""
    return [
        [term(math.exp(x - y), a) for x, y in zip(n, o, strict=True)]
        for n, o, a in zip(new, old, advantages, strict=True)
    ]


def token_mean(rows):
    flat = [x for row in rows for x in row]
    return sum(flat) / len(flat)


def response_mean(rows):
    return fmean(fmean(row) for row in rows)


def grpo(rewards, greedy, lengths, new, old):  # DeepSeekMath, equation 3, beta = 0
    return response_mean(token_objectives(ppo(0.2, 0.2), normalised(rewards), new, old))


def dapo(rewards, greedy, lengths, new, old):  # equations 8, 9, 13; limit 5, cache 2
    def punishment(n):
        return 0.0 if n <= 3 else (3 - n) / 2 if n <= 5 else -1.0

    shaped = [r + punishment(n) for r, n in zip(rewards, lengths, strict=True)]
    return token_mean(token_objectives(ppo(0.2, 0.28), normalised(shaped), new, old))


def dr_grpo(rewards, greedy, lengths, new, old):  # token sums over a constant, no spread
    rows = token_objectives(ppo(0.2, 0.2), centred(rewards), new, old)
    return fmean(sum(row) / 10 for row in rows)


def gspo(rewards, greedy, lengths, new, old):  # equations 5 to 7
    ratios = [math.exp((sum(n) - sum(o)) / len(n)) for n, o in zip(new, old, strict=True)]
    return fmean(ppo(0.1, 0.2)(s, a) for s, a in zip(ratios, normalised(rewards), strict=True))


def cispo(rewards, greedy, lengths, new, old):  # equations 4 and 5
    rows = [
        [clip(math.exp(x - y), 0.001, 1.5) * a * x for x, y in zip(n, o, strict=True)]
        for n, o, a in zip(new, old, normalised(rewards), strict=True)
    ]
    return token_mean(rows)


def sapo(rewards, greedy, lengths, new, old):
    def term(ratio, advantage):
        tau = 1.0 if advantage > 0 else 1.05
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage

    return response_mean(token_objectives(term, normalised(rewards), new, old))


def reinforce_pp(rewards, greedy, lengths, new, old):
    return token_mean(token_objectives(ppo(0.2, 0.2), whitened(rewards, lengths), new, old))


def reinforce_pp_baseline(rewards, greedy, lengths, new, old):
    return token_mean(token_objectives(ppo(0.2, 0.2), whitened(centred(rewards), lengths), new, old))


def remax(rewards, greedy, lengths, new, old):
    advantages = [r - greedy[i // 3] for i, r in enumerate(rewards)]
    return token_mean(token_objectives(ppo(0.2, 0.2), advantages, new, old))


def rloo(rewards, greedy, lengths, new, old):
    advantages = per_group(rewards, lambda i, g: rewards[i] - (sum(g) - rewards[i]) / (len(g) - 1))
    return token_mean(token_objectives(ppo(0.2, 0.2), advantages, new, old))


def parts_of(rewards):
    return {"accuracy": [float(r > 0.5) for r in rewards], "format": [float(r != 0.0) for r in rewards]}


def gdpo(rewards, greedy, lengths, new, old):  # equations 4 to 6
    parts = parts_of(rewards)
    total = [0.9 * a + 0.1 * f for a, f in zip(normalised(parts["accuracy"]), normalised(parts["format"]), strict=True)]
    return response_mean(token_objectives(ppo(0.2, 0.2), whitened(total, [1] * 6), new, old))


def passk(rewards, greedy, lengths, new, old):
    """Every pair of a group is one answer that is right when one of the two is; a response gets its pairs' mean."""
    advantages = []
    for group in GROUPS:
        pairs = list(itertools.combinations(group, 2))
        worth = [float(any(rewards[i] >= 0.5 for i in pair)) for pair in pairs]
        spread = pstdev(worth)
        score = [(w - fmean(worth)) / spread if spread else 0.0 for w in worth]
        advantages += [fmean(s for s, pair in zip(score, pairs, strict=True) if i in pair) for i in group]
    return response_mean(token_objectives(ppo(0.2, 0.2), advantages, new, old))


def luffy(rewards, greedy, lengths, new, old):
    """The last response of each group is somebody else's: pi / (pi + 0.1), never clipped."""
    rows = token_objectives(ppo(0.2, 0.2), centred(rewards), new, old)
    for i in (2, 5):
        rows[i] = [math.exp(x) / (math.exp(x) + 0.1) * centred(rewards)[i] for x in new[i]]
    return token_mean(rows)


PAPERS = {
    "grpo": (GRPO(), grpo),
    "dapo": (DAPO(overlong_max=5, overlong_buffer=2), dapo),
    "dr_grpo": (DrGRPO(max_tokens=10), dr_grpo),
    "gspo": (GSPO(0.1, 0.2), gspo),
    "gspo_token": (GSPOToken(0.1, 0.2), gspo),
    "cispo": (CISPO(clip_high=0.5), cispo),
    "sapo": (SAPO(), sapo),
    "reinforce_pp": (ReinforcePP(), reinforce_pp),
    "reinforce_pp_baseline": (ReinforcePPBaseline(), reinforce_pp_baseline),
    "remax": (ReMax(), remax),
    "rloo": (RLOO(), rloo),
    "gdpo": (GDPO(weights={"accuracy": 0.9, "format": 0.1}), gdpo),
    "passk": (PassK(k=2), passk),
    "luffy": (Luffy(), luffy),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PAPERS)
def test_loss_is_the_papers_objective(name, case):
    algorithm, paper = PAPERS[name]
    rewards, greedy, lengths, new, old = numbers(case)
    scores = table(
        rewards,
        [0, 0, 0, 1, 1, 1],
        greedy_total=torch.tensor(greedy, dtype=torch.float64),
        lengths=torch.tensor(lengths),
        correct=torch.tensor(rewards, dtype=torch.float64),
        parts={k: torch.tensor(v, dtype=torch.float64) for k, v in parts_of(rewards).items()},
    )
    advantages = algorithm.advantages(scores)
    owner = [i for i, n in enumerate(lengths) for _ in range(n)]
    offline = torch.tensor([name == "luffy" and i in (2, 5) for i in owner])
    batch = token_batch(flat(new), flat(old), advantages[owner], owner, off_policy=offline)
    weights = algorithm.token_weights(batch, Counts(tokens=sum(lengths), responses=6))
    loss = float((algorithm.token_loss(batch).loss * weights).sum())
    assert loss == pytest.approx(-paper(rewards, greedy, lengths, new, old), rel=1e-6, abs=1e-9)


def test_the_cases_tell_the_algorithms_apart():
    values = [round(paper(*numbers("mixed")), 9) for name, (_, paper) in PAPERS.items() if name != "gspo_token"]
    assert len(set(values)) == len(values)
