"""Random problems of the layer's kernels: a seed makes one, its truth in float64, and the errors that a plain float32 form would have.

python tests/helpers/fused_problems.py DEVICE FIRST COUNT KINDS..        searches seeds; prints those that are wrong
python tests/helpers/fused_problems.py DEVICE FIRST COUNT KINDS.. --seconds 50 --every 8 --json FILE        and writes down what it tried
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdakit import accuracy
from kdakit.rounding import UNIT_ROUNDOFF, round_to

DTYPES = ("bfloat16", "float32", "float16")
WIDE = {"state", "u", "decay"}  # results that are float32 whatever the dtype
ALIKE = 8  # seeds in a row that differ in sizes and numbers, not in what is compiled for them


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


class Convolution:
    """short_convolution of sequences in rows, padded rows or one packed row, inside a wider row, with and without window and bias."""

    def __init__(self, seed: int, large: bool = False):
        form, rng = np.random.default_rng(seed // ALIKE), np.random.default_rng(seed)
        of_form = lambda *values: values[form.integers(len(values))]
        pick = lambda *values: values[rng.integers(len(values))]
        self.dtype, self.W = of_form(*DTYPES), int(of_form(1, 2, 3, 4, 4, 4, 5))
        self.kind, unit = of_form("rows", "padded", "packed"), of_form(1, 8, 16)
        self.has_bias, self.has_window = form.random() < 0.5, form.random() < 0.6
        first = 512 // unit if large else 0
        self.sizes = tuple((first + int(rng.integers(1, 40)) * 2 + 1) * unit for _ in range(rng.integers(1, 4)))
        longest = 300 if large else 21
        self.B, self.T = (1, 0) if self.kind == "packed" else (int(rng.integers(1, 4)), int(rng.integers(0, longest)))
        self.N = int(rng.integers(1, 6)) if self.kind == "packed" else self.B
        if self.kind == "packed":
            self.counts = rng.integers(0, longest // 2, self.N) * (rng.random(self.N) < 0.8)
            self.T = int(self.counts.sum()) + int(pick(0, 0, 3))  # tokens after the last sequence are nobody's
        else:
            self.counts = rng.integers(0, self.T + 1, self.B) if self.kind == "padded" else np.full(self.B, self.T)
        self.beside = -sum(self.sizes) % unit + unit * int(pick(0, 2))  # channels of the row that are somebody else's
        D = sum(self.sizes)
        draw = lambda *shape, by=1.0: round_to(rng.normal(size=shape) * by, self.dtype)
        self.x, self.weight = draw(self.B, self.T, D), draw(D, self.W, by=0.7)
        self.bias = draw(D) if self.has_bias else None
        self.window = draw(self.N, self.W - 1, D) if self.has_window else None
        self.d_y = draw(self.B, self.T, D)
        if self.kind == "packed":
            self.d_y[:, self.counts.sum() :] = 0
        self.d_after = draw(self.N, self.W - 1, D) if self.has_window and rng.random() < 0.5 else None
        self.name = f"convolution {seed}: {self.dtype} {self.kind} B{self.B} T{self.T} {self.sizes} W{self.W} {list(self.counts)}"

    def spans(self):
        """(row, first token, tokens that are convolved, tokens that count for the window) of each sequence."""
        if self.kind != "packed":
            return [(b, 0, self.T, int(n)) for b, n in enumerate(self.counts)]
        edges = np.concatenate([[0], np.cumsum(self.counts)])
        return [(0, int(a), int(n), int(n)) for a, n in zip(edges, self.counts, strict=False)]

    def formula(self, kind) -> dict[str, np.ndarray]:
        of = lambda a: None if a is None else a.astype(kind)
        x, w, d_y, W = of(self.x), of(self.weight), of(self.d_y), self.W
        window = of(self.window) if self.has_window else np.zeros((self.N, W - 1, x.shape[2]), kind)
        y, d_x, d_w = np.zeros_like(x), np.zeros_like(x), np.zeros_like(w)
        d_bias, d_window, after = np.zeros(x.shape[2], kind), np.zeros_like(window), np.zeros_like(window)
        for n, (b, start, many, count) in enumerate(self.spans()):
            line = np.concatenate([window[n], x[b, start : start + many]])  # [W - 1 + many, D]
            z = sum((line[j : j + many] * w[:, j] for j in range(W)), np.zeros((many, x.shape[2]), kind))
            z = z + (0 if self.bias is None else of(self.bias))
            s = sigmoid(z)
            y[b, start : start + many] = z * s
            d_z = d_y[b, start : start + many] * s * (1 + z * (1 - s))
            d_line = np.zeros_like(line)
            for j in range(W):
                d_line[j : j + many] += d_z * w[:, j]
                d_w[:, j] += (d_z * line[j : j + many]).sum(0)
            d_bias += d_z.sum(0)
            after[n] = line[count : count + W - 1]
            if self.d_after is not None:
                d_line[count : count + W - 1] += of(self.d_after)[n]
            d_window[n], d_x[b, start : start + many] = d_line[: W - 1], d_line[W - 1 :]
        cut = {f"y{i}": part for i, part in enumerate(np.split(y, np.cumsum(self.sizes)[:-1], -1))}
        if self.kind == "packed":  # nobody's tokens have outputs that nobody looks at
            cut = {name: part[:, : int(self.counts.sum())] for name, part in cut.items()}
        cut |= {"d_x": d_x, "d_weight": d_w} | ({"d_bias": d_bias} if self.has_bias else {})
        return cut | ({"after": after, "d_window": d_window} if self.has_window else {})

    def run(self, device) -> dict[str, torch.Tensor]:
        from kdakit.layers.torch.fused.short_convolution import short_convolution

        kind = getattr(torch, self.dtype)
        of = lambda a: None if a is None else torch.as_tensor(a, device=device).to(kind).requires_grad_()
        wide = torch.full((self.B, self.T, sum(self.sizes) + self.beside), float("nan"), dtype=kind, device=device)
        wide[..., : sum(self.sizes)] = torch.as_tensor(self.x, device=device).to(kind)
        x = wide[..., : sum(self.sizes)].detach().requires_grad_()
        weight, bias, window = of(self.weight), of(self.bias), of(self.window)
        edges = torch.as_tensor(np.concatenate([[0], np.cumsum(self.counts)]), device=device) if self.kind == "packed" else None
        lengths = torch.as_tensor(self.counts, device=device) if self.kind == "padded" else None
        ys, after = short_convolution(x, weight, self.sizes, bias, window, edges, lengths)
        d_y = torch.as_tensor(self.d_y, device=device).to(kind).split(self.sizes, -1)
        made, d_made = list(ys), list(d_y)
        if self.d_after is not None:
            made.append(after)
            d_made.append(torch.as_tensor(self.d_after, device=device).to(kind))
        given = {"x": x, "weight": weight, "bias": bias, "window": window}
        given = {name: a for name, a in given.items() if a is not None}
        grads = torch.autograd.grad(made, list(given.values()), d_made, allow_unused=True)
        out = {f"y{i}": y[:, : int(self.counts.sum())] if self.kind == "packed" else y for i, y in enumerate(ys)}
        out |= {f"d_{name}": torch.zeros_like(given[name]) if g is None else g for name, g in zip(given, grads, strict=True)}
        return out if after is None else out | {"after": after}


class Norm:
    """gated_norm with and without gate and bias."""

    def __init__(self, seed: int, large: bool = False):
        form, rng = np.random.default_rng(seed // ALIKE), np.random.default_rng(seed)
        of_form = lambda *values: values[form.integers(len(values))]
        self.dtype, self.eps = of_form(*DTYPES), float(10.0 ** rng.integers(-7, -2))
        self.has_gate = form.random() < 0.7
        self.has_bias = self.has_gate and form.random() < 0.6
        heads = (int(rng.integers(1, 9)),) if self.has_gate else ()
        V = int(of_form(1, 7, 16, 33, 64, 128, 256 if self.has_gate else 1100))
        self.shape = (int(rng.integers(1, 3)), int(rng.integers(0, 900 if large else 40)), *heads, V)
        draw = lambda *shape, by=1.0: round_to(rng.normal(size=shape) * by, self.dtype)
        self.x = draw(*self.shape, by=float(10.0 ** rng.integers(-3, 3)))
        self.d_y, self.weight = draw(*self.shape), draw(V)
        self.gate = draw(*self.shape, by=3) if self.has_gate else None
        self.bias = draw(heads[0] * V) if self.has_bias else None
        self.name = f"norm {seed}: {self.dtype} {self.shape} gate {self.has_gate} bias {self.has_bias} eps {self.eps}"

    def formula(self, kind) -> dict[str, np.ndarray]:
        x, w, d_y, V = self.x.astype(kind), self.weight.astype(kind), self.d_y.astype(kind), self.shape[-1]
        inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + kind(self.eps))
        n = x * inverse
        s = np.ones_like(x)
        if self.gate is not None:
            s = sigmoid(self.gate.astype(kind) + (0 if self.bias is None else self.bias.astype(kind).reshape(self.shape[-2:])))
        out = {"y": n * w * s}
        d_n = d_y * w * s
        out["d_x"] = inverse * (d_n - n * (d_n * n).mean(-1, keepdims=True))
        out["d_weight"] = (d_y * n * s).reshape(-1, V).sum(0)
        if self.gate is not None:
            out["d_gate"] = d_y * n * w * s * (1 - s)
        if self.bias is not None:
            out["d_bias"] = out["d_gate"].reshape(-1, self.bias.size).sum(0)
        return out

    def run(self, device) -> dict[str, torch.Tensor]:
        from kdakit.layers.torch.fused.gated_norm import gated_norm

        kind = getattr(torch, self.dtype)
        named = {"x": self.x, "weight": self.weight, "gate": self.gate, "bias": self.bias}
        given = {n: torch.as_tensor(a, device=device).to(kind).requires_grad_() for n, a in named.items() if a is not None}
        y = gated_norm(given["x"], given["weight"], self.eps, given.get("gate"), given.get("bias"))
        grads = torch.autograd.grad(y, list(given.values()), torch.as_tensor(self.d_y, device=device).to(kind))
        return {"y": y} | {f"d_{name}": g for name, g in zip(given, grads, strict=True)}


class Swiglu:
    """silu(a) b of any number of numbers, some of them large."""

    def __init__(self, seed: int, large: bool = False):
        form, rng = np.random.default_rng(seed // ALIKE), np.random.default_rng(seed)
        self.dtype = DTYPES[form.integers(len(DTYPES))]
        shape = tuple(int(rng.integers(0, most)) for most in ((3, 300, 700) if large else (3, 9, 400)))
        draw = lambda by: round_to(rng.normal(size=shape) * by, self.dtype)
        self.a, self.b, self.d_y = draw(float(10.0 ** rng.integers(-3, 3))), draw(1.0), draw(1.0)
        self.name = f"swiglu {seed}: {self.dtype} {shape}"

    def formula(self, kind) -> dict[str, np.ndarray]:
        a, b, d_y = (x.astype(kind) for x in (self.a, self.b, self.d_y))
        s = sigmoid(a)
        return {"y": a * s * b, "d_a": d_y * b * s * (1 + a * (1 - s)), "d_b": d_y * a * s}

    def run(self, device) -> dict[str, torch.Tensor]:
        from kdakit.layers.torch.fused.swiglu import OPERATOR

        a, b, d_y = (torch.as_tensor(x, device=device).to(getattr(torch, self.dtype)) for x in (self.a, self.b, self.d_y))
        y = OPERATOR(a.requires_grad_(), b.requires_grad_())[0]
        d_a, d_b = torch.autograd.grad(y, (a, b), d_y)
        return {"y": y, "d_a": d_a, "d_b": d_b}


class Turned:
    """A part of [B, channels, T] as [B, T, H, D] with adjacent channels; also its gradient."""

    def __init__(self, seed: int, large: bool = False):
        form, rng = np.random.default_rng(seed // ALIKE), np.random.default_rng(seed)
        self.dtype, self.even = DTYPES[form.integers(len(DTYPES))], bool(form.random() < 0.5)
        self.H, self.D = int(form.integers(1, 4)), int(form.choice([1, 16, 33, 64, 128, 200]))
        B, T = int(rng.integers(1, 3)), int(rng.integers(0, 3000 if large else 150)) * (16 if self.even else 1)
        self.x = round_to(rng.normal(size=(B, self.H * self.D + 8, T)), self.dtype)
        self.d_y = round_to(rng.normal(size=(B, T, self.H, self.D)), self.dtype)
        self.name = f"turned {seed}: {self.dtype} {(B, T, self.H, self.D)}"

    def cut(self, x):
        return x[:, 8:].swapaxes(1, 2).reshape(x.shape[0], x.shape[2], self.H, self.D)

    def formula(self, kind) -> dict[str, np.ndarray]:
        d_x = np.zeros(self.x.shape, kind)
        d_x[:, 8:] = self.d_y.reshape(*self.d_y.shape[:2], -1).swapaxes(1, 2)
        return {"y": self.cut(self.x).astype(kind), "d_x": d_x}

    def run(self, device) -> dict[str, torch.Tensor]:
        from kdakit.layers.torch.fused.adjacent import _Turned

        x, d_y = (torch.as_tensor(x, device=device).to(getattr(torch, self.dtype)) for x in (self.x, self.d_y))
        view = x.requires_grad_()[:, 8:].unflatten(1, (self.H, self.D)).permute(0, 3, 1, 2)  # tokens are adjacent
        y = _Turned.apply(view)
        assert y.is_contiguous()
        return {"y": y, "d_x": torch.autograd.grad(y, x, d_y)[0]}


class Step:
    """A few tokens of sequences in a cache, or in slots of a pool, moved or drafted."""

    def __init__(self, seed: int, large: bool = False):
        form, rng = np.random.default_rng(seed // ALIKE), np.random.default_rng(seed)
        pick = lambda *values: values[form.integers(len(values))]
        dtype, T, N = pick(*DTYPES), int(pick(1, 1, 2, 3, 5, 8)), int(rng.integers(1, 6)) * (30 if large else 1)
        H, group = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        heads = (int(pick(64, 128)), 1.0) if large else pick((16, 1.0), (8, 1.5), (12, 2.0), (32, 0.5))
        options = self._drawn_options(form)
        pooled, draft = bool(form.random() < 0.5), bool(form.random() < 0.4)
        v_first = pooled and bool(form.random() < 0.4)
        self._draw(seed, rng, dtype, N, T, H, group, heads, options, pooled, draft, v_first)

    @staticmethod
    def _drawn_options(form) -> dict[str, Any]:
        pick = lambda *values: values[form.integers(len(values))]
        return dict(
            conv_size=int(pick(1, 2, 4, 4)), conv_bias=bool(form.random() < 0.3), lower_bound=pick(None, -5.0),
            allow_neg_eigval=bool(form.random() < 0.3),
        )  # fmt: skip

    def _draw(self, seed, rng, dtype, N, T, H, group, heads, options, pooled, draft, v_first) -> None:
        self.dtype, self.N, self.T, self.pooled, self.draft, self.v_first = dtype, N, T, pooled, draft, v_first
        self.options = dict(hidden_size=8, head_dim=heads[0], expand_v=heads[1], num_heads=H, num_v_heads=H * group) | options
        from kdakit.layers.sizes import LayerSizes

        s = self.sizes = LayerSizes(**self.options)
        draw = lambda *shape, by=1.0, dtype=self.dtype: round_to(rng.normal(size=shape) * by, dtype)
        N, T, D, W = self.N, self.T, 2 * s.key_dim + s.value_dim, s.conv_size
        self.row, self.g, self.beta = draw(N, T, D), draw(N, T, s.gate_dim), draw(N, T, s.value_heads)
        self.gate = draw(N, T, s.value_dim)
        self.weight, self.bias = draw(D, W, by=0.7), draw(D) if s.conv_bias else None
        self.A_log, self.dt_bias = draw(s.value_heads, dtype="float32"), draw(s.gate_dim, dtype="float32")
        self.norm, self.gate_bias = draw(s.head_v_dim), draw(s.value_dim)
        self.window = draw(N, W - 1, D)
        self.state = draw(N, s.value_heads, s.head_dim, s.head_v_dim, dtype="float32")
        self.skipped = rng.random(N) < 0.2 if self.pooled else np.zeros(N, bool)
        self.name = f"step {seed}: {self.dtype} N{N} T{T} {self.options} pooled {self.pooled} draft {self.draft} v_first {self.v_first}"

    def formula(self, kind) -> dict[str, np.ndarray]:
        s, W, T = self.sizes, self.sizes.conv_size, self.T
        of = lambda a: a.astype(kind)
        seen = (lambda a: a) if kind is np.float64 else (lambda a: of(round_to(a, self.dtype)))  # what a kernel hands to the next
        line = np.concatenate([of(self.window), of(self.row)], 1)
        z = sum(line[:, j : j + T] * of(self.weight)[:, j] for j in range(W)) + (0 if self.bias is None else of(self.bias))
        q, k, v = np.split(seen(z * sigmoid(z)), [s.key_dim, 2 * s.key_dim], -1)
        heads = lambda a, size: a.reshape(*a.shape[:2], -1, size)
        q, k = (np.repeat(heads(a, s.head_dim), s.value_heads // s.num_heads, 2) for a in (q, k))
        norm = lambda a: a / np.sqrt((a * a).sum(-1, keepdims=True) + kind(1e-6))
        q, k_unit, v = norm(q) * kind(s.head_dim**-0.5), norm(k), heads(v, s.head_v_dim)
        x = heads(of(self.g) + of(self.dt_bias), s.head_dim)
        a = np.exp(of(self.A_log))[:, None]
        g = -a * np.logaddexp(0, x) if s.lower_bound is None else kind(s.lower_bound) * sigmoid(a * x)
        beta = sigmoid(of(self.beta)) * (2 if s.allow_neg_eigval else 1)
        S, o, us = of(self.state), [], []
        for t in range(T):
            S = np.exp(g[:, t])[..., None] * S
            u = beta[:, t, :, None] * (v[:, t] - np.einsum("nhk,nhkv->nhv", k_unit[:, t], S))
            S = S + k_unit[:, t][..., None] * u[:, :, None]
            o.append(np.einsum("nhk,nhkv->nhv", q[:, t], S))
            us.append(u / np.sqrt((k[:, t] * k[:, t]).sum(-1, keepdims=True) + kind(1e-6)))
        o = seen(np.stack(o, 1))
        y = o / np.sqrt((o * o).mean(-1, keepdims=True) + kind(s.norm_eps)) * of(self.norm)
        y = (y * sigmoid(heads(of(self.gate) + of(self.gate_bias), s.head_v_dim))).reshape(*self.row.shape[:2], -1)
        keep = ~self.skipped
        out = {"y": np.where(keep[:, None, None], y, 0)}
        after, state = line[:, T : T + W - 1], S
        if self.draft:
            out |= {"u": np.stack(us, 1)[keep], "decay": np.exp(g)[keep], "k": k[keep]}
            after, state = of(self.window), of(self.state)
        out["window"] = np.where(keep[:, None, None], after, of(self.window))
        out["state"] = np.where(keep[:, None, None, None], state, of(self.state))
        return out

    def run(self, device) -> dict[str, torch.Tensor]:
        from kdakit.layers.torch import KimiDeltaAttention
        from kdakit.layers.torch.fused import step as steps

        kind, s = getattr(torch, self.dtype), self.sizes
        of = lambda a, dtype=kind: torch.as_tensor(a, device=device).to(dtype)
        sizes = (s.key_dim, s.key_dim, s.value_dim)
        layer = KimiDeltaAttention(**self.options).to(device=device, dtype=kind)
        with torch.no_grad():
            filters = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
            for c, w in zip(filters, of(self.weight).split(sizes), strict=True):
                c.weight.copy_(w[:, None])
            for c, b in zip(filters, of(self.bias).split(sizes), strict=True) if s.conv_bias else ():
                c.bias.copy_(b)
            layer.A_log.data, layer.dt_bias.data = of(self.A_log, torch.float32), of(self.dt_bias, torch.float32)
            layer.o_norm.weight.copy_(of(self.norm))
            layer.g_proj[1].bias.copy_(of(self.gate_bias))
        rows = np.arange(self.N)
        slots, places = None, rows
        windows, state = self.window, self.state
        if self.pooled:  # slots in another order, among others, with a spare row; some rows name none
            rng = np.random.default_rng(self.N)
            places = rng.permutation(2 * self.N + 1)[: self.N]
            windows = np.full((2 * self.N + 2, *windows.shape[1:]), 7.0)
            windows[places] = self.window
            stored = self.state.swapaxes(-1, -2) if self.v_first else self.state
            state = np.full((2 * self.N + 2, *stored.shape[1:]), 7.0)
            state[places] = stored
            named = np.where(self.skipped, -1, places)
            generation = torch.ones(2 * self.N + 2, dtype=torch.int32, device=device)
            slots = steps.Slots(torch.as_tensor(named, device=device), generation, 2 * self.N + 1, self.v_first)
        carried = steps.Carried(*(w.contiguous() for w in of(windows).split(sizes, -1)), of(state, torch.float32).contiguous())
        inputs = [of(a) for a in (self.row, self.g, self.beta, self.gate)]
        with torch.no_grad():
            moved = steps.Carried(*(torch.full_like(a, float("nan")) for a in carried))
            after = carried if self.pooled or self.draft else moved
            y, log = steps.step(layer, *inputs, carried, after, slots, self.draft)
        took = torch.as_tensor(~self.skipped)
        out = {"y": y, "window": torch.cat(after[:3], -1)[places], "state": after.state[places]}
        if self.v_first:
            out["state"] = out["state"].mT
        if log is not None:
            out |= {"u": log.u[took], "decay": log.decay[took], "k": log.k[took]}
        if self.pooled:  # nobody else's rows have moved
            others = np.setdiff1d(np.arange(2 * self.N + 2), places)
            assert all((a[others] == 7).all() for a in carried), self.name
        return out


class WideStep(Step):
    """Heads of 128 channels, whose cuts have a table of their own. Forms in turn: cache and pool, moved and drafted; dtypes; one token and
    up to 2, 4 or 8; few programs and, if large, many."""

    CARRIED = ((False, False), (True, False), (True, True), (False, True))  # pooled, draft
    TOKENS = ((1, 1), (3, 4), (5, 8), (2, 2))  # of the fewest and the most that are compiled alike

    def __init__(self, seed: int, large: bool = False):
        number = seed // ALIKE
        form, rng = np.random.default_rng(number), np.random.default_rng(seed)
        (pooled, draft), dtype = self.CARRIED[number % 4], DTYPES[number // 4 % 3]
        least, most = self.TOKENS[number // 12 % 4]
        N, H = (int(rng.integers(70, 90)), 2) if large else (int(rng.integers(1, 4)), int(rng.integers(1, 3)))
        v_first = pooled and bool(form.random() < 0.4)
        T = int(rng.integers(least, most + 1))
        self._draw(seed, rng, dtype, N, T, H, 1, (128, 1.0), self._drawn_options(form), pooled, draft, v_first)


KINDS: dict[str, Any] = {"convolution": Convolution, "norm": Norm, "swiglu": Swiglu, "turned": Turned, "step": Step, "wide_step": WideStep}


def dtype_of(problem, name: str) -> str:
    return "float32" if name in WIDE else problem.dtype


def nearby(problem, seed: int):
    """The problem with every input off by up to one float32 roundoff: no implementation in float32 has them more exactly."""
    rng, other = np.random.default_rng(seed), copy.copy(problem)
    for name, a in vars(problem).items():
        if isinstance(a, np.ndarray) and a.dtype.kind == "f":
            setattr(other, name, a * (1 + UNIT_ROUNDOFF["float32"] * rng.uniform(-1, 1, a.shape)))
    return other


def plain_errors(problem, truth) -> dict[str, float]:
    """Of a plain float32 form: its own, or what its inputs' last bits do, the worst of a few draws; for few numbers of more of them."""
    runs = [problem.formula(np.float32)]
    few = min((a.size for a in truth.values() if a.size), default=accuracy.NUMBERS)
    draws = max(accuracy.DRAWS, -(-accuracy.NUMBERS // few))
    runs += [nearby(problem, seed).formula(kind) for seed in range(draws) for kind in (np.float64, np.float32)]
    of = lambda run, name: accuracy.error(round_to(run[name], dtype_of(problem, name)), truth[name])
    return {name: max(of(run, name) for run in runs) if a.size else 0.0 for name, a in truth.items()}


def wrong(problem, device="cpu") -> list[str]:
    """What of a problem is further off than the rule of kdakit.accuracy allows, with the two errors."""
    truth = problem.formula(np.float64)
    out = problem.run(device)
    assert set(out) == set(truth), (problem.name, set(out) ^ set(truth))
    got = {name: x.detach().double().cpu().numpy() for name, x in out.items()}
    errors = {name: accuracy.error(got[name], want) if want.size else float(got[name].shape != want.shape) for name, want in truth.items()}

    def beyond(plain) -> list[str]:
        allowed = {name: accuracy.tolerance(plain[name], dtype_of(problem, name)) for name in truth}
        return [f"{problem.name}: {n} is off by {e:.2e}, allowed {allowed[n]:.2e}" for n, e in errors.items() if not e <= allowed[n]]

    # What one rounding of the result excuses needs no plain runs.
    return beyond(dict.fromkeys(truth, 0.0)) and beyond(plain_errors(problem, truth))


def search(args) -> list[str]:
    """Those that are wrong. What was tried goes to the file after every form."""
    began, found, tried = time.monotonic(), [], []
    seeds = range(args.first, args.first + args.count)
    for n, seed in enumerate(seeds):
        if seed % ALIKE >= args.every:
            continue
        if args.seconds and time.monotonic() - began > args.seconds:
            break
        for kind in args.kinds:
            large = args.device != "cpu" and (seed // ALIKE % 2 == 1 if args.large is None else bool(args.large))
            problem = KINDS[kind](seed, large=large)
            lines = wrong(problem, args.device)
            tried.append(problem.name)
            found += lines
            for line in lines:
                print(line, flush=True)
        if seed % ALIKE == 0 or n % 10 == 9:
            print(f"up to seed {seed}: {len(found)} wrong of {len(tried)}, {time.monotonic() - began:.0f} s", flush=True)
            keep(args.json, found, tried)
    keep(args.json, found, tried)
    print(f"{len(tried)} problems from seed {args.first}, {', '.join(args.kinds)}: {len(found)} wrong", flush=True)
    return found


def keep(path: str | None, found: list[str], tried: list[str]) -> None:
    if path:
        Path(path).write_text(json.dumps({"wrong": found, "tried": tried}, indent=1))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device")
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), choices=[*KINDS, []])
    parser.add_argument("--seconds", type=float, help="no problem begins after so many")
    parser.add_argument("--every", type=int, default=ALIKE, help="so many of the seeds that are compiled alike (default: all 8)")
    parser.add_argument("--large", type=int, choices=(0, 1), help="sizes of a GPU, or not (default: every other form)")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    args.kinds = args.kinds or list(KINDS)
    return len(search(args)) > 0


if __name__ == "__main__":
    sys.exit(main())
