"""Tensor parallelism over heads: which parameters of kdakit's layers and models are split, and along which axis.

No head of KDA sees another, so the work between the projections in and the projection out needs no communication. Projections in are split
by their outputs, projections out by their inputs; what belongs to a head goes with it.

    torch    parallelize(model, mesh)                       DTensors, torch.distributed.tensor.parallel underneath
    jax      parameter_specs(names, axis="heads")           PartitionSpecs by parameter name, for NamedSharding under jit
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# The last parts of parameter names -> the axis that is split. Whatever is not named here every device has whole.
SPLIT = {
    "q_proj.weight": 0, "k_proj.weight": 0, "v_proj.weight": 0, "b_proj.weight": 0, "f_proj.1.weight": 0, "g_proj.1.weight": 0,
    "g_proj.1.bias": 0, "A_log": 0, "dt_bias": 0, "o_proj.weight": 1,
    "q_conv1d.weight": 0, "k_conv1d.weight": 0, "v_conv1d.weight": 0, "q_conv1d.bias": 0, "k_conv1d.bias": 0, "v_conv1d.bias": 0,
    "gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1,
}  # fmt: skip


def split_axis(name: str) -> int | None:
    """The axis along which a parameter is split; None: not at all."""
    return next((axis for end, axis in SPLIT.items() if name == end or name.endswith("." + end)), None)


def parameter_specs(names: Iterable[str], axis: str = "heads") -> dict[str, Any]:
    """{name: PartitionSpec} over the mesh axis `axis`, for jax.sharding.NamedSharding."""
    from jax.sharding import PartitionSpec as P

    places = {None: P(), 0: P(axis), 1: P(None, axis)}
    return {name: places[split_axis(name)] for name in names}


def parallelize(module: Any, mesh: Any) -> Any:
    """Turn the parameters of a kdakit layer or model into DTensors over the one-dimensional `mesh`, in place; returns the module.

    Inputs and outputs of the module stay whole on every rank. All head counts must be multiples of the mesh's size. Not for caches: a
    module that generates keeps its heads together.
    """
    from kdakit.layers.torch import FullAttention, KimiDeltaAttention

    for layer in module.modules():
        if isinstance(layer, (KimiDeltaAttention, FullAttention)) or hasattr(layer, "gate_proj"):
            _check_heads(layer, mesh.size())
            _parallelize_layer(layer, mesh)
    return module


def _check_heads(layer: Any, size: int) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        if hasattr(layer, name):
            width = getattr(layer, "head_dim", None) or (layer.sizes.head_v_dim if name == "v_proj" else layer.sizes.head_dim)
            heads = getattr(layer, name).weight.shape[0] // width
            if heads % size:
                raise ValueError(f"the {heads} heads of {name} must be a multiple of the {size} ranks that share them")


def _parallelize_layer(layer: Any, mesh: Any) -> None:
    from torch import nn
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    for name, module in layer.named_modules():
        axis = split_axis(f"{name}.weight") if isinstance(module, nn.Linear) else None
        if axis is not None:
            plan[name] = ColwiseParallel() if axis == 0 else RowwiseParallel()
    rest = [(path, p) for path, p in layer.named_parameters() if path.rpartition(".")[0] not in plan and "_proj" not in path]
    for path, parameter in rest:
        owner, _, name = path.rpartition(".")
        axis = split_axis(path)
        placed = distribute_tensor(parameter.detach(), mesh, [Replicate() if axis is None else Shard(axis)])
        layer.get_submodule(owner).register_parameter(name, nn.Parameter(placed))
    parallelize_module(layer, mesh, plan)
