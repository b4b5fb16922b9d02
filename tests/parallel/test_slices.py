"""Where tokens and states go when the token axis is cut."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from kdakit.parallel.slices import Slice, dense_slice, packed_slice

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=7)


@st.composite
def packed(draw):
    """Lengths of sequences, and of slices with as many tokens."""
    sequences = draw(lengths)
    cuts = sorted(draw(st.lists(st.integers(0, sum(sequences)), max_size=7)))
    return sequences, [b - a for a, b in zip([0, *cuts], [*cuts, sum(sequences)], strict=True)]


@given(packed())
def test_every_token_and_every_state_has_one_place(drawn):
    sequences, tokens = drawn
    cu = [0, *accumulate(sequences)]
    begins, ends = [], []
    for rank, begin in enumerate([0, *accumulate(tokens)][:-1]):
        part = packed_slice(rank, tokens, cu)
        begins += range(part.first, part.last + part.tail)
        ends += ([part.first - 1] if part.carried and not part.through else []) + list(range(part.first, part.last))
        at = begin + part.head
        assert [at + x for x in part.offsets] == cu[part.first : part.last + 1] or part.first == part.last
        assert part.offsets[-1] == part.middle
        if part.tail:
            assert cu[part.last] == at + part.middle and cu[part.last + 1] > begin + tokens[rank]
        else:
            assert part.head + part.middle == tokens[rank]
        assert not (part.through and (part.tail or part.middle))
    assert begins == ends == list(range(len(sequences)))


@given(packed())
def test_what_goes_on_is_carried_by_the_next(drawn):
    sequences, tokens = drawn
    cu = [0, *accumulate(sequences)]
    parts = [packed_slice(rank, tokens, cu) for rank in range(len(tokens))]
    assert not parts[0].carried
    assert not (parts[-1].through or parts[-1].tail)
    for here, there in pairwise(parts):
        assert (here.through or here.tail) == there.carried


def test_a_batch_is_begun_by_the_first_rank_and_ended_by_the_last():
    first, second, third = (dense_slice(rank, [5, 0, 7], 2) for rank in range(3))
    assert first == Slice(0, 0, False, False, True, 0, 0)
    assert second == Slice(0, 0, True, True, False, 2, 2)
    assert third == Slice(7, 0, True, False, False, 2, 2)
    assert dense_slice(0, [5], 2) == Slice(0, 5, False, False, False, 0, 2)
