"""Code written for flash-linear-attention, with its import line changed.

    python examples/swap_fla.py

The call below is written the way FLA's documentation writes it. With kdakit it runs on any device, this machine's CPU included.
"""

import torch

# from fla.ops.kda import chunk_kda, fused_recurrent_kda
from kdakit.torch import chunk_kda, fused_recurrent_kda


def main() -> float:
    torch.manual_seed(0)
    B, T, H, K, V = 2, 100, 4, 32, 32
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, H, V)
    g, beta = torch.randn(B, T, H, K), torch.randn(B, T, H)
    A_log, dt_bias = torch.zeros(H), torch.zeros(H * K)
    for x in (q, k, v, g, beta, A_log, dt_bias):
        x.requires_grad_()
    options = dict(A_log=A_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)

    o, state = chunk_kda(q=q, k=k, v=v, g=g, beta=beta, output_final_state=True, state_v_first=True, **options)
    o.square().mean().backward()
    print(f"o {tuple(o.shape)}, final state {tuple(state.shape)}, |dq| = {q.grad.norm():.4f}")

    with torch.no_grad():
        again, state_again = fused_recurrent_kda(q, k, v, g, beta, output_final_state=True, state_v_first=True, **options)
    difference = max((again - o).abs().max().item(), (state_again - state).abs().max().item())
    print(f"token by token it differs by {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
