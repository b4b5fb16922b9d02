"""First calls from several threads at once, each in a fresh process: nothing is half imported, and the bits are those of one thread."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest

TORCH = """
import sys, threading
import numpy as np
import torch
import kdakit.torch as kt

def results(n):
    rng = np.random.default_rng(n)
    B, T, H = 1 + n % 2, int(rng.integers(1, 80)), int(rng.integers(1, 4))
    HV, K, V = H * int(rng.integers(1, 3)), int(rng.integers(1, 40)), int(rng.integers(1, 40))
    draw = lambda *shape: torch.from_numpy(rng.normal(size=shape).astype(np.float32))
    g = -draw(B, T, HV, K).abs() * (20 if n % 3 == 0 else 1)
    x = [draw(B, T, H, K), draw(B, T, H, K), draw(B, T, HV, V), g, draw(B, T, HV).sigmoid()]
    for a in x:
        a.requires_grad_(n % 4 != 0)
    call = kt.fused_recurrent_kda if n % 5 == 0 else kt.chunk_kda
    out = call(*x, use_qk_l2norm_in_kernel=True, output_final_state=True)
    grads = torch.autograd.grad([a.sum() for a in out], x) if n % 4 else ()
    return [a.detach().numpy().tobytes() for a in (*out, *grads)]
"""
JAX = """
import sys, threading
import numpy as np
import jax
import kdakit.jax as kj

def results(n):
    rng = np.random.default_rng(n)
    H, K = 1 + n // 4, 4
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    x = draw(1, 2, H, K), draw(1, 2, H, K), draw(1, 2, H, K), -abs(draw(1, 2, H, K)), abs(draw(1, 2, H)) / 9
    return [np.asarray(a).tobytes() for a in kj.fused_recurrent_kda(*x, output_final_state=True)]
"""
THREADS = """
threads, number = int(sys.argv[1]), int(sys.argv[2])
found, failed, together = {}, [], threading.Barrier(threads)

def work(me):
    together.wait()
    try:
        for n in range(me, number, threads):
            found[n] = results(n)
    except BaseException as problem:
        failed.append(repr(problem))

workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
for worker in workers: worker.start()
for worker in workers: worker.join()
print("failed", failed)
print("same", sum(found.get(n) == results(n) for n in range(number)))
"""


@pytest.mark.parametrize("framework, threads, calls", [("torch", 2, 4), ("torch", 8, 160), ("jax", 2, 2), ("jax", 8, 8)])
def test_first_calls(framework, threads, calls):
    pytest.importorskip(framework)
    program = (TORCH if framework == "torch" else JAX) + THREADS
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program, str(threads), str(calls)], capture_output=True, text=True, env=env)
    assert "failed []" in done.stdout and f"same {calls}\n" in done.stdout, done.stdout + done.stderr[-2000:]


def test_reading_triton_from_threads_leaves_the_interpreter_as_it_was(monkeypatch):
    """Several threads may be the first to ask for Triton's hash; the time slice of the interpreter is what it was afterwards."""
    pytest.importorskip("triton")
    from triton.runtime import cache

    from kdakit.backends.triton_gpu.runtime import precompile

    meeting, readers = threading.Barrier(2, timeout=0.3), []

    def slow_key():
        readers.append(threading.current_thread())
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait()

    monkeypatch.setattr(cache, "triton_key", slow_key, raising=False)
    precompile._hash_triton.cache_clear()
    usual = sys.getswitchinterval()
    asking = [threading.Thread(target=lambda: precompile.hash_triton().join()) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    precompile._hash_triton.cache_clear()
    assert sys.getswitchinterval() == usual and len(readers) == 1
