"""A call that comes again: its arguments, with other addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kdakit import torch_memory
from kdakit.backends.cuda import op
from kdakit.backends.cuda.calls import FORWARD, KEPT, Call, current_stream
from kdakit.problem import Arrays, Problem
from kdakit.reference import Result


def planned(problem: Problem, arrays: Arrays, config) -> tuple[Result, Callable[[Arrays], Result]]:
    """`op.forward`, and a function that repeats it with tensors of the same shapes, strides, dtypes, device and addresses modulo 16."""
    result, own = op.forward(problem, arrays, config), (*arrays[:4], arrays.cu_seqlens, arrays.initial_state, arrays.A_log, arrays.dt_bias)
    widened = not problem.K == problem.V == config.head_dim
    if widened or any(x is not y for x, y in zip(op.taken(arrays, config), own, strict=True)):
        return result, lambda again: op.forward(problem, again, config)  # what is copied is copied every time
    o, final, _ = result
    wide = arrays.cu_seqlens is not None and arrays.cu_seqlens.dtype == torch.int64
    template = op.call_arguments(problem, config, wide, *[x.stride() for x in (*arrays[:5], o)])
    size, index, shapes = template.workspace_size, o.device.index, (o.shape, None if final is None else final.shape)
    call = Call("prefill", config.dtype, template, FORWARD, index)

    def repeat(again: Arrays) -> Result:
        q, k, v, g, beta, A_log, dt_bias, initial, cu = again[:9]
        with op.on_device(index):
            o = v.new_empty(shapes[0])
            final = None if shapes[1] is None else v.new_empty(shapes[1], dtype=torch.float32)
            space = torch_memory.take(size, current_stream(index))
            try:
                tensors = q, k, v, g, beta, o, initial, final, cu, A_log, dt_bias
                addresses = [None if x is None else x.data_ptr() for x in tensors]
                call([*addresses, *(None for _ in KEPT), space])
            finally:
                torch_memory.give_back(space)
        return Result(o, final)

    return result, repeat
