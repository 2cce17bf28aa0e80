"""ElasticSampler: every index once in an epoch, whatever happens in the middle of it."""

from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlike.elastic import ElasticSampler, TorchState
from hvlike.training.elastic.local_parts import order_of, share_of


@given(st.lists(st.integers(), unique=True, max_size=30), st.integers(1, 7))
def test_shares_cover_everything_and_are_equally_long(indices: list[int], size: int) -> None:
    shares = [share_of(indices, rank, size, indices) for rank in range(size)]
    assert {len(share) for share in shares} == {-(-len(indices) // size)}
    together = [index for share in shares for index in share]
    assert set(together) == set(indices)
    assert len(together) - len(indices) < size


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 5))
def test_the_rest_of_an_epoch_is_divided_as_without_an_interruption(length: int, size: int, each: int) -> None:
    order = list(range(100, 100 + length))
    whole = [share_of(order, rank, size, order) for rank in range(size)]
    each = min(each, len(whole[0]))
    done = {index for share in whole for index in share[:each]}
    rest = [index for index in order if index not in done]
    if rest:
        assert [share_of(rest, rank, size, order) for rank in range(size)] == [share[each:] for share in whole]


@given(st.integers(0, 40), st.integers(0, 5), st.integers(0, 5))
def test_the_order_depends_on_seed_and_epoch_alone(length: int, seed: int, epoch: int) -> None:
    order = order_of(length, seed, epoch, shuffle=True)
    assert sorted(order) == list(range(length))
    assert order == order_of(length, seed, epoch, shuffle=True)
    assert order_of(length, seed, epoch, shuffle=False) == list(range(length))
    if length > 20:
        assert order != order_of(length, seed, epoch + 1, shuffle=True)


@pytest.mark.parametrize("length", [0, 1, 23, 24])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_ranks_together_process_each_index(hvd: ModuleType, length: int, shuffle: bool) -> None:
    sampler = ElasticSampler(range(length), shuffle=shuffle, seed=3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        everybody = hvd.allgather_object(list(sampler))
        assert {len(share) for share in everybody} == {len(sampler)}
        together = [index for share in everybody for index in share]
        assert set(together) == set(range(length))
        assert len(together) - length < hvd.size()


@pytest.mark.parametrize("batches", [0, 1, 2, 4])
def test_after_an_interruption_only_the_rest_is_handed_out(hvd: ModuleType, batches: int) -> None:
    sampler = ElasticSampler(range(37), seed=1)
    state = TorchState(sampler=sampler)
    sampler.set_epoch(2)
    before = list(sampler)
    for batch in range(batches):
        assert sampler.get_indices(batch, 2) == before[2 * batch : 2 * batch + 2]
        sampler.record_batch(batch, 2)
    state.commit()
    sampler.record_batch(batches, 2)
    sampler.set_epoch(5)
    state.restore()
    state.sync()
    assert sampler.epoch == 2
    done = {index for share in hvd.allgather_object(before[: 2 * batches]) for index in share}
    assert sampler.processed_indices == done
    left = hvd.allgather_object(list(sampler))
    assert {index for share in left for index in share} >= set(range(37)) - done
    assert sum(map(len, left)) - (37 - len(done)) < hvd.size()


def test_a_state_dict_goes_on_elsewhere(hvd: ModuleType) -> None:
    sampler = ElasticSampler(range(10), shuffle=False)
    sampler.record_indices([0, 1, 2])
    other = ElasticSampler(range(10), shuffle=False)
    other.load_state_dict(sampler.state_dict())
    sampler.record_indices([9])
    everybody = [index for share in hvd.allgather_object(list(other)) for index in share]
    assert set(everybody) >= set(range(3, 10))
    assert len(everybody) - 7 < hvd.size()
    other.set_epoch(1)
    assert {index for share in hvd.allgather_object(list(other)) for index in share} == set(range(10))


def test_ranks_in_another_epoch_have_nothing_to_add(hvd: ModuleType) -> None:
    sampler = ElasticSampler(range(12), shuffle=False)
    state = TorchState(sampler=sampler)
    sampler.set_epoch(hvd.rank() % 2)
    sampler.record_indices([hvd.rank()])
    state.sync()
    assert sampler.epoch == 0
    assert sampler.processed_indices == set(range(0, hvd.size(), 2))


def test_it_says_how_the_epoch_is_divided(hvd: ModuleType) -> None:
    sampler = ElasticSampler(range(10), shuffle=False)
    sampler.record_indices([0, 1, 2])
    sampler.reset()
    assert (sampler.rank, sampler.num_replicas) == (hvd.rank(), hvd.size())
    assert sampler.remaining_indices == list(range(3, 10))
    assert sampler.num_samples == len(sampler) == -(-7 // hvd.size())
    assert sampler.total_size == hvd.size() * len(sampler)


def test_a_commit_knows_what_all_ranks_have_processed(hvd: ModuleType) -> None:
    sampler = ElasticSampler(range(10 * hvd.size()), seed=2)
    state = TorchState(sampler=sampler)
    sampler.record_batch(0, 2 + hvd.rank())
    state.commit()
    # Any rank may be lost from here on: each one knows what is left.
    told = hvd.allgather_object((sorted(sampler.processed_indices), sampler.indices[: 2 + hvd.rank()]))
    assert {tuple(processed) for processed, _ in told} == {tuple(sorted(i for _, mine in told for i in mine))}
    sampler.record_batch(3, 1)
    state.restore()
    assert sampler.processed_indices == set(told[0][0])
