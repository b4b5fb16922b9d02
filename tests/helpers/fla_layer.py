"""kdakit's layer against flash-linear-attention on the CPU, in Triton's interpreter. Run by test_layers.py; prints 'what difference' lines.

modules   its convolution, gated norm and recurrent kernel (fla-core), put together here as the layer's formula says
layer     its KimiDeltaAttention, where flash-linear-attention itself is installed
"""

import sys
import types
from pathlib import Path

import quick_triton
import torch
from triton.runtime import autotuner

autotuner.Autotuner._bench = lambda self, *args, config, **meta: [0.0, 0.0, 0.0]  # no clock in the interpreter: take the first
quick_triton.hasten()

from kdakit.layers.torch import KimiDeltaAttention  # noqa: E402

SIZES = dict(hidden_size=32, head_dim=16, num_heads=2)
CONFIGS = {
    "softplus": SIZES,
    "bounded": SIZES | dict(num_v_heads=4, expand_v=2, lower_bound=-5.0, safe_gate=True, conv_bias=True, allow_neg_eigval=True),
}


def from_modules(layer: KimiDeltaAttention):
    """hidden_states -> o with FLA's kernels on this layer's parameters."""
    from fla.modules import FusedRMSNormGated, ShortConvolution
    from fla.ops.kda import fused_recurrent_kda

    s, w = layer.sizes, layer.state_dict()

    def convolved(name, x):
        theirs = ShortConvolution(w[f"{name}_proj.weight"].shape[0], s.conv_size, bias=s.conv_bias, activation="silu")
        theirs.load_state_dict(getattr(layer, f"{name}_conv1d").state_dict())
        return theirs(getattr(layer, f"{name}_proj")(x))[0]

    def run(x):
        q, k = (convolved(name, x).unflatten(-1, (-1, s.head_dim)) for name in "qk")
        v = convolved("v", x).unflatten(-1, (-1, s.head_v_dim))
        g, beta = layer.f_proj(x).unflatten(-1, (-1, s.head_dim)), layer.b_proj(x)
        o, _ = fused_recurrent_kda(
            q=q, k=k, v=v, g=g, beta=beta, A_log=layer.A_log, dt_bias=layer.dt_bias, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=s.allow_neg_eigval, lower_bound=s.lower_bound,
        )  # fmt: skip
        norm = FusedRMSNormGated(s.head_v_dim, activation="sigmoid", eps=s.norm_eps)
        norm.load_state_dict(layer.o_norm.state_dict())
        return layer.o_proj(norm(o, layer.g_proj(x).unflatten(-1, (-1, s.head_v_dim))).flatten(-2))

    return run


def their_layer(layer: KimiDeltaAttention, options):
    """FLA's layer on these parameters, loaded past the package's __init__, which wants transformers."""
    import fla

    package = types.ModuleType("fla.layers")
    package.__path__ = [str(Path(p) / "layers") for p in fla.__path__]
    sys.modules["fla.layers"] = package
    from fla.layers.kda import KimiDeltaAttention as Theirs

    theirs = Theirs(**options).eval()
    theirs.load_state_dict(layer.state_dict())
    return theirs


@torch.no_grad()
def main(which: str) -> None:
    torch.manual_seed(0)
    for name, options in CONFIGS.items():
        layer = KimiDeltaAttention(**options)
        x, mask = torch.randn(2, 11, 32), torch.tensor([[1] * 11, [0] * 4 + [1] * 7])
        if which == "modules":
            run = from_modules(layer)
            plain, padded = run(x), torch.zeros_like(x)
            padded[0], padded[1, 4:] = plain[0], run(x[1:, 4:])[0]
        else:
            theirs = their_layer(layer, options)
            plain, padded = theirs(x)[0], theirs(x, attention_mask=mask)[0]
        for what, want, got in (("plain", plain, layer(x)[0]), ("padded", padded, layer(x, attention_mask=mask)[0])):
            print(name, what, float((got - want).abs().max() / want.abs().max()))


if __name__ == "__main__":
    main(sys.argv[1])
