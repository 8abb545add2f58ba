"""The budget: nothing is granted beyond the limit, and everything that ends is given back."""

import pytest

from darknight.errors import OpError
from darknight.worker.budget import OVERHEAD, Budget, size_from, size_in_words

MIB = 1 << 20


def test_what_arrives_is_kept_and_computed_with_shares_one_limit():
    budget = Budget(10 * MIB)
    budget.admit(4 * MIB)
    with pytest.raises(
        OpError, match=r"no room: the computation .* needs 7\.0 MiB and 6\.0 MiB of .* 10\.0 MiB are free"
    ):
        budget.working(7 * MIB).__enter__()
    budget.arrived(4 * MIB)
    budget.keep("weights", 4 * MIB)
    assert budget.held == 4 * MIB + OVERHEAD
    with budget.working(5 * MIB), pytest.raises(OpError, match="--memory-limit"):
        budget.admit(2 * MIB)
    budget.admit(2 * MIB)  # the computation is over
    budget.arrived(2 * MIB)
    with pytest.raises(OpError, match="computation"), budget.working(7 * MIB):
        pass
    budget.release("weights")
    budget.release("weights")
    assert budget.held == 0
    with budget.working(10 * MIB):
        pass


def test_the_same_key_is_counted_once():
    budget = Budget(10 * MIB)
    for size in (6, 7, 8):
        budget.keep("call", size * MIB)
    assert budget.held == 8 * MIB + OVERHEAD
    with pytest.raises(OpError, match="keep"):
        budget.keep("call", 11 * MIB)
    assert budget.held == 8 * MIB + OVERHEAD  # a refusal changes nothing


def test_a_computation_that_fails_gives_its_room_back():
    budget = Budget(MIB)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), budget.working(MIB):
            raise ZeroDivisionError


def test_things_without_a_size_cannot_be_kept_without_end():
    budget = Budget(MIB)
    for call in range(MIB // OVERHEAD):
        budget.keep(call, 0)
    with pytest.raises(OpError, match="keep"):
        budget.keep("one more", 0)


def test_a_message_that_could_not_be_read_after_all_claims_nothing():
    budget = Budget(10 * MIB)
    budget.admit(8 * MIB)
    budget.admit(8 * MIB)  # the one before never arrived; there is one at a time
    with pytest.raises(OpError, match="this message needs"):
        budget.admit(11 * MIB)
    with budget.working(10 * MIB):
        pass


def test_room_is_made_before_what_was_granted_is_allocated_and_not_for_what_was_refused():
    asked = []
    budget = Budget(MIB, asked.append)
    budget.admit(1000)
    with budget.working(2000):
        assert asked == [1000, 2000]
    with pytest.raises(OpError):
        budget.admit(2 * MIB)
    assert asked == [1000, 2000]


def test_without_a_limit_nothing_is_refused():
    budget = Budget()
    budget.admit(1 << 60)
    with budget.working(1 << 60):
        budget.keep("a", 1 << 60)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("1000", 1000), ("7B", 7), ("2KiB", 2048)],
)
def test_sizes_are_read(text, size):
    assert size_from(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8GB", "8 G", "-1GiB", "0", "nan", "infGiB", "0.1B", "1e400"])
def test_what_is_no_size_is_refused_in_words(text):
    with pytest.raises(ValueError, match="such as 512MiB or 8GiB"):
        size_from(text)


def test_sizes_are_written():
    assert [size_in_words(n) for n in (0, 1023, 1024, 3 << 29)] == ["0 B", "1023 B", "1.0 KiB", "1.5 GiB"]
