"""One of 8 ranks: the model cut over context, heads and data equals the whole one. python model_ranks.py RANK SIZE STORE."""

import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from kdakit import accuracy
from kdakit.models.config import ModelConfig
from kdakit.models.torch import KimiLinear
from kdakit.parallel.heads import parallelize
from kdakit.parallel.torch import Context

CONFIG = ModelConfig(vocab_size=32, hidden_size=24, num_layers=3, attention_every=3, head_dim=8, num_heads=2, num_v_heads=4, conv_bias=True)


def total(model, tokens, targets, **options):
    """The summed loss: sums of parts add up."""
    logits, _ = model(tokens, **options)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def whole_gradients(tokens, targets, **options):
    model = KimiLinear(CONFIG, seed=3).double()
    value = total(model, tokens, targets, **options)
    value.backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters()}


def full(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def compare(rank, mesh, tokens, targets, mine, **options):
    """mine: which rows and tokens this rank gets."""
    want, want_gradients = whole_gradients(tokens, targets, **options)
    model = parallelize(KimiLinear(CONFIG, seed=3).double(), mesh["heads"])
    value = total(model, tokens[mine], targets[mine], context=Context(mesh.get_group("context")), **options)
    value.backward()
    value = value.detach()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        part = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        for axis in ("context", "data"):
            dist.all_reduce(part, group=mesh.get_group(axis))
        assert accuracy.error(full(gradient), want_gradients[name]) < 1e-10, name
    for axis in ("context", "data"):
        dist.all_reduce(value, group=mesh.get_group(axis))
    np.testing.assert_allclose(value.numpy(), want.numpy(), rtol=1e-10)


def main(rank, size, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    rng = np.random.default_rng(0)
    tokens, targets = (torch.from_numpy(rng.integers(0, 32, (4, 22))) for _ in range(2))
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "context", "heads"))
    data, context = mesh.get_local_rank("data"), mesh.get_local_rank("context")
    rows, columns = slice(2 * data, 2 * data + 2), (slice(0, 9), slice(9, 22))[context]
    compare(rank, mesh, tokens, targets, (rows, columns))
    mesh = init_device_mesh("cpu", (1, 4, 2), mesh_dim_names=("data", "context", "heads"))
    cuts = [0, 30, 31, 50, 88]  # packed: sequences end before, at and after the cuts, one within a convolution's width of one
    here = slice(cuts[mesh.get_local_rank("context")], cuts[mesh.get_local_rank("context") + 1])
    packed, goals = tokens.reshape(1, -1), targets.reshape(1, -1)
    compare(rank, mesh, packed, goals, (slice(None), here), cu_seqlens=torch.tensor([0, 28, 29, 29, 50, 88]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
