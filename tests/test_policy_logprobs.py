"""Chunked log-probs against the direct formula: values, gradients (float64), entropy, ban."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_modules.core.logprobs import token_logprobs


def reference(hidden, weight, targets, temperature, banned):
    logits = hidden @ weight.T / temperature
    # Drop the banned columns: the same distribution, without infinities that autograd would turn into NaN.
    kept = [i for i in range(weight.shape[0]) if i not in banned]
    logp = logits[:, kept].log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


def inputs(dtype=torch.float64, rows=7, vocab=11, dim=5):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab - 2, (rows,), generator=generator)
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_values_and_gradients_equal_the_direct_formula_for_any_chunk(chunk):
    hidden, weight, targets = inputs()
    banned = (9, 10)
    logp, entropy = token_logprobs(hidden, weight, targets, 0.7, banned, True, chunk)
    want_logp, want_entropy = reference(hidden, weight, targets, 0.7, banned)
    torch.testing.assert_close(logp, want_logp, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=1e-12, atol=1e-12)
    scale = torch.linspace(-1, 2, 7, dtype=torch.float64)
    got = torch.autograd.grad((logp * scale + entropy * scale.flip(0)).sum(), (hidden, weight))
    want = torch.autograd.grad((want_logp * scale + want_entropy * scale.flip(0)).sum(), (hidden, weight))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradcheck_in_float64():
    hidden, weight, targets = inputs(rows=4)
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, 1.3, (10,), True, 3), (hidden, weight))


def test_uniform_logits_by_hand():
    logp, entropy = token_logprobs(torch.zeros(2, 3), torch.ones(8, 3), torch.tensor([0, 5]), 1.0, (6, 7), True)
    torch.testing.assert_close(logp, torch.full((2,), -math.log(6)))
    torch.testing.assert_close(entropy, torch.full((2,), math.log(6)))


def test_bfloat16_input_accumulates_in_float32():
    hidden, weight, targets = inputs(torch.bfloat16)
    logp, _ = token_logprobs(hidden, weight, targets)
    assert logp.dtype == torch.float32
    logp.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


def test_no_response_tokens_still_reach_every_parameter():
    hidden, weight, _ = inputs()
    logp, _ = token_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    logp.sum().backward()
    assert torch.count_nonzero(weight.grad) == 0


def test_temperature_zero_is_refused():
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="temperature=0"):
        token_logprobs(hidden, weight, targets, 0)


def test_chunks_without_tokens_are_refused():
    """A negative step would fill nothing and return whatever lay in memory."""
    with pytest.raises(ValueError, match="chunk_size=-3"):
        token_logprobs(*inputs(), chunk_size=-3)
