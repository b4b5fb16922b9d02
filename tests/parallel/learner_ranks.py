"""One of 4 ranks, two parts of the batch, two slices of each sequence: python learner_ranks.py RANK SIZE STORE."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from learner_problem import CONFIG, OPTIMIZER, batch, compare

from kdakit.models.place import Place
from kdakit.training.team import Team
from kdakit.training.torch import Learner


def main(rank, size, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    team = Team(context=2)
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 5e-2)):
        place = Place(torch.device("cpu"), dtype)
        learner = lambda place=place, **options: Learner(CONFIG, OPTIMIZER, place=place, **options)
        compare(learner(team=team, accumulate=2), learner(), tolerance)
    try:
        learner(team=team, accumulate=4).step(*batch())
    except ValueError as problem:
        assert "batch must be at least 1 in each of the 2 parts it is cut into, got 1 for all" in str(problem)
    else:
        raise AssertionError("rows for one of two parts")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
