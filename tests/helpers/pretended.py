"""In place of a backend, for processes that import no framework to begin."""

import os
import time

from kdakit.measure.trial import Verdict


def pretend(label, backend, device):
    """Some problems crash the process, some hang, some are wrong, some lose the device."""
    number = int(label) // 2
    about = dict(label=label, what=label, backend=backend, dtype="float32", call="forward", K=16, V=16)
    if number % 10 == 3:
        os._exit(139)
    if number % 10 == 5:
        time.sleep(60)
    if number % 10 == 7:
        return Verdict(ok=False, complaint="CUDA error: an illegal memory access was encountered", **about)
    return Verdict(ok=number % 10 != 8, complaint="wrong" if number % 10 == 8 else "", **about)
