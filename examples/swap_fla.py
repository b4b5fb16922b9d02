"""Code written for flash-linear-attention, with its import line changed, held against the definition and timed beside FLA.

    python examples/swap_fla.py

`step` is written the way FLA's documentation writes it, once, and runs with kdakit's call and, where flash-linear-attention is installed,
with FLA's: its kernels on a GPU, its readable reference on a CPU. Both are compared with the float64 recurrence, gradients included.
"""

import time

import numpy as np
import torch

# from fla.ops.kda import chunk_kda
from kdakit.torch import chunk_kda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, T, H, K = 1, 256 if DEVICE == "cpu" else 4096, 4, 64


def step(chunk_kda, q, k, v, g, beta):
    """Forward and backward of one call: o, the final state, and the gradients of all inputs."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
    o, state = chunk_kda(*inputs, output_final_state=True)
    return o, state, *torch.autograd.grad(o.square().mean() + state.square().mean(), inputs)


def definition(q, k, v, g, beta):
    """The same in NumPy, token by token in float64: kdakit.reference."""
    from kdakit import reference
    from kdakit.problem import Arrays, make_options, make_problem

    x = Arrays(*(a.double().cpu().numpy() for a in (q, k, v, g, beta)))
    problem = make_problem("chunk", x, make_options(x, output_final_state=True), needs_grad=True)
    result = reference.forward(problem, x)
    d_o, d_state = 2 * result.o / result.o.size, 2 * result.final_state / result.final_state.size
    return result.o, result.final_state, *reference.backward(problem, x, d_o, d_state)[:5]


def flash_linear_attention():
    """(its call, what that is), or (None, why not)."""
    try:
        if DEVICE == "cuda":
            from fla.ops.kda import chunk_kda as theirs

            return theirs, "fla.ops.kda, Triton kernels"
        from kdakit.measure.peers import load_fla

        naive = load_fla().naive_chunk_kda
        return lambda q, k, v, g, beta, output_final_state: naive(q, k, v, g, beta, output_final_state=True), "FLA's readable reference"
    except Exception as problem:  # whatever keeps it from running here is worth a line
        return None, f"flash-linear-attention does not run here: {problem}"


def milliseconds(call, *inputs, repeat=2):
    taken = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        step(call, *inputs)
        torch.cuda.synchronize() if DEVICE == "cuda" else None
        taken.append(1000 * (time.perf_counter() - begin))
    return float(np.median(taken[1:]))


def main() -> float:
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, K, device=DEVICE), dim=-1) for _ in range(2))
    v, g = torch.randn(B, T, H, K, device=DEVICE), -torch.rand(B, T, H, K, device=DEVICE)
    inputs = q, k, v, g, torch.rand(B, T, H, device=DEVICE)
    truth = definition(*inputs)
    theirs, about = flash_linear_attention()
    print(f"forward + backward on {DEVICE}, float32, {B} x {T} tokens, {H} heads of {K}; errors against float64\n")
    print(f"{'':30} {'o':>8} {'state':>8} {'d_q':>8} {'d_k':>8} {'d_v':>8} {'d_g':>8} {'d_beta':>8} {'ms':>9}")
    worst = 0.0
    for name, call in (("kdakit.torch", chunk_kda), (about, theirs)):
        if call is None:
            print(about)
            continue
        got = [x.detach().double().cpu().numpy() for x in step(call, *inputs)]
        errors = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(got, truth, strict=True)]
        print(f"{name:30} {' '.join(f'{e:8.1e}' for e in errors)} {milliseconds(call, *inputs):9.2f}")
        worst = max(worst, *errors) if call is chunk_kda else worst
    print("\nOne import line was changed. kdakit.enable('fla') changes none: see docs/migrate-from-fla.md.")
    return worst


if __name__ == "__main__":
    main()
