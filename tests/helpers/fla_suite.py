"""For pytest's -p: flash-linear-attention's own tests with `kdakit.enable("fla")`, on a GPU or, where there is none, on the CPU.

    PYTHONPATH=src:tests/helpers python -m pytest -p fla_suite path/to/flash-linear-attention/tests/ops/test_kda.py

FLA takes `cuda` for its device even where there is no GPU; nothing else of it is changed.
"""

import torch

import kdakit

kdakit.enable("fla")
if not torch.cuda.is_available():
    import fla.utils

    fla.utils.device = "cpu"
