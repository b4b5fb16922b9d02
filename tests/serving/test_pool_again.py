"""A decode over a pool that comes again, in Triton's interpreter: from addresses alone it has the bits of a first one."""

from __future__ import annotations

import importlib.util
import os

import fresh
import pytest

torch = pytest.importorskip("torch")

from kdakit.cases import FUSED  # noqa: E402
from kdakit.serving.torch import StatePool, calls, decode, verify  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
H, HV, K, V = 1, 2, 16, 12


@pytest.mark.skipif(INTERPRETED, reason="is the process with TRITON_INTERPRET=1")
def test_in_its_interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = fresh.run("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


def drawn(rows, tokens, generator):
    normal = lambda *size: torch.randn(*size, generator=generator).bfloat16()
    x = dict(q=normal(rows, tokens, H, K), k=normal(rows, tokens, H, K), v=normal(rows, tokens, HV, V), g=normal(rows, tokens, HV, K))
    return x | dict(beta=normal(rows, tokens, HV), A_log=torch.rand(HV, generator=generator), dt_bias=torch.zeros(HV * K))


@pytest.mark.skipif(not INTERPRETED, reason="runs in the process with TRITON_INTERPRET=1")
@pytest.mark.parametrize("pending", [0, 3])
@pytest.mark.parametrize("stored", [dict(), dict(dtype=torch.bfloat16, state_v_first=True), dict(dtype=torch.int8, feedback=True)])
def test_again(stored, pending, monkeypatch):
    import repeated

    monkeypatch.setattr(calls, "_repeats", lambda x: True)
    generator = torch.Generator().manual_seed(0)
    pools = [StatePool(6, HV, K, V, pending=pending, windows={"q": (3, 8)}, **stored) for _ in range(2)]
    for pool in pools:
        slots = torch.tensor([*pool.allocate(5)[1:4], -1])
    with repeated.launches(monkeypatch) as ran:
        for t in range(9):
            x, inputs, found = drawn(4, 1, generator), torch.randn(4, 1, 8, generator=generator), []
            if t % 3 == 2:  # of another alignment: another plan
                x |= {n: torch.cat([y.flatten()[:1], y.flatten()])[1:].view(y.shape) for n, y in x.items()}
            for pool, again in zip(pools, (True, False), strict=True):
                if not again:
                    calls._plans.pop(pool, None)
                found.append(decode(pool, slots.roll(t), **x, window_inputs={"q": inputs}, backend="triton_gpu", **FUSED))
                if t == 5:
                    verify(pool, slots, **drawn(4, 2, torch.Generator().manual_seed(1)), backend="triton_gpu", **FUSED)
            assert torch.equal(*found) and found[0].isfinite().all()
    assert ran["again"] == (1 if pending == 0 else 2) * 7  # but the first of each alignment
    first, second = (pool.snapshot(slots[:3].tolist()).tensors for pool in pools)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(TypeError, match="did you mean 'lower_bound'"):
        decode(pools[0], slots, **x, **FUSED, lowerbound=-5.0)


@pytest.mark.skipif(not INTERPRETED, reason="runs in the process with TRITON_INTERPRET=1")
def test_what_a_launch_does_not_get_is_no_plan(monkeypatch):
    """A tensor that is copied first would be copied once."""
    import repeated

    monkeypatch.setattr(calls, "_repeats", lambda x: True)
    pool, generator = StatePool(3, HV, K, V), torch.Generator().manual_seed(0)
    slots = torch.tensor(pool.allocate(2))
    with repeated.launches(monkeypatch) as ran:
        for name in ("q", "dt_bias"):
            x = drawn(2, 1, generator)
            x[name] = torch.stack([x[name], x[name]], -1)[..., 0]
            decode(pool, slots, **x, backend="triton_gpu", **FUSED)
        decode(pool, torch.stack([slots, slots], -1)[:, 0], **drawn(2, 1, generator), backend="triton_gpu", **FUSED)
    assert ran["first"] == 3 and not calls._plans[pool]
