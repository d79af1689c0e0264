"""Samples come in random order, every one once before any comes again."""

import torch

from rotquant.models.batches import shuffled_batches


def test_every_sample_is_used_before_any_comes_again() -> None:
    batches = list(shuffled_batches(6, batch_size=2, steps=6, seed=0))
    for epoch in (batches[:3], batches[3:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(6))


def test_the_seed_decides_the_order() -> None:
    first, again, other = (torch.cat(list(shuffled_batches(20, 5, 4, seed))) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_batch_holds_no_more_than_there_is() -> None:
    assert [len(batch) for batch in shuffled_batches(3, batch_size=8, steps=2, seed=0)] == [3, 3]
