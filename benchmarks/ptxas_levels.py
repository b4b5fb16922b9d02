"""What NVIDIA's assembler makes of one kernel, by the level of its optimisation and by its version.

    PYTHONPATH=src python benchmarks/ptxas_levels.py

`gradient_normed` with 64 channels, whose tiles have 64 rows in four warps, is right in Triton's interpreter and wrong on an H200 as Triton
3.6 compiles it (ptxas 12.8, -O3: errors up to 1e10, or an illegal access); with the same PTX and -O0 it is right to the last bits. What is
wrong is the accumulators of its products: of 32 tokens' columns, those of eight are right. memcheck and racecheck find nothing. So bfloat16
gradients with 33 <= K <= 64 take slices of 16 channels, whose products do not fill a group of four warps (`slices` in tiles/sm_90.json).

Every line is a process of its own: a problem of one chunk, judged by the accuracy rule.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile

PROBLEM = "62022735:B=1,H=1,HV=1,K=64,T=64,V=64,lengths=64"
JUDGE = f"""
from kdakit.measure.random_problems import parse
from kdakit.measure.trial import judge
found = judge(parse({PROBLEM!r}), "triton_gpu")
print("right" if found.ok else f"WRONG: {{found.complaint[:300]}}")
"""
TRIED = {"as Triton does": {}, "-O1": {"PTXAS_OPTIONS": "-O1"}, "-O0": {"DISABLE_PTXAS_OPT": "1"}}


def main() -> None:
    own = shutil.which("ptxas")
    others = {f"{name}, {own}": changes | {"TRITON_PTXAS_PATH": own} for name, changes in TRIED.items()} if own else {}
    for name, changes in (TRIED | others).items():
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "KDAKIT_APART": "1", "KDAKIT_UNCHECKED": "1", "TRITON_CACHE_DIR": cache, **changes}
            done = subprocess.run([sys.executable, "-c", JUDGE], capture_output=True, text=True, env=env)
        print(f"{name}: {done.stdout.strip() or done.stderr[-300:]}", flush=True)


if __name__ == "__main__":
    main()
