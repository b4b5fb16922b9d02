"""A KimiLinear model whose sequences live in pools, one for each KDA layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kdakit.layers.torch import Rows as Packing
from kdakit.models.torch import KimiLinear
from kdakit.problem import checks_enabled
from kdakit.serving.arguments import check_checkpoints, check_drafts
from kdakit.serving.requests import are_tokens, check_tokens
from kdakit.serving.torch import owners
from kdakit.serving.torch.calls import Draft, check_commit, commit, decode, verify
from kdakit.serving.torch.captured import CapturedCalls, CapturedDraft, CapturedStep
from kdakit.serving.torch.choice import likeliest
from kdakit.serving.torch.layer import Prompts, Whole, in_one, operator_options, prefill_layer
from kdakit.serving.torch.pool import Snapshot, StatePool
from kdakit.serving.torch.prefill import prefill

WINDOWS = ("q", "k", "v")


class ChosenStep(NamedTuple):
    """A decode step, and what was likeliest then."""

    slots: Sequence[int]
    chosen: Tensor  # [N]

    def tokens(self) -> list[int]:
        return self.chosen.tolist()


Step = ChosenStep | CapturedStep


class ServedModel:
    """Prefill, decode, verify and commit of whole sequences of tokens, by slot. The model must have KDA layers only.

    dtype: of the stored states. graphs: on a CUDA device decode, verify and commit are captured once for each size and replayed.
    """

    def __init__(self, model: KimiLinear, slots: int, dtype: torch.dtype | None = None, backend: str = "auto", graphs: bool = True):
        if any(model.config.is_attention(i) for i in range(model.config.num_layers)):
            raise ValueError("model must have attention_every=0: the pool holds KDA layers, whose state does not grow")
        self.model, self.backend = model.eval(), backend
        weight = model.model.embeddings.weight
        self.device, self.vocabulary = weight.device, model.config.vocab_size
        sizes = model.config.layer_sizes()
        widths = (sizes.key_dim, sizes.key_dim, sizes.value_dim)
        windows = {n: (sizes.conv_size - 1, d) for n, d in zip(WINDOWS, widths, strict=True)} if sizes.use_short_conv else {}
        kind = dtype or (torch.float64 if weight.dtype == torch.float64 else torch.float32)
        self.pools: list[StatePool] = []
        for _ in model.blocks():
            beside = self.pools[0] if self.pools else None
            pool = StatePool(
                slots, sizes.value_heads, sizes.head_dim, sizes.head_v_dim, kind, windows=windows, device=weight.device, beside=beside
            )
            self.pools.append(pool)
        self.table = self.pools[0].table
        self.captured: CapturedCalls | None = None
        if graphs and self.device.type == "cuda" and not checks_enabled():  # whose checks wait for the device
            self.captured = CapturedCalls(
                lambda tokens, slots, *calls: self._forward(tokens, slots, Packing(), *calls), self.pools, self.device
            )

    @property
    def free_slots(self) -> int:
        return self.table.free

    @property
    def next_slot(self) -> int:
        """The one that `allocate` takes."""
        return self.table.following(1)[0]

    def taken(self, slot: int) -> bool:
        return self.table.taken(slot)

    def bytes_per_slot(self) -> int:
        return sum(pool.bytes_per_slot() for pool in self.pools)

    def allocate(self) -> int:
        """The same slot in every layer, empty."""
        return owners.allocate(self.pools, 1)[0]

    def free(self, slot: int) -> None:
        owners.free(self.pools, self.table.check(slot))

    def reset(self, slot: int) -> None:
        """Empty again."""
        owners.reset(self.pools, self.table.check(slot))

    def restore(self, slot: int, snapshots: list[Snapshot]) -> None:
        """What a checkpoint of `prefill` holds."""
        owners.restore(self.pools, self.table.check(slot), snapshots)

    @torch.no_grad()
    def prefill(self, slots: list[int], tokens: Sequence[Sequence[int]], checkpoints: list[list[int]]):
        """The next tokens of each sequence, any number: logits [N, vocabulary] after each one's last, and its checkpoints, a list of
        (a snapshot a layer) for each."""
        self._check_rows(slots, tokens)
        check_checkpoints(checkpoints, [len(own) for own in tokens])
        cu = torch.tensor([0, *map(len, tokens)], device="cpu").cumsum(0)
        packed = torch.tensor([list(chain(*tokens))], dtype=torch.int64, device=self.device)
        given, on_device = self.pools[0].device_slots(slots), cu.to(self.device)
        made: list[list[list[Snapshot]]] = [[[] for _ in own] for own in checkpoints]

        def call(pool, **tensors):
            o, states = prefill(pool, given, **tensors, cu_seqlens=on_device, cu_seqlens_cpu=cu, checkpoints=checkpoints)
            for kept, own in zip(made, states, strict=True):
                for place, snapshot in zip(kept, own, strict=True):
                    place.append(snapshot)
            return o

        whole, prompts = None, Prompts(given, on_device, cu, self.backend)
        if not any(checkpoints):
            whole = lambda layer, pool, _, x: prefill_layer(layer, pool, prompts, x)
        logits = self._forward(packed, given, Packing(cu_seqlens=on_device), call, whole, on_device[1:] - 1)
        return logits[0], made

    @torch.no_grad()
    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """One token of each sequence: logits [N, vocabulary]. Where calls are captured the next one of the same size overwrites them."""
        self._check(slots, tokens)
        if self.captured is not None:
            return self.captured.decode(slots, tokens)[:, 0]
        given = torch.tensor(list(tokens), dtype=torch.int64, device=self.device)[:, None]
        return self._forward(given, slots, Packing(), lambda pool, **x: decode(pool, slots, **x), in_one("decode", []))[:, 0]

    @torch.no_grad()
    def begin(self, slots: Sequence[int], tokens: Sequence[int]) -> Step:
        """A decode step of which nobody has asked yet what is likeliest then: see `Step`."""
        slots = list(slots)  # the step's own: the caller may change who takes part in the next one
        if self.captured is None:
            return ChosenStep(slots, likeliest(self.decode(slots, tokens)))
        self._check(slots, tokens)
        return self.captured.begin(slots, tokens)

    @torch.no_grad()
    def follow(self, step: Step) -> Step:
        """The next step of the same sequences, with the tokens that `step` chooses, whether or not anybody has seen them. Where it chose
        none (-1) some token is taken."""
        self.table.check(step.slots)
        if self.captured is not None and isinstance(step, CapturedStep):
            return self.captured.follow(step)
        return self.begin(step.slots, [max(token, 0) for token in step.tokens()])

    @torch.no_grad()
    def next_tokens(self, slots: list[int], tokens: Sequence[int]) -> list[int]:
        """The likeliest token of each sequence after one more: `choose(decode(..))`, on a CUDA device in one graph."""
        return self.begin(slots, tokens).tokens()

    @torch.no_grad()
    def verify(self, slots: list[int], tokens: Sequence[Sequence[int]]) -> tuple[Tensor, list[Draft] | CapturedDraft]:
        """Guessed tokens, as many for each sequence: logits [N, T, vocabulary], overwritten like those of `decode`, and a draft a layer."""
        self._check_drafts(slots, tokens)
        if self.captured is not None:
            return self.captured.verify(slots, tokens)
        drafts = []

        def call(pool, **given):
            o, draft = verify(pool, slots, **given)
            drafts.append(draft)
            return o

        given = torch.tensor([list(own) for own in tokens], dtype=torch.int64, device=self.device)
        return self._forward(given, slots, Packing(), call, in_one("verify", drafts)), drafts

    @torch.no_grad()
    def verify_tokens(self, slots: list[int], tokens: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[Draft] | CapturedDraft]:
        """The likeliest token after each one that was guessed, and the draft: `choose(verify(..)[0])`, on a CUDA device in one graph."""
        if self.captured is None:
            logits, drafts = self.verify(slots, tokens)
            return self.choose(logits), drafts
        self._check_drafts(slots, tokens)
        return self.captured.verify_tokens(slots, tokens)

    @torch.no_grad()
    def commit(self, drafts: list[Draft] | CapturedDraft, accepted: list[int]) -> None:
        """The first accepted[n] tokens of each row, in every layer or in none."""
        if isinstance(drafts, CapturedDraft):
            if self.captured is None or drafts.of not in self.captured:
                raise ValueError("drafts must have been made by this model's verify, got another's")
            return self.captured.commit(drafts, accepted)
        if len(drafts) != len(self.pools):
            raise ValueError(f"drafts must be one for each of the {len(self.pools)} layers, got {len(drafts)}")
        for pool, draft in zip(self.pools, drafts, strict=True):
            check_commit(pool, draft, accepted)
        for pool, draft in zip(self.pools, drafts, strict=True):
            commit(pool, draft, accepted)

    @staticmethod
    def choose(logits: Tensor) -> list:
        """The likeliest token of each row, [..] for logits [.., vocabulary]; -1 where one of them is not a finite number."""
        return likeliest(logits).tolist()

    def _check(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Before anything moves in the first layer: one token for each slot."""
        self.table.check(slots)
        if len(tokens) != len(slots):
            raise ValueError(f"tokens must be given for each of the {len(slots)} slots, got {len(tokens)}")
        check_tokens(tokens, self.vocabulary, "tokens")

    def _check_rows(self, slots: list[int], tokens: Sequence[Sequence[int]]) -> None:
        """Likewise, any number of tokens for each."""
        self.table.check(slots)
        if len(slots) == 0:
            raise ValueError("slots must name at least one sequence, got none")
        if len(tokens) != len(slots):
            raise ValueError(f"tokens must be given for each of the {len(slots)} slots, got {len(tokens)}")
        if not all(map(len, tokens)):
            raise ValueError("tokens must be at least one for each sequence, got none")
        if not are_tokens(list(chain.from_iterable(tokens)), self.vocabulary):
            for own in tokens:  # to say what is wrong
                check_tokens(own, self.vocabulary, "tokens")

    def _check_drafts(self, slots: list[int], tokens: Sequence[Sequence[int]]) -> None:
        self._check_rows(slots, tokens)
        if len({len(own) for own in tokens}) > 1:
            raise ValueError(f"tokens must be as many for each sequence, got {[len(own) for own in tokens]}")
        check_drafts(len(tokens[0]))

    def _forward(
        self, tokens: Tensor, slots: Sequence[int] | Tensor, packing: Packing, call: Callable[..., Tensor], whole: Whole | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """call: the operator over a pool. whole: a layer in one, where it can, see `in_one`. wanted: the tokens whose logits are asked for,
        None: all."""
        x, made, given = self.model.model.embeddings(tokens), None, self.pools[0].device_slots(slots)
        for block, pool in zip(self.model.blocks(), self.pools, strict=True):
            normed, x = block.attn_norm.carried(x, made)
            o = None if whole is None or self.backend not in ("auto", "triton_gpu") else whole(block.attn, pool, given, normed)
            o = self._mix(block.attn, pool, normed, slots, packing, call) if o is None else o
            normed, x = block.mlp_norm.carried(x, o)
            made = block.mlp(normed)
        if wanted is not None:
            x, made = x[:, wanted], None if made is None else made[:, wanted]
        x, _ = self.model.model.norm.carried(x, made)
        head = self.model.model.embeddings.weight if self.model.config.tie_embeddings else self.model.lm_head.weight
        return F.linear(x, head)

    def _mix(
        self, attn: Any, pool: StatePool, x: Tensor, slots: Sequence[int] | Tensor, packing: Packing, call: Callable[..., Tensor]
    ) -> Tensor:
        """KimiDeltaAttention.mix with states and windows in a pool."""
        s = attn.sizes
        inputs = dict(zip(WINDOWS, (attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)), strict=True))
        if s.use_short_conv:
            index = pool.rows(pool.device_slots(slots)).place
            filters = dict(zip(WINDOWS, (attn.q_conv1d, attn.k_conv1d, attn.v_conv1d), strict=True))
            made = [filters[n](y, packing, pool.windows[n][index])[0] for n, y in inputs.items()]
        else:
            made, inputs = [F.silu(y) for y in inputs.values()], {}
        q, k, v = (y.unflatten(-1, (-1, d)) for y, d in zip(made, (s.head_dim, s.head_dim, s.head_v_dim), strict=True))
        o = call(
            pool, q=q, k=k, v=v, g=attn.f_proj(x).unflatten(-1, (-1, s.head_dim)), beta=attn.b_proj(x), A_log=attn.A_log,
            dt_bias=attn.dt_bias, window_inputs=inputs, backend=self.backend, **operator_options(attn),
        )  # fmt: skip
        return attn.o_proj(attn.o_norm(o, attn.g_proj(x).unflatten(-1, (-1, s.head_v_dim))).flatten(-2))
