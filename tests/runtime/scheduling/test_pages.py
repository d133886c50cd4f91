import random

import pytest

from ingot.ir.errors import InternalError
from ingot.runtime.pages.pool import PagePool


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
    with pytest.raises(InternalError, match="3 pages requested, 2 free"):
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


def test_pages_that_come_together_lie_behind_each_other():
    def run(count):
        pages = pool.allocate(count)
        assert pages == list(range(pages[0], pages[0] + count))
        return pages

    pool = PagePool(20)
    first, second = run(6), run(9)
    for page in first:
        pool.keep(page, b"%d" % page)
    pool.free(first)  # a kept page that goes is the last one of its sequence first
    assert run(5) and pool.num_kept == 6 and run(5) and pool.num_kept == 1
    pool.free(second)
    run(9)


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


# Pages that are kept.


def test_a_kept_page_is_found_held_and_afterwards():
    pool = PagePool(3)
    first, second = pool.allocate(2)
    assert pool.keep(first, b"1") == first and pool.keep(second, b"2") == second
    assert pool.find([b"1", b"2", b"3"]) == [first, second] and pool.find([b"3", b"1"]) == []
    pool.share([first])
    pool.free([first, second])
    assert (pool.num_held, pool.num_free, pool.num_kept) == (1, 2, 2)
    pool.free([first])
    assert pool.num_free == 3 and pool.find([b"1", b"2"]) == [first, second]
    assert pool.num_free_without([first]) == 2
    pool.share([second])
    assert pool.num_held == 1 and pool.num_free == 2


def test_a_page_that_a_step_uses_can_be_shared_and_not_allocated():
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    pool.keep(page, b"1")
    pool.free([page], busy_until=3)
    assert pool.num_free == 0 and pool.num_releasing == 1 and pool.num_free_without([page]) == 0
    pool.share(pool.find([b"1"]))
    assert pool.num_held == 1
    pool.free([page], busy_until=4)
    pool.retire(3)
    assert pool.num_free == 0, "step 4 uses it"
    pool.retire(4)
    assert pool.num_free == 1 and pool.find([b"1"]) == [page]


def test_the_same_content_is_kept_once():
    pool = PagePool(3)
    first, second = pool.allocate(2)
    assert pool.keep(first, b"1") == pool.keep(second, b"1") == first
    pool.free([second])
    assert pool.num_free == 2 and pool.num_kept == 1
    pool.forget([first])
    assert pool.find([b"1"]) == [] and pool.num_held == 1


def test_what_cannot_be_kept_or_shared():
    pool = PagePool(3)
    page, other = pool.allocate(2)
    pool.keep(page, b"1")
    pool.free([other])
    with pytest.raises(InternalError, match="kept"):
        pool.keep(other, b"2")
    with pytest.raises(InternalError, match="kept"):
        pool.keep(page, b"2")
    with pytest.raises(InternalError, match=f"page {other} shared"):
        pool.share([page, other])
    assert pool.num_held == 1 and pool.num_kept == 1


class Model:
    """A pool by the rules alone: where each page is, and for one that is kept and free, when it was freed and where it
    stood."""

    def __init__(self, count):
        self.holders = dict.fromkeys(range(count), 0)
        self.digest = dict.fromkeys(range(count))
        self.busy = dict.fromkeys(range(count))
        self.age = dict.fromkeys(range(count), (0, 0))

    def free(self):
        return [page for page, held in self.holders.items() if not held and self.busy[page] is None]

    def expect(self, count):
        """The kept pages that `allocate(count)` gives up."""
        free = self.free()
        kept = sorted((page for page in free if self.digest[page]), key=self.age.__getitem__)
        return set(kept[: max(0, count - (len(free) - len(kept)))])


@pytest.mark.parametrize("seed", range(12))
def test_a_pool_does_what_its_rules_say(seed):
    draw, step, worthless = random.Random(seed), 0, []
    pool = PagePool(12, permute_seed=draw.choice([None, seed]), on_release=worthless.extend)
    model, chains = Model(12), []  # a chain: pages of one holder, in order
    for clock in range(1, 400):
        worthless.clear()
        kind = draw.choice(["allocate", "allocate", "share", "free", "free", "keep", "keep", "retire", "forget"])
        if kind == "allocate" and (count := draw.randint(0, 4)) <= pool.num_free:
            given_up = model.expect(count)
            pages = pool.allocate(count)
            assert set(pages) <= set(model.free()) and given_up == {page for page in pages if model.digest[page]}
            assert set(worthless) == given_up, "their content ends here"
            for page in pages:
                model.holders[page], model.digest[page] = 1, None
            chains.append(pages)
        elif kind == "share" and chains:
            digests = [model.digest[page] for page in draw.choice(chains)]
            found = pool.find(digest or b"none" for digest in digests)
            known = {digest: page for page, digest in model.digest.items() if digest}
            expected = []
            for digest in digests:
                if digest not in known:
                    break
                expected.append(known[digest])
            assert found == expected
            assert pool.num_free_without(found) == len(set(model.free()) - set(found))
            pool.share(found)
            for page in found:
                model.holders[page], model.busy[page] = model.holders[page] + 1, None
            chains.append(found)
        elif kind == "free" and chains:
            pages = chains.pop(draw.randrange(len(chains)))
            until = draw.choice([None, step])
            pool.free(pages, until)
            for place, page in enumerate(pages):
                model.holders[page] -= 1
                if not model.holders[page]:
                    model.busy[page], model.age[page] = until, (clock, -place)
        elif kind == "keep" and chains:
            for page in draw.choice(chains):
                digest = model.digest[page] or b"%d" % draw.randrange(30)
                holder = next((other for other, has in model.digest.items() if has == digest), page)
                assert pool.keep(page, digest) == holder
                if holder == page:
                    model.digest[page] = digest
        elif kind == "retire":
            pool.retire(step)
            for page, until in model.busy.items():
                if until is not None:
                    # Pages come back in the order in which they were freed, behind those that are free.
                    model.busy[page], model.age[page] = None, (clock, *model.age[page])
            step += 1
        elif kind == "forget" and chains:
            pages = draw.choice(chains)
            pool.forget(pages)
            model.digest.update(dict.fromkeys(pages))
        assert pool.num_held == sum(held > 0 for held in model.holders.values())
        assert pool.num_free == len(model.free())
        assert pool.num_kept == sum(digest is not None for digest in model.digest.values())
    for pages in chains:
        pool.free(pages)
    pool.retire(step)
    worthless.clear()
    kept = pool.num_kept
    pool.forget_all()
    assert pool.num_free == 12 and pool.num_kept == 0 and len(worthless) == kept
