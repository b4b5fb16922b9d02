"""Code of a TPU kernel that not every grid step runs: how many bundles it has in libtpu's text, and how often it is run.

A schedule lists all code once. States that come and go with a sequence are copied in a branch that most steps jump over, and a kernel may
choose between two ways through a chunk; counted in full, each step would take them all. The other count here takes each bundle as often as
its branch is, for a call whose sequences begin and end in as many chunks as they can.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kdakit.measure.tpu_kernels import DECODING, Job

SMALL = 100  # bundles: shorter branches are taken to run in every step
WHOLE = 0.8  # of all bundles: the branch of the pipeline of copies around a kernel's step; others outside of it are the pipeline's too


class Branch(NamedTuple):
    """Bundles first .. last - 1 are jumped over unless the branch is taken."""

    first: int
    last: int


def branches(text: str) -> tuple[int, list[Branch]]:
    """How many bundles a `final_bundles` text has, and its larger branches, in order; inner ones follow the one that they are in."""
    bundles = re.split(r"^ *(?:0x[0-9a-f]+) *(?:[A-Z]{2})? *: ", text, flags=re.MULTILINE)[1:]
    starts = {int(n): i for i, bundle in enumerate(bundles) for n in re.findall(r"Start(?:/End empty)? region (\d+)", bundle)}
    jumps = [
        (i, starts.get(int(n), 0)) for i, bundle in enumerate(bundles) for n in re.findall(r"sbr\.rel .*?target = \$region(\d+)", bundle)
    ]
    found = sorted((Branch(i + 1, target) for i, target in jumps if target - i > SMALL), key=lambda branch: (branch.first, -branch.last))
    around = [branch for branch in found if branch.last - branch.first > WHOLE * len(bundles)]
    first, last = around[0] if around else (0, len(bundles))
    return len(bundles), [branch for branch in found if branch not in around[:1] and first <= branch.first and branch.last <= last]


def runs(job: Job, found: list[Branch]) -> list[float] | None:
    """How often a step runs each of the branches `found`, on average; None if that is not known."""
    chunks, N, count = -(-job.T // job.chunk_size), job.sequences, len(found)
    if job.kernel in DECODING:
        return [1.0] * count
    if not (N and job.states):  # where a row of chunks begins, and where it ends
        return [1 / chunks] * count
    if job.kernel == "training":
        return _visits(found, N / (chunks + N - 1))
    edges, two = N + 1, N - 1  # chunks in which sequences begin or end: the first and the last, and others where one ends and one begins
    if edges > chunks:
        return None
    # inside a sequence; not: what its sequences share; two together, of which: the first begins, the second ends; visits of the first and
    # the last alone, of which: it begins, has tokens, they are nobody's, it ends
    each = [chunks - edges, edges, edges, two, 0, 0, 2, 1, 2, 0, 1]
    if len(each) == count + 1:
        del each[9]  # of few heads, whose zeros are soon written
    return [n / chunks for n in each] if len(each) == count else None


def _visits(found: list[Branch], edge: float) -> list[float] | None:
    """Of a kernel that visits a chunk once for each sequence in it: the visit itself; where one's sequence begins or ends, `edge`; zeros
    for tokens that are nobody's, of which there are none: behind the visit, but for the forward's last branch, which takes a final state.
    """
    if not found:
        return None
    visit = max(found, key=lambda branch: branch.last - branch.first)
    behind = [branch for branch in found if branch.first >= visit.last]
    forward = not any(visit.first < branch.first < visit.last for branch in found)
    zeros = behind[:-1] if forward else behind
    return [1.0 if branch == visit else 0.0 if branch in zeros else edge for branch in found]


def weighted(job: Job, bundles_per_step: int, text: str) -> float | None:
    """Bundles per step, each as often as it is run; `bundles_per_step` counts a few around the step that the text does not."""
    total, found = branches(text)
    often = runs(job, found)
    if often is None:
        return None
    times = [1.0] * total
    for branch, n in zip(found, often, strict=True):  # an inner branch overwrites the outer one
        times[branch.first : branch.last] = [n] * (branch.last - branch.first)
    return round(sum(times) + bundles_per_step - total, 1)
