"""Compile quickly, compute the same: most of the suite's time would be LLVM optimising XLA programs that run once.

test_jax.py verifies a few cases with the default flags in a process of its own. Set XLA_FLAGS yourself to test with others.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
