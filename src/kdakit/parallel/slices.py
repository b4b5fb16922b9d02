"""Which part of which sequence a rank holds when the token axis is cut into one slice per rank.

A slice is a head, a middle and a tail: the tokens of a sequence that an earlier rank began, those of sequences that begin and end here, and
those of a sequence that begins here and goes on. The head may go on as well, and then is the whole slice. Only heads need a state from
elsewhere, only what goes on is needed elsewhere. Plain Python: nothing here knows a framework.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Slice:
    """One rank's part of a call. Rows number the sequences and so the states; head and tail have one row, without cu_seqlens all B."""

    head: int  # tokens
    middle: int  # tokens; what is left is the tail's
    carried: bool  # whether there is a head, be it without tokens
    through: bool  # whether the head goes on to the next rank
    tail: bool  # whether there is a tail
    first: int  # rows first..last begin and end here; a packed head that ends here is row first - 1, a packed tail is row last
    last: int
    offsets: tuple[int, ...] = ()  # of the middle's sequences, from the middle's first token on; () without cu_seqlens


def dense_slice(rank: int, tokens: Sequence[int], batch: int) -> Slice:
    """All sequences of a batch are cut at the same places: the first rank begins them, every other one continues them."""
    more = rank < len(tokens) - 1
    if rank:
        return Slice(tokens[rank], 0, True, more, False, batch, batch)
    return Slice(0, 0, False, False, True, 0, 0) if more else Slice(0, tokens[0], False, False, False, 0, batch)


def packed_slice(rank: int, tokens: Sequence[int], cu_seqlens: Sequence[int]) -> Slice:
    """Sequences packed along T, cut anywhere. An empty one belongs to the rank of the token that follows it, or to the last rank."""
    begin = [0, *accumulate(tokens)][rank]
    end, final = begin + tokens[rank], rank == len(tokens) - 1
    starts = cu_seqlens[:-1]
    first = bisect_left(starts, begin)
    last = len(starts) if final else max(first, bisect_left(starts, end))  # rows first..last begin here
    carried = first > 0 and begin < cu_seqlens[first]
    head = min(cu_seqlens[first], end) - begin if carried else 0
    through = carried and end < cu_seqlens[first]
    tail = first < last and end < cu_seqlens[last]
    last -= tail
    offsets = tuple(x - begin - head for x in cu_seqlens[first : last + 1]) if first < last else (0,)
    return Slice(head, offsets[-1], carried, through, tail, first, last, offsets)
