"""Four host devices, two parts of the batch, two slices of each sequence, in a process of their own."""

import jax
from learner_problem import CONFIG, OPTIMIZER, compare

from kdakit.training.jax import Learner


def main():
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    compare(Learner(CONFIG, OPTIMIZER, mesh=mesh, accumulate=2), Learner(CONFIG, OPTIMIZER), 2e-5)


if __name__ == "__main__":
    main()
