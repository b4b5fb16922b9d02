// The tokens of a warp of the prepare kernel: loads, norms, log-decays, and their decayed tiles in shared memory.
//
// A lane has four channels of a group of eight tokens. 128 channels: all lanes have the warp's one group. 64 channels: a warp has two
// groups, one in each half of its lanes, and a block half as many warps.
#pragma once
#include "hopper_gate.cuh"
#include "hopper_sequences.cuh"

namespace kda::hopper {

constexpr int kTokens = 8;  // of a group
constexpr int kBlock = 16;  // tokens of a block: two groups

template <int HEAD>
struct Warp {
  static constexpr int lanes = HEAD / 4, groups = 32 / lanes, tokens = groups * kTokens;
  static constexpr int row = HEAD * 2;  // bytes of a token of q or k, in tiles too: 16-byte unit u of row r at u ^ (r % 8)
  static constexpr int threads = kChunk / tokens * 32;  // of a block

  // A lane's group in the warp, and its number there.
  __device__ __forceinline__ static int group(int lane) { return groups == 1 ? 0 : lane >> 4; }
  __device__ __forceinline__ static int channels(int lane) { return groups == 1 ? lane : lane & 15; }
};

// A lane's four channels of eight tokens of q or k, in the rows of a tile that its decayed rows will overwrite.
template <int HEAD>
struct Rows {
  uint32_t tile;  // the warp's first row
  int lane;
};

template <int HEAD>
struct Inputs {
  Rows<HEAD> q, k;
  float g[kTokens][4];  // log2-decay
  // Of the group's token t: 1 / |q|, 1 / |k| in lanes 2 t, 2 t + 1 and 16 + 2 t, 17 + 2 t; of two groups in lanes t and 8 + t of a half.
  float inverse_norm;
  float dot[Warp<HEAD>::groups];  // lane 4 t + t / 2: q . k of token t of each group

  __device__ __forceinline__ float norm_q(int t) const {
    return HEAD == 128 ? __shfl_sync(~0u, inverse_norm, 2 * t) : __shfl_sync(~0u, inverse_norm, t, 16);
  }
  __device__ __forceinline__ float norm_k(int t) const {
    return HEAD == 128 ? __shfl_sync(~0u, inverse_norm, 16 + 2 * t) : __shfl_sync(~0u, inverse_norm, 8 + t, 16);
  }
  // Those of a group of the warp, in all its lanes.
  __device__ __forceinline__ float norm_q_of(int group, int t) const {
    return HEAD == 128 ? norm_q(t) : __shfl_sync(~0u, inverse_norm, 16 * group + t);
  }
  __device__ __forceinline__ float norm_k_of(int group, int t) const {
    return HEAD == 128 ? norm_k(t) : __shfl_sync(~0u, inverse_norm, 16 * group + 8 + t);
  }
};
// Which of the two norms a lane has, and of which of the warp's tokens.
template <int HEAD>
__device__ __forceinline__ int norm_kind(int lane) {
  return HEAD == 128 ? lane / 16 : lane >> 3 & 1;
}
template <int HEAD>
__device__ __forceinline__ int norm_token(int lane) {
  return HEAD == 128 ? lane / 2 % kTokens : (lane >> 4 << 3) + (lane & 7);
}

// Where a lane's four channels of its group's token t lie in a block's tile (from the warp's row on) and in a record.
template <int HEAD>
__device__ __forceinline__ uint32_t lane_offset(int t, int lane) {
  using W = Warp<HEAD>;
  return (W::group(lane) * kTokens + t) * W::row + ((((W::channels(lane) >> 1) ^ t) << 4) | ((lane & 1) << 3));
}
template <int HEAD>
__device__ __forceinline__ uint32_t record_offset(int t, int lane) {
  return (lane >> 4) * (HEAD == 128 ? 8192 : kTokens * 128) + t * 128 + (((((lane & 15) >> 1) ^ t) << 4) | ((lane & 1) << 3));
}

// Keeps the compiler from carrying what it computed from the gates over this point: there is more of it than registers.
template <int HEAD>
__device__ __forceinline__ void forget_products(Inputs<HEAD>& x) {
#pragma unroll
  for (int t = 0; t < kTokens; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) KDA_TOUCH(x.g[t][c]);
}

// 1 / |q|, 1 / |k| and q . k of the warp's tokens: the diagonals of [q; k] q^T and [q; k] k^T, whose products are exact.
template <int HEAD>
__device__ __forceinline__ void find_norms(Inputs<HEAD>& x, int lane) {
  using W = Warp<HEAD>;
  const uint32_t rows = (lane & 8 ? x.k.tile : x.q.tile) + (lane & 7) * W::row + (((lane >> 4) ^ (lane & 7)) << 4);
  float square = 0.0f;
#pragma unroll
  for (int group = 0; group < W::groups; ++group) {
    float with_q[4] = {}, with_k[4] = {};
#pragma unroll
    for (int s = 0; s < HEAD / 16; ++s) {
      uint32_t a[4];
      load_matrices(a, (rows ^ (s << 5)) + group * kTokens * W::row);
      mma_bf16(with_q, a, a[0], a[2]), mma_bf16(with_k, a, a[1], a[3]);
    }
    const bool odd = lane & 4;  // token lane / 4, whose diagonal entries are in lane 4 t + t / 2
    const int token = HEAD == 128 ? lane / 2 % kTokens : lane & 7, from = 4 * token + token / 2;
    const float q = __shfl_sync(~0u, odd ? with_q[1] : with_q[0], from), k = __shfl_sync(~0u, odd ? with_k[3] : with_k[2], from);
    const float found = (HEAD == 128 ? lane < 16 : (lane & 8) == 0) ? q : k;
    square = group == 0 || W::group(lane) == group ? found : square;
    if (group == W::groups - 1) x.inverse_norm = rsqrtf(square + 1e-6f);
    x.dot[group] = odd ? with_k[1] : with_k[0];
  }
}

template <int HEAD>
struct Source {  // rows of one head in global memory, from the chunk's first token on; offsets in bytes fit 32 bits
  using W = Warp<HEAD>;
  const uint8_t* base;
  uint32_t step;
  int first, rows;  // the warp's first token; tokens before the sequence ends

  __device__ __forceinline__ Source(const void* p, const TokenStrides& s, const Span& span, int head, int warp, int bytes)
      : base(static_cast<const uint8_t*>(p) + (span.batch * s.batch + span.first * s.token + head * s.head) * bytes),
        step(static_cast<uint32_t>(s.token) * bytes),
        first(warp * W::tokens),
        rows(static_cast<int>(span.length)) {}

  __device__ __forceinline__ bool whole() const { return first + W::tokens <= rows; }
  __device__ __forceinline__ int token(int t, int lane) const { return first + W::group(lane) * kTokens + t; }
  template <typename T>
  __device__ __forceinline__ T at(int t, int lane) const {
    return __ldg(reinterpret_cast<const T*>(base + (token(t, lane) * step + W::channels(lane) * static_cast<uint32_t>(sizeof(T)))));
  }
  template <typename T, typename Store>
  __device__ __forceinline__ void each(int lane, Store store) const {  // zeros past the end
    if (whole()) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) store(t, at<T>(t, lane));
    } else {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) store(t, token(t, lane) < rows ? at<T>(t, lane) : T{});
    }
  }
  __device__ __forceinline__ void fetch(Rows<HEAD>& to, uint32_t tile, int lane) const {
    constexpr int kUnits = W::row / 16, kAtOnce = 32 / kUnits;  // of a row; rows
    to.tile = tile, to.lane = lane;
    const int odd = lane / kUnits, unit = lane % kUnits;
    const uint32_t from = (first + odd) * step + unit * 16, at = tile + odd * W::row + ((unit ^ odd) << 4);
    if (whole()) {
#pragma unroll
      for (int t = 0; t < W::tokens; t += kAtOnce) copy_async((at + t * W::row) ^ (t % 8 << 4), base + (from + t * step), 16);
    } else {
#pragma unroll
      for (int t = 0; t < W::tokens; t += kAtOnce) {
        const bool inside = first + odd + t < rows;
        copy_async((at + t * W::row) ^ (t % 8 << 4), base + (inside ? from + t * step : 0), inside ? 16 : 0);
      }
    }
  }
};

// The warp's tokens: q and k, into `rows_q` and `rows_k`, and log2-decays. Past the sequence's end: zeros that do not decay.
template <int HEAD, Gate GATE, bool G32>
__device__ __forceinline__ void load_tokens(const HopperForward& p, const Span& span, int head, int warp, int lane, uint32_t rows_q,
                                            uint32_t rows_k, Inputs<HEAD>& x) {
  const int key_head = p.H == p.HV ? head : head / static_cast<int>(p.HV / p.H);
  const Source<HEAD> q(p.q, p.q_strides, span, key_head, warp, 2), k(p.k, p.k_strides, span, key_head, warp, 2);
  const Source<HEAD> g(p.g, p.g_strides, span, head, warp, G32 ? 4 : 2);
  uint2 raw[kTokens];
  if (G32)
    g.template each<float4>(lane, [&](int t, float4 y) { x.g[t][0] = y.x, x.g[t][1] = y.y, x.g[t][2] = y.z, x.g[t][3] = y.w; });
  else
    g.template each<uint2>(lane, [&](int t, uint2 y) { raw[t] = y; });
  q.fetch(x.q, rows_q, lane), k.fetch(x.k, rows_k, lane);
  const LogDecay<GATE> decay(p, head, HEAD, 4 * Warp<HEAD>::channels(lane));
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (!G32) x.g[t][0] = low(raw[t].x), x.g[t][1] = high(raw[t].x), x.g[t][2] = low(raw[t].y), x.g[t][3] = high(raw[t].y);
#pragma unroll
    for (int c = 0; c < 4; ++c) x.g[t][c] = decay(x.g[t][c], c);
  }
  if (!g.whole())
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c) x.g[t][c] = g.token(t, lane) < g.rows ? x.g[t][c] : 0.0f;
  copy_async_wait();
  find_norms(x, lane);
  forget_products(x);
}

__device__ __forceinline__ void scaled(float (&y)[4], uint2 x, float factor) {
  y[0] = low(x.x) * factor, y[1] = high(x.x) * factor, y[2] = low(x.y) * factor, y[3] = high(x.y) * factor;
}
__device__ __forceinline__ void multiply(float (&y)[4], const float (&x)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) y[c] *= x[c];
}
__device__ __forceinline__ uint2 packed(const float (&y)[4]) { return {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])}; }
__device__ __forceinline__ uint2 packed_half(const float (&y)[4]) { return {pack_half(y[0], y[1]), pack_half(y[2], y[3])}; }

}  // namespace kda::hopper
