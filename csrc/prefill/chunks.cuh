// Which tokens a chunk holds, and where its intermediates lie.
//
// A slot is a chunk of one row; a row is one (batch, value head), or one value head of a packed call. Packed sequences start new chunks;
// sequence n's first slot is floor(cu[n] / C) + n, which leaves room for every split of T tokens without looking at the lengths.
#pragma once

#include <cstdint>

#include "../include/kdakit.h"

namespace kda {

struct Tokens {
  int64_t sequence;  // which state
  int64_t batch;
  int64_t first;   // of the chunk, in the tensors
  int64_t length;  // tokens of the chunk; <= 0: an unused slot
};

struct Sequences {
  const void *cu_seqlens;
  int64_t count;   // N, with cu_seqlens
  int64_t tokens;  // T
  bool wide;       // int64_t
  int64_t slots;   // per row

  __device__ int64_t edge(int64_t n) const {
    return wide ? static_cast<const int64_t *>(cu_seqlens)[n] : int64_t(static_cast<const int32_t *>(cu_seqlens)[n]);
  }

  __device__ int64_t first_slot(int64_t n, int C) const { return edge(n) / C + n; }

  __device__ Tokens chunk(int64_t batch, int64_t slot, int C) const {
    if (cu_seqlens == nullptr) return {batch, batch, slot * C, tokens - slot * C};
    int64_t low = 0, high = count - 1;  // the last sequence whose first slot is <= slot
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_slot(middle, C) <= slot) low = middle;
      else high = middle - 1;
    }
    const int64_t start = edge(low) + (slot - first_slot(low, C)) * C;
    return {low, 0, start, edge(low + 1) - start};
  }
};

struct Intermediates {
  float *w, *u;   // [rows, slots, C, K or V], given out if not NULL
  void *records;  // [rows, slots] of Record<K, V, C>
};

struct Params {
  kda_tensor q, k, v, g, beta, o;
  const float *A_log, *dt_bias, *initial_state;
  float *final_state;
  Intermediates mid;
  Sequences sequences;
  int64_t rows, value_heads, group;  // rows: batch * value heads; group: value heads per key head
  float scale, lower_bound;
  int32_t gate, beta_kind, l2norm, state_v_first;
};

__device__ __forceinline__ const float *row_of(const kda_tensor &x, int64_t batch, int64_t head, int64_t token) {
  return static_cast<const float *>(x.data) + batch * x.batch_stride + head * x.head_stride + token * x.token_stride;
}

}  // namespace kda
