"""`kdakit train --nproc N`: one run over several processes (torch, started by torchrun) or several devices (JAX, in one process)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from kdakit.measure.choices import UsageError

WORDS = "KDAKIT_WORDS"  # the command line, for the processes that run it
HELD_OUT = 8  # sequences of the held-out batch


def check(args, batch: int, length: int, accumulate: int) -> None:
    """Whether a batch in so many pieces can be cut so; `context` is the number of processes to a sequence, all of them by default."""
    from kdakit.training.cuts import check_batch

    if args.nproc < 1:
        raise UsageError(f"--nproc must be positive, got {args.nproc}")
    try:
        check_batch(args.nproc, context(args), batch, length, accumulate)
        check_batch(args.nproc, context(args), HELD_OUT, length)
    except ValueError as problem:
        raise UsageError(f"--nproc {args.nproc} --context {context(args)}: {problem}") from problem


def context(args) -> int:
    return args.nproc if args.context is None else args.context


def elsewhere(args, framework: str) -> int | None:
    """Start the processes and wait for them, or None: this is one of them, or the only one there is to be."""
    if args.nproc == 1 or WORDS in os.environ:
        return None
    environment = os.environ | {WORDS: json.dumps(args.words)}  # not as arguments, of which torchrun would take some for its own
    command = ["-m", "kdakit.cli.processes"]
    if framework == "torch":
        environment.setdefault("OMP_NUM_THREADS", "1")
        starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.nproc)]
        return subprocess.run([sys.executable, *starter, *command], env=environment).returncode
    flags = environment.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={args.nproc}".strip()
    return subprocess.run([sys.executable, *command], env=environment).returncode


def join(args, framework: str, where: Any) -> tuple[dict[str, Any], bool]:
    """What the Learner takes to cut its batches, and whether this process speaks and writes for all."""
    if args.nproc == 1:
        return {}, True
    if framework == "jax":
        import jax

        devices = jax.devices()
        if len(devices) < args.nproc:
            raise UsageError(f"--nproc {args.nproc} needs as many devices, got {len(devices)}")
        shape = (args.nproc // context(args), context(args))
        kinds = (jax.sharding.AxisType.Auto,) * 2
        return {"mesh": jax.make_mesh(shape, ("data", "context"), axis_types=kinds, devices=devices[: args.nproc])}, True
    import torch
    import torch.distributed as dist

    from kdakit.training.team import Team

    torch.set_num_threads(1)
    kind = where.device.type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return {"team": Team(context(args), kind)}, dist.get_rank() == 0


def leave(framework: str) -> None:
    if framework == "torch":
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    from kdakit.cli.main import main

    raise SystemExit(main(json.loads(os.environ[WORDS])))
