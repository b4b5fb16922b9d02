"""A small Kimi-Linear of Hugging Face Transformers, run on its plain PyTorch path and on kdakit's: logits, loss, gradients, tokens.

    python tests/helpers/kimi_linear.py DEVICE DTYPE [hide-fla]

prints, as JSON, the largest difference of each from the plain path, relative to its largest value, and the calls that kdakit took. With
flash-linear-attention in sight Transformers has no plain path, so its differences are those from one call to the other. In 16 bits, where
both paths round, also the distance of each from the plain path of the same weights in float32.
"""

import json
import sys

if "hide-fla" in sys.argv:
    sys.modules["fla"] = None

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

import kdakit
from kdakit import stacks

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_experts_per_tok=2,
    num_local_experts=4, linear_head_dim=16, linear_num_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip


def make_model(device, dtype):
    torch.manual_seed(0)
    return KimiLinearForCausalLM(KimiLinearConfig(**SIZES)).to(device=device, dtype=dtype)


def run(model, device):
    """{name: tensor} of everything that a user looks at."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 97, (2, 75), generator=generator).to(device)
    mask = torch.ones_like(ids)
    mask[0, :20], ids[0, :20] = 0, 0  # left padding
    found = {}
    out = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    out.loss.backward()
    found["logits"], found["loss"] = out.logits.detach()[mask.bool()], out.loss.detach()
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[f"d {name}"] = p.grad.clone()
            p.grad = None
    with torch.no_grad():
        found["greedy tokens"] = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        first = model(input_ids=ids[1:, :40], use_cache=True)  # a prefill in two parts
        found["continued"] = model(input_ids=ids[1:, 40:], past_key_values=first.past_key_values, use_cache=True).logits
    return found


def run_packed(model, device):
    """Three sequences in one row, against each by itself, in the layer that keeps a state."""
    layer = model.model.layers[0].self_attn
    torch.manual_seed(2)
    x = torch.randn(1, 70, SIZES["hidden_size"], device=device, dtype=next(model.parameters()).dtype)
    cu = torch.tensor([0, 13, 13, 50, 70], device=device)
    with torch.no_grad():
        packed = layer(x, cu_seqlens=cu)
        alone = torch.cat([layer(x[:, a:b]) for a, b in ((0, 13), (13, 50), (50, 70))], 1)
    return difference(packed, alone)


def difference(a, b):
    if not a.is_floating_point():
        return float((a != b).sum())
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-20))


def main():
    device, dtype = sys.argv[1], getattr(torch, sys.argv[2])
    model = make_model(device, dtype)
    plain = run(model, device) if sys.modules.get("fla", 0) is None or device != "cpu" else None
    kdakit.enable("transformers")
    fast = run(model, device)
    report = {"packed": run_packed(model, device)}
    counted = stacks.report()["transformers"]
    kdakit.disable("transformers")
    again = run(model, device) if plain is not None else fast
    report |= {name: difference(fast[name], (plain or fast)[name]) for name in fast}
    report["after disable"] = max(difference(again[name], (plain or fast)[name]) for name in fast)
    if plain is not None and dtype != torch.float32:
        truth = run(model.float(), device)
        kept = [name for name in ("logits", "loss", "greedy tokens", "continued") if name in truth]
        report["from float32, plain and fast"] = {n: [difference(found[n], truth[n]) for found in (plain, fast)] for n in kept}
        gradients = [n for n in truth if n.startswith("d ")]
        errors = [[difference(found[n], truth[n]) for n in gradients] for found in (plain, fast)]
        report["from float32, plain and fast"]["gradients"] = [sum(x) / len(x) for x in errors]
    report["calls"] = counted
    report["logits sum"] = float(fast["logits"].double().abs().sum())
    print(json.dumps(report))


main()
