"""Time on a GPU."""

import numpy as np
import torch


def median(call, repeat=30, warmup=5):
    """Milliseconds of call() by the GPU's own clock."""
    for _ in range(warmup):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([s.elapsed_time(e) for s, e in events]))
