import pytest

from ingot.ir.errors import InternalError
from ingot.runtime.pages import PagePool


def test_all_pages_can_be_held_and_come_back():
    pool = PagePool(5)
    pages = pool.allocate(5)
    assert sorted(pages) == [0, 1, 2, 3, 4] and pool.num_free == 0 and pool.num_held == 5
    pool.free(pages)
    assert pool.num_free == 5 and pool.num_held == 0


def test_pages_for_rounds_up():
    pool = PagePool(4, page_size=16)
    assert [pool.pages_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_too_many_pages():
    pool = PagePool(2)
    with pytest.raises(InternalError, match="3 pages asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("wrong", [[0, 0], [5], [-1], [1]], ids=["twice", "beyond", "negative", "not held"])
def test_freeing_what_is_not_held_frees_nothing(wrong):
    pool = PagePool(5)
    held = pool.allocate(5)
    pool.free([1])
    with pytest.raises(InternalError, match="held"):
        pool.free([2, *wrong])
    assert pool.num_free == 1 and pool.num_held == len(held) - 1


def test_double_free_while_releasing():
    pool = PagePool(5)
    pages = pool.allocate(2)
    pool.free(pages, busy_until=0)
    with pytest.raises(InternalError):
        pool.free(pages)


def test_pages_of_a_step_in_flight_wait_for_it():
    pool = PagePool(4)
    first, second = pool.allocate(1), pool.allocate(2)
    pool.free(first, busy_until=7)
    pool.free(second, busy_until=8)
    assert (pool.num_free, pool.num_releasing, pool.num_held) == (1, 3, 0)
    pool.retire(6)
    assert pool.num_free == 1
    pool.retire(7)
    assert (pool.num_free, pool.num_releasing) == (2, 2)
    pool.retire(9)
    assert (pool.num_free, pool.num_releasing) == (4, 0)


def test_permuted_order_is_seeded_and_complete():
    orders = [PagePool(50, permute_seed=seed).allocate(50) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(50)) != orders[0]


def test_on_release_is_told_when_pages_become_allocatable():
    released = []
    pool = PagePool(4, on_release=released.append)
    pages = pool.allocate(2)
    pool.free(pages, busy_until=3)
    assert released == []
    pool.retire(3)
    assert released == [pages]


@pytest.mark.parametrize("sizes", [(0, 16), (4, 0)])
def test_empty_pool(sizes):
    with pytest.raises(InternalError):
        PagePool(*sizes)
