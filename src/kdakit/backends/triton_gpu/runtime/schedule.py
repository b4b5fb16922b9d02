"""Orders of a backward's launches that no GPU has timed yet. KDAKIT_SCHEDULE names those to take, with commas between:

    late       replay begins with the ends of sequences, as reverse does: both read the same tiles at about the same time, which rebuild
               has just written, and end where the gradients of chunks begin
    first      reverse, a long chain, on a stream whose programs go before those of replay beside it
    restore    the short launch for initial states right after reverse, while replay still runs, not after everything else
    sums       d_A_log and d_dt_bias in programs of their own, whose loads do not wait for each other

All give the same bits.
"""

from __future__ import annotations

import os


def asked(name: str) -> bool:
    return name in os.environ.get("KDAKIT_SCHEDULE", "").split(",")
