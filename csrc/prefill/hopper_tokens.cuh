// The eight tokens of a warp of the prepare kernel: loads, norms, log-decays, and their decayed tiles in shared memory.
#pragma once
#include "hopper_gate.cuh"
#include "hopper_sequences.cuh"

namespace kda::hopper {

constexpr int kTokens = 8;                 // per warp
constexpr int kBlock = 16;                 // tokens of a block: two warps
constexpr int kTile = kBlock * kHead * 2;  // bytes of a block's tile: rows of 256 bytes, 16-byte unit u of row r at u ^ (r % 8)

// A lane's four channels of eight tokens of q or k, in the rows of a tile that its decayed rows will overwrite.
struct Rows {
  uint32_t tile;  // the warp's first row
  int lane;
  __device__ __forceinline__ uint2 operator[](int t) const;
};

struct Inputs {
  Rows q, k;
  float g[kTokens][4];  // log2-decay
  float inverse_norm;   // lane l: 1 / |q| of token l / 2, or 1 / |k| of token l / 2 - 8
  float dot;            // lane 4 t + t / 2: q . k of token t

  __device__ __forceinline__ float norm_q(int t) const { return __shfl_sync(~0u, inverse_norm, 2 * t); }
  __device__ __forceinline__ float norm_k(int t) const { return __shfl_sync(~0u, inverse_norm, 16 + 2 * t); }
};

// Where a lane's four channels of the warp's token t lie in a block's tile (from the warp's row on) and in a record.
__device__ __forceinline__ uint32_t lane_offset(int t, int lane) { return t * 256 + ((((lane >> 1) ^ t) << 4) | ((lane & 1) << 3)); }
__device__ __forceinline__ uint32_t record_offset(int t, int lane) {
  return (lane >> 4) * 8192 + t * 128 + (((((lane & 15) >> 1) ^ t) << 4) | ((lane & 1) << 3));
}
__device__ __forceinline__ uint2 Rows::operator[](int t) const { return load_shared_pair(tile + lane_offset(t, lane)); }

// Keeps the compiler from carrying what it computed from the gates over this point: there is more of it than registers.
__device__ __forceinline__ void forget_products(Inputs& x) {
#pragma unroll
  for (int t = 0; t < kTokens; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) KDA_TOUCH(x.g[t][c]);
}

// 1 / |q|, 1 / |k| and q . k of the warp's tokens: the diagonals of [q; k] q^T and [q; k] k^T, whose products are exact.
__device__ __forceinline__ void find_norms(Inputs& x, int lane) {
  const uint32_t rows = (lane & 8 ? x.k.tile : x.q.tile) + (lane & 7) * 256 + (((lane >> 4) ^ (lane & 7)) << 4);
  float with_q[4] = {}, with_k[4] = {};
#pragma unroll
  for (int s = 0; s < kHead / 16; ++s) {
    uint32_t a[4];
    load_matrices(a, rows ^ (s << 5));
    mma_bf16(with_q, a, a[0], a[2]), mma_bf16(with_k, a, a[1], a[3]);
  }
  const bool odd = lane & 4;  // token lane / 4, whose diagonal entries are in lane 4 t + t / 2
  const int token = lane / 2 % kTokens, from = 4 * token + token / 2;
  const float q = __shfl_sync(~0u, odd ? with_q[1] : with_q[0], from), k = __shfl_sync(~0u, odd ? with_k[3] : with_k[2], from);
  x.inverse_norm = rsqrtf((lane < 16 ? q : k) + 1e-6f);
  x.dot = odd ? with_k[1] : with_k[0];
}

struct Source {  // rows of one head in global memory, from the chunk's first token on; offsets in bytes fit 32 bits
  const uint8_t* base;
  uint32_t step;
  int first, rows;  // the warp's first token; tokens before the sequence ends

  __device__ __forceinline__ Source(const void* p, const TokenStrides& s, const Span& span, int head, int warp, int bytes)
      : base(static_cast<const uint8_t*>(p) + (span.batch * s.batch + span.first * s.token + head * s.head) * bytes),
        step(static_cast<uint32_t>(s.token) * bytes),
        first(warp * kTokens),
        rows(static_cast<int>(span.length)) {}

  __device__ __forceinline__ bool whole() const { return first + kTokens <= rows; }
  template <typename T>
  __device__ __forceinline__ T at(int t, int lane) const {
    return __ldg(reinterpret_cast<const T*>(base + ((first + t) * step + lane * static_cast<uint32_t>(sizeof(T)))));
  }
  template <typename T, typename Store>
  __device__ __forceinline__ void each(int lane, Store store) const {  // zeros past the end
    if (whole()) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) store(t, at<T>(t, lane));
    } else {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) store(t, first + t < rows ? at<T>(t, lane) : T{});
    }
  }
  __device__ __forceinline__ void fetch(Rows& to, uint32_t tile, int lane) const {
    to.tile = tile, to.lane = lane;
    const int odd = lane / 16, unit = lane % 16;
    const uint32_t from = (first + odd) * step + unit * 16, at = tile + odd * 256 + ((unit ^ odd) << 4);
    if (whole()) {
#pragma unroll
      for (int t = 0; t < kTokens; t += 2) copy_async((at + t * 256) ^ (t << 4), base + (from + t * step), 16);
    } else {
#pragma unroll
      for (int t = 0; t < kTokens; t += 2) {
        const bool inside = first + odd + t < rows;
        copy_async((at + t * 256) ^ (t << 4), base + (inside ? from + t * step : 0), inside ? 16 : 0);
      }
    }
  }
};

// The warp's tokens: q and k, into `rows_q` and `rows_k`, and log2-decays. Past the sequence's end: zeros that do not decay.
template <Gate GATE, bool G32>
__device__ __forceinline__ void load_tokens(const HopperForward& p, const Span& span, int head, int warp, int lane, uint32_t rows_q,
                                            uint32_t rows_k, Inputs& x) {
  const int key_head = p.H == p.HV ? head : head / static_cast<int>(p.HV / p.H);
  const Source q(p.q, p.q_strides, span, key_head, warp, 2), k(p.k, p.k_strides, span, key_head, warp, 2);
  const Source g(p.g, p.g_strides, span, head, warp, G32 ? 4 : 2);
  uint2 raw[kTokens];
  if (G32)
    g.each<float4>(lane, [&](int t, float4 y) { x.g[t][0] = y.x, x.g[t][1] = y.y, x.g[t][2] = y.z, x.g[t][3] = y.w; });
  else
    g.each<uint2>(lane, [&](int t, uint2 y) { raw[t] = y; });
  q.fetch(x.q, rows_q, lane), k.fetch(x.k, rows_k, lane);
  const LogDecay<GATE> decay(p, head, 4 * lane);
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
      for (int c = 0; c < 4; ++c) x.g[t][c] = g.first + t < g.rows ? x.g[t][c] : 0.0f;
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
