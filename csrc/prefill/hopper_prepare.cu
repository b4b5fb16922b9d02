// Stage intra: everything of a chunk that needs no state. One block of four warps per chunk and value head.
//
// With d(j, i) the product of the decays of tokens j+1 .. i:
//
//   k_in = k d(start, i)        q_decayed = scale q d(start, i)        k_decayed = k d(i, end)        decay = d(start, end)
//   A_qk[i,j] = q_i . (k_j d(j, i)),  j <= i        A_kk[i,j] = beta_i k_i . (k_j d(j, i)),  j < i        X = (I + A_kk)^-1
//   k_solved = Diag(beta) X^T k_decayed        A_solved^T = scale Diag(beta) X^T A_qk^T
//
// Warp b owns tokens 16 b .. 16 b + 15. Lanes own four channels while decays are formed, so that sums over tokens stay in registers, and
// matrix fragments afterwards. Warp b computes row block b of A_qk and A_kk, then column block b of X: the second is long where the first
// is short, and each needs the other warps only once.
//
// No decay is a difference of sums that could cancel. Off the diagonal, rows are decayed from the start of their own block and columns up
// to there: both factors <= 1. On it, blocks of 16 tokens refer to their start where the gate is bounded; `unbounded_diagonal` else.
#ifndef KDAKIT_MINBLOCKS
#define KDAKIT_MINBLOCKS 3
#endif
#include "hopper_gate.cuh"
#include "hopper_launch.h"
#include "hopper_sequences.cuh"

namespace kdakit {
namespace {

constexpr int kBlock = 16;                // tokens per warp
constexpr int kTile = kBlock * kHead * 2;  // bytes of a block's tile: rows of 256 bytes, unit u of row r at u ^ (r % 8)
constexpr float kFloor = -40.0f;          // log2-decays below are raised to it: far under float32's resolution, and three of them fit bfloat16

// Shared memory: per warp q rows, k rows, near columns; after A: L, A_qk, X and the staged A_solved^T. Then what all warps read.
constexpr int kRowsQ = 0, kRowsK = kTile, kColumns = 2 * kTile, kWarpBytes = 3 * kTile;
constexpr int kPitch = (kChunk + 8) * 2, kPitchX = (kBlock + 8) * 2;
constexpr int kL = 0, kA = kL + kBlock * kPitch, kX = kA + kBlock * kPitch, kStageA = kX + kBlock * kPitchX;
static_assert(kStageA + kBlock * kChunk * 2 <= 2 * kTile, "the staged square must fit beside L, A and X");
constexpr int kTails = 4 * kWarpBytes, kTotals = kTails + 4 * kTile;
constexpr int kBetas = kTotals + 4 * kHead * 4, kNorms = kBetas + kChunk * 4, kSharedBytes = kNorms + 2 * kChunk * 4;

struct Inputs {
  uint2 q[kBlock], k[kBlock];  // four channels of each token
  float g[kBlock][4];          // log2-decay
};

// Keeps the compiler from carrying what it computed from the inputs over this point: there is more of it than registers.
__device__ __forceinline__ void forget_products(Inputs& x) {
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    asm volatile("" : "+r"(x.q[t].x), "+r"(x.q[t].y), "+r"(x.k[t].x), "+r"(x.k[t].y));
#pragma unroll
    for (int c = 0; c < 4; ++c) asm volatile("" : "+f"(x.g[t][c]));
  }
}

__device__ __forceinline__ float square_sum(uint2 x) {
  return fmaf(low(x.x), low(x.x), fmaf(high(x.x), high(x.x), fmaf(low(x.y), low(x.y), high(x.y) * high(x.y))));
}

// Lane l: 1 / |q| of token l, or 1 / |k| of token l - 16.
__device__ __forceinline__ float inverse_norms(const Inputs& x, int lane) {
  float sums[32];
#pragma unroll
  for (int t = 0; t < kBlock; ++t) sums[t] = square_sum(x.q[t]), sums[kBlock + t] = square_sum(x.k[t]);
  return rsqrtf(transposed_sum<kBlock>(sums, lane) + 1e-6f);
}

template <typename T>
struct Rows {  // of one head, from the warp's first token on; offsets in bytes fit 32 bits
  const uint8_t* base;
  uint32_t offset, step;

  __device__ __forceinline__ Rows(const void* p, const TokenStrides& s, const Span& span, int head, int warp, int lane, int bytes)
      : base(static_cast<const uint8_t*>(p) + (span.batch * s.batch + span.first * s.token + head * s.head) * bytes),
        offset(warp * kBlock * static_cast<uint32_t>(s.token) * bytes + lane * static_cast<uint32_t>(sizeof(T))),
        step(static_cast<uint32_t>(s.token) * bytes) {}
  __device__ __forceinline__ T operator[](int t) const { return __ldg(reinterpret_cast<const T*>(base + (offset + t * step))); }
};

// Loads the block's tokens, zeros past the sequence's end, and forms log2-decays; returns `inverse_norms`.
template <Gate GATE, bool G32>
__device__ __forceinline__ float load(const HopperForward& p, const Span& span, int head, int warp, int lane, Inputs& x) {
  const int rows = static_cast<int>(span.length) - warp * kBlock, key_head = head / static_cast<int>(p.HV / p.H);
  const Rows<uint2> q(p.q, p.q_strides, span, key_head, warp, lane, 2), k(p.k, p.k_strides, span, key_head, warp, lane, 2);
  const Rows<uint2> g(p.g, p.g_strides, span, head, warp, lane, 2);
  const Rows<float4> wide_g(p.g, p.g_strides, span, head, warp, lane, 4);
  uint2 raw[kBlock];
  const auto load_token = [&](int t) {
    x.q[t] = q[t], x.k[t] = k[t];
    if (G32) {
      const float4 y = wide_g[t];
      x.g[t][0] = y.x, x.g[t][1] = y.y, x.g[t][2] = y.z, x.g[t][3] = y.w;
    } else {
      raw[t] = g[t];
    }
  };
  if (rows >= kBlock) {
#pragma unroll
    for (int t = 0; t < kBlock; ++t) load_token(t);
  } else {
#pragma unroll
    for (int t = 0; t < kBlock; ++t) {
      x.q[t] = x.k[t] = raw[t] = uint2{0, 0};
      x.g[t][0] = x.g[t][1] = x.g[t][2] = x.g[t][3] = 0.0f;
      if (t < rows) load_token(t);
    }
  }
  const float inverse = inverse_norms(x, lane);
  const LogDecay<GATE> decay(p, head, 4 * lane);
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    if (!G32) {
      asm volatile("" : "+r"(raw[t].x), "+r"(raw[t].y));  // not before the norms: registers
      x.g[t][0] = low(raw[t].x), x.g[t][1] = high(raw[t].x), x.g[t][2] = low(raw[t].y), x.g[t][3] = high(raw[t].y);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) x.g[t][c] = decay(x.g[t][c], c);
  }
  if (rows < kBlock)
#pragma unroll
    for (int t = 0; t < kBlock; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c) x.g[t][c] = t < rows ? x.g[t][c] : 0.0f;
  return inverse;
}

__device__ __forceinline__ void scaled(float (&y)[4], uint2 x, float factor) {
  y[0] = low(x.x) * factor, y[1] = high(x.x) * factor, y[2] = low(x.y) * factor, y[3] = high(x.y) * factor;
}
__device__ __forceinline__ void multiply(float (&y)[4], const float (&x)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) y[c] *= x[c];
}
__device__ __forceinline__ uint2 packed(const float (&y)[4]) { return {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])}; }

// Where a lane's four channels of row t of a block's tile lie, in shared memory and in a record.
__device__ __forceinline__ uint32_t lane_offset(int t, int lane) {
  return t * 256 + ((((lane >> 1) ^ (t & 7)) << 4) | ((lane & 1) << 3));
}
__device__ __forceinline__ uint32_t record_offset(int t, int lane) {
  return (lane >> 4) * 8192 + t * 128 + (((((lane & 15) >> 1) ^ (t & 7)) << 4) | ((lane & 1) << 3));
}

// Fragment addresses in a block's tile: 16 rows as an A operand, 16 rows as the columns of a B operand; k-step s is at offset ^ (s << 5).
__device__ __forceinline__ uint32_t row_fragment(int lane) { return (lane & 15) * 256 + (((lane >> 4) ^ (lane & 7)) << 4); }
__device__ __forceinline__ uint32_t column_fragment(int lane) {
  return ((lane & 7) + ((lane >> 4) << 3)) * 256 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
}

struct Square {  // 16 x 16 in C layout
  float x[2][4];
};
__device__ __forceinline__ int square_row(int r, int lane) { return lane / 4 + 8 * (r / 2); }
__device__ __forceinline__ int square_column(int n, int r, int lane) { return 8 * n + 2 * (lane % 4) + r % 2; }

// acc_q += rows_q columns^T, acc_k += rows_k columns^T over 128 channels.
__device__ __forceinline__ void block_product(Square& acc_q, Square& acc_k, uint32_t rows_q, uint32_t rows_k, uint32_t columns) {
#pragma unroll
  for (int s = 0; s < kHead / 16; ++s) {
    uint32_t a_q[4], a_k[4], b[4];
    load_matrices(a_q, rows_q ^ (s << 5)), load_matrices(a_k, rows_k ^ (s << 5)), load_matrices(b, columns ^ (s << 5));
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_bf16(acc_q.x[n], a_q, b[2 * n], b[2 * n + 1]), mma_bf16(acc_k.x[n], a_k, b[2 * n], b[2 * n + 1]);
  }
}

// The pairs (i, j) of a block whose highest differing bit is in [from, to) are taken from `fresh`.
__device__ __forceinline__ void take(Square& acc, const Square& fresh, int from, int to, int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int differ = square_row(r, lane) ^ square_column(n, r, lane);
      acc.x[n][r] = differ >= from && differ < to ? fresh.x[n][r] : acc.x[n][r];
    }
}

// What a lane needs to write decayed tiles of its block.
struct Writer {
  Inputs& x;
  float inverse;  // of inverse_norms
  uint32_t base;  // the warp's shared memory
  int lane;

  __device__ __forceinline__ float norm_q(int t) const { return __shfl_sync(~0u, inverse, t); }
  __device__ __forceinline__ float norm_k(int t) const { return __shfl_sync(~0u, inverse, kBlock + t); }

  // Rows of tokens first .. last - 1 decayed from `first` (exclusive of its own gate with AFTER).
  template <bool AFTER>
  __device__ __forceinline__ void rows(int first, int last) const {
    float sum[4] = {};
#pragma unroll
    for (int t = first; t < last; ++t) {
      float e[4], y[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += AFTER && t == first ? 0.0f : x.g[t][c], e[c] = exp2_fast(sum[c]);
      scaled(y, x.q[t], norm_q(t)), multiply(y, e);
      store_shared(base + kRowsQ + lane_offset(t, lane), packed(y));
      scaled(y, x.k[t], norm_k(t)), multiply(y, e);
      store_shared(base + kRowsK + lane_offset(t, lane), packed(y));
    }
  }
  // Columns of tokens first .. last - 1 decayed to the end of last - 1.
  __device__ __forceinline__ void tails(int first, int last) const {
    float sum[4] = {};
#pragma unroll
    for (int t = last - 1; t >= first; --t) {
      float y[4];
      scaled(y, x.k[t], norm_k(t));
#pragma unroll
      for (int c = 0; c < 4; ++c) y[c] *= exp2_fast(sum[c]), sum[c] += x.g[t][c];
      store_shared(base + kColumns + lane_offset(t, lane), packed(y));
    }
  }
  // Columns of tokens first .. last - 1 grown from `first`: 1 / d(first, j).
  __device__ __forceinline__ void grown(int first, int last) const {
    float sum[4] = {};
#pragma unroll
    for (int t = first; t < last; ++t) {
      float y[4];
      scaled(y, x.k[t], norm_k(t));
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += t == first ? 0.0f : x.g[t][c], y[c] *= exp2_fast(-sum[c]);
      store_shared(base + kColumns + lane_offset(t, lane), packed(y));
    }
  }
};

// The diagonal block for any gate: groups of four tokens with one-sided factors, which the floor keeps finite, then two levels at which
// both factors are <= 1: groups of four beside each other, halves of eight.
__device__ __forceinline__ void unbounded_diagonal(const Writer& w, Square& acc_q, Square& acc_k) {
  const uint32_t rows = w.base + row_fragment(w.lane), columns = w.base + kColumns + column_fragment(w.lane);
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    if (level == 0) {
#pragma unroll
      for (int t = 0; t < kBlock; t += 4) w.rows<true>(t, t + 4), w.grown(t, t + 4);
    } else if (level == 1) {
      w.rows<false>(4, 8), w.rows<false>(12, 16), w.tails(0, 4), w.tails(8, 12);
    } else {
      w.rows<false>(8, 16), w.tails(0, 8);
    }
    forget_products(w.x);
    __syncwarp();
    Square fresh_q = {}, fresh_k = {};
    block_product(fresh_q, fresh_k, rows + kRowsQ, rows + kRowsK, columns);
    take(acc_q, fresh_q, level == 0 ? 0 : 2 << level, 4 << level, w.lane);
    take(acc_k, fresh_k, level == 0 ? 0 : 2 << level, 4 << level, w.lane);
    __syncwarp();
  }
}

// (I - N)^-1 for strictly lower N = -A_kk, 16 x 16, by masked doubling: X <- X + X (N o M_b) X. Exact algebra, no powers of N.
__device__ __forceinline__ void half_operand(uint32_t (&a)[4], const Square& s) {
  a[0] = pack_half(s.x[0][0], s.x[0][1]), a[1] = pack_half(s.x[0][2], s.x[0][3]);
  a[2] = pack_half(s.x[1][0], s.x[1][1]), a[3] = pack_half(s.x[1][2], s.x[1][3]);
}
// s = a + rest with a in bfloat16.
__device__ __forceinline__ void split_operand(uint32_t (&a)[4], Square& rest, const Square& s) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = s.x[i / 2][2 * (i % 2)], y = s.x[i / 2][2 * (i % 2) + 1];
    a[i] = pack_bf16(x, y);
    rest.x[i / 2][2 * (i % 2)] = x - low(a[i]), rest.x[i / 2][2 * (i % 2) + 1] = y - high(a[i]);
  }
}
__device__ __forceinline__ void multiply_add(Square& acc, const uint32_t (&a)[4], const Square& right) {  // acc += A right
  uint32_t b[4];
  half_operand(b, right);
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = transposed(b[i]);
  mma_half(acc.x[0], a, b[0], b[1]), mma_half(acc.x[1], a, b[2], b[3]);
}
__device__ __forceinline__ Square unit_lower_inverse(const Square& negative, int lane) {
  Square inverse;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int differ = square_row(r, lane) ^ square_column(n, r, lane);
      inverse.x[n][r] = differ == 0 ? 1.0f : differ == 1 ? negative.x[n][r] : 0.0f;
    }
#pragma unroll
  for (int b = 2; b < kBlock; b *= 2) {
    Square level = {}, right = {};
    take(level, negative, b, 2 * b, lane);
    uint32_t a[4];
    half_operand(a, level);
    multiply_add(right, a, inverse);
    half_operand(a, inverse);
    multiply_add(inverse, a, right);
  }
  return inverse;
}

__device__ __forceinline__ void store_square(uint32_t to, int pitch, const Square& s, int lane) {  // as halves
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    store_shared(to + square_row(0, lane) * pitch + square_column(n, 0, lane) * 2, pack_half(s.x[n][0], s.x[n][1]));
    store_shared(to + square_row(2, lane) * pitch + square_column(n, 0, lane) * 2, pack_half(s.x[n][2], s.x[n][3]));
  }
}

// acc += a right^T with right [16, 16] halves in shared memory.
__device__ __forceinline__ void multiply_transposed(Square& acc, const uint32_t (&a)[4], uint32_t right, int pitch, int lane) {
  uint32_t b[4];
  load_matrices(b, right + ((lane & 7) + ((lane >> 4) << 3)) * pitch + ((lane >> 3) & 1) * 16);
  mma_half(acc.x[0], a, b[0], b[1]), mma_half(acc.x[1], a, b[2], b[3]);
}

// b, a B operand whose reduction dimension is channels, times a factor per channel.
__device__ __forceinline__ void scale_columns(uint32_t (&b)[4], float2 low_channels, float2 high_channels) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float2 f = r % 2 ? high_channels : low_channels;
    b[r] = pack_bf16(low(b[r]) * f.x, high(b[r]) * f.y);
  }
}

}  // namespace

template <Gate GATE, bool SAFE, bool G32, bool L2NORM>
__global__ void __launch_bounds__(128, SAFE ? KDAKIT_MINBLOCKS : 2) prepare_kernel(const __grid_constant__ HopperForward p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const uint32_t smem = shared_address(shared), own = smem + warp * kWarpBytes;
  const int64_t slot = blockIdx.x / static_cast<uint32_t>(p.HV);
  const int head = blockIdx.x - static_cast<uint32_t>(slot) * static_cast<uint32_t>(p.HV);
  const Span span = chunk_span(p, slot);
  if (span.length <= 0) return;
  uint8_t* record = static_cast<uint8_t*>(p.workspace) + static_cast<int64_t>(blockIdx.x) * kRecordBytes;
  auto* totals = reinterpret_cast<float(*)[kHead]>(shared + kTotals);  // decay of each block
  auto* betas = reinterpret_cast<float*>(shared + kBetas);
  auto* norms = reinterpret_cast<float(*)[kChunk]>(shared + kNorms);  // |q|, |k| where they are not divided out

  Inputs x;
  const float inverse_norm = load<GATE, G32>(p, span, head, warp, lane, x);
  if (lane < kBlock) {
    const int64_t token = span.first + warp * kBlock + lane;
    const int64_t at = span.batch * p.beta_strides.batch + token * p.beta_strides.token + head * p.beta_strides.head;
    betas[warp * kBlock + lane] = warp * kBlock + lane < span.length ? write_strength(p, at) : 0.0f;
  }
  const Writer w{x, inverse_norm, own, lane};
  forget_products(x);
  if (!L2NORM) norms[lane / kBlock][warp * kBlock + lane % kBlock] = 1.0f / w.inverse;
  float total[4] = {};
#pragma unroll
  for (int t = 0; t < kBlock; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (!SAFE) x.g[t][c] = fmaxf(x.g[t][c], kFloor);
      total[c] += x.g[t][c];
    }
#pragma unroll
  for (int c = 0; c < 4; ++c) total[c] = exp2_fast(total[c]);
  *reinterpret_cast<float4*>(&totals[warp][4 * lane]) = make_float4(total[0], total[1], total[2], total[3]);
  __syncthreads();

  Square near_q = {}, near_k = {};  // the diagonal block
  float before[4] = {1, 1, 1, 1}, all[4] = {1, 1, 1, 1}, before_q[4];
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float4 y = *reinterpret_cast<const float4*>(&totals[m][4 * lane]);
    const float z[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) before[c] *= m < warp ? z[c] : 1.0f, all[c] *= z[c];
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) before_q[c] = before[c] * p.scale;
  if (warp == 0) *reinterpret_cast<float4*>(record + kDecay + 16 * lane) = make_float4(all[0], all[1], all[2], all[3]);
  if (!SAFE) unbounded_diagonal(w, near_q, near_k);

  const uint32_t tails = smem + kTails + warp * kTile;
  float sum[4] = {};
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    float e[4], y[4], z[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] += x.g[t][c], e[c] = exp2_fast(sum[c]);
    const uint32_t at = lane_offset(t, lane), out = warp * kBlock * 128 + record_offset(t, lane);
    const float inverse_q = w.norm_q(t), inverse_k = w.norm_k(t);
    scaled(y, x.q[t], inverse_q), multiply(y, e);
    store_shared(own + kRowsQ + at, packed(y));
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] *= L2NORM ? before_q[c] : before_q[c] * __frcp_rn(inverse_q);
    *reinterpret_cast<uint2*>(record + (kQDecayed + out)) = packed(y);
    scaled(z, x.k[t], inverse_k);
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] = z[c] * e[c];
    store_shared(own + kRowsK + at, packed(y));
    multiply(y, before);
    if (!L2NORM)
#pragma unroll
      for (int c = 0; c < 4; ++c) y[c] *= __frcp_rn(inverse_k);
    *reinterpret_cast<uint2*>(record + (kKIn + out)) = packed(y);
    if (SAFE) {
#pragma unroll
      for (int c = 0; c < 4; ++c) z[c] *= exp2_fast(-sum[c]);
      store_shared(own + kColumns + at, packed(z));
      multiply(z, total);
      store_shared(tails + at, packed(z));
    }
  }
  if (!SAFE) {
    float rest[4] = {};
#pragma unroll
    for (int t = kBlock - 1; t >= 0; --t) {
      float z[4];
      scaled(z, x.k[t], w.norm_k(t));
#pragma unroll
      for (int c = 0; c < 4; ++c) z[c] *= exp2_fast(rest[c]), rest[c] += x.g[t][c];
      store_shared(tails + lane_offset(t, lane), packed(z));
    }
  }
  __syncthreads();

  Square far_q[3] = {}, far_k[3] = {};  // blocks (warp, j), j < warp
  {
    const uint32_t rows = own + row_fragment(lane), columns = column_fragment(lane);
#pragma unroll
    for (int s = 0; s < kHead / 16; ++s) {
      uint32_t a_q[4], a_k[4], b[4];
      load_matrices(a_q, (rows + kRowsQ) ^ (s << 5)), load_matrices(a_k, (rows + kRowsK) ^ (s << 5));
      if (SAFE) {
        load_matrices(b, (own + kColumns + columns) ^ (s << 5));
#pragma unroll
        for (int n = 0; n < 2; ++n)
          mma_bf16(near_q.x[n], a_q, b[2 * n], b[2 * n + 1]), mma_bf16(near_k.x[n], a_k, b[2 * n], b[2 * n + 1]);
      }
      const float* f = &totals[1][16 * s + 2 * (lane % 4)];
      const float2 one0 = *reinterpret_cast<const float2*>(f), one1 = *reinterpret_cast<const float2*>(f + 8);
      const float2 two0 = *reinterpret_cast<const float2*>(f + kHead), two1 = *reinterpret_cast<const float2*>(f + kHead + 8);
#pragma unroll
      for (int j = 2; j >= 0; --j) {  // columns end with block j: decay them over the blocks between
        if (j >= warp) continue;
        load_matrices(b, (smem + kTails + j * kTile + columns) ^ (s << 5));
        if (j == 0 && warp == 2) scale_columns(b, one0, one1);
        if (j == 1 && warp == 3) scale_columns(b, two0, two1);
        if (j == 0 && warp == 3)
          scale_columns(b, make_float2(one0.x * two0.x, one0.y * two0.y), make_float2(one1.x * two1.x, one1.y * two1.y));
#pragma unroll
        for (int n = 0; n < 2; ++n)
          mma_bf16(far_q[j].x[n], a_q, b[2 * n], b[2 * n + 1]), mma_bf16(far_k[j].x[n], a_k, b[2 * n], b[2 * n + 1]);
      }
    }
  }
  __syncwarp();  // the rows are read: L, A_qk and X take their place

  float strength[2];  // beta of the two rows a lane holds
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = warp * kBlock + square_row(2 * i, lane);
    strength[i] = betas[row] * (L2NORM ? 1.0f : norms[1][row]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = square_row(r, lane), j = square_column(n, r, lane);
      const float step = -strength[r / 2] * (L2NORM ? 1.0f : norms[1][warp * kBlock + i]);
      near_q.x[n][r] = j <= i ? near_q.x[n][r] : 0.0f;
      near_k.x[n][r] = j < i ? step * near_k.x[n][r] : 0.0f;
#pragma unroll
      for (int m = 0; m < 3; ++m) far_k[m].x[n][r] *= step;
    }
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (j >= warp) continue;
    store_square(own + kL + j * kBlock * 2, kPitch, far_k[j], lane);
    store_square(own + kA + j * kBlock * 2, kPitch, far_q[j], lane);
  }
  store_square(own + kA + warp * kBlock * 2, kPitch, near_q, lane);
  const Square inverse = unit_lower_inverse(near_k, lane);
  store_square(own + kX, kPitchX, inverse, lane);
  __syncthreads();

  // A operands: blocks (warp + d, warp) of X, transposed, as halves, and as the sum of two bfloat16 beside bfloat16 tails.
  uint32_t solved[4][4], coarse[4][4], fine[4][4];
  {
    Square rest;
    uint32_t a[4];
    half_operand(a, inverse);
    solved[0][0] = transposed(a[0]), solved[0][1] = transposed(a[2]), solved[0][2] = transposed(a[1]), solved[0][3] = transposed(a[3]);
    split_operand(a, rest, inverse);
    coarse[0][0] = transposed(a[0]), coarse[0][1] = transposed(a[2]), coarse[0][2] = transposed(a[1]), coarse[0][3] = transposed(a[3]);
    split_operand(a, rest, rest);
    fine[0][0] = transposed(a[0]), fine[0][1] = transposed(a[2]), fine[0][2] = transposed(a[1]), fine[0][3] = transposed(a[3]);
  }
#pragma unroll
  for (int d = 1; d < 4; ++d) {
    if (warp + d >= 4) continue;
    const uint32_t below = smem + (warp + d) * kWarpBytes;
    Square acc = {}, next = {}, rest;
#pragma unroll
    for (int e = 0; e < d; ++e) multiply_transposed(acc, solved[e], below + kL + (warp + e) * kBlock * 2, kPitch, lane);
    uint32_t a[4];
    half_operand(a, acc);
    multiply_transposed(next, a, below + kX, kPitchX, lane);
    half_operand(solved[d], next);
    split_operand(coarse[d], rest, next);
    split_operand(fine[d], rest, rest);
  }

  const uint32_t stage_a = own + kStageA, stage_k = own + kColumns;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // A_solved^T [16 tokens of this block, 64]
    Square acc = {};
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (warp + e <= i) multiply_transposed(acc, solved[e], smem + i * kWarpBytes + kA + (warp + e) * kBlock * 2, kPitch, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = square_row(2 * half, lane), column = i * kBlock + square_column(n, 0, lane);
        const float f = strength[half] * p.scale;
        const float f0 = L2NORM ? f : f * norms[0][column], f1 = L2NORM ? f : f * norms[0][column + 1];
        store_shared(stage_a + row * 128 + (((2 * i + n) ^ (row & 7)) << 4) + (lane % 4) * 4,
                     pack_bf16(acc.x[n][2 * half] * f0, acc.x[n][2 * half + 1] * f1));
      }
  }

  float acc[kHead / 8][4] = {};  // k_solved [16 tokens of this block, 128]: blocks from the nearest to the farthest, decayed on the way
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    if (warp + d >= 4) continue;
    const uint32_t tile = smem + kTails + (warp + d) * kTile + row_fragment(lane);
#pragma unroll
    for (int s = 0; s < kHead / 16; ++s) {
      if (d > 0) {
        const float* f = totals[warp + d] + 16 * s + 2 * (lane % 4);
        const float2 f0 = *reinterpret_cast<const float2*>(f), f1 = *reinterpret_cast<const float2*>(f + 8);
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[2 * s][r] *= r % 2 ? f0.y : f0.x, acc[2 * s + 1][r] *= r % 2 ? f1.y : f1.x;
      }
      uint32_t b[4];
      load_matrices_transposed(b, tile ^ (s << 5));
      mma_bf16(acc[2 * s], coarse[d], b[0], b[1]), mma_bf16(acc[2 * s + 1], coarse[d], b[2], b[3]);
      mma_bf16(acc[2 * s], fine[d], b[0], b[1]), mma_bf16(acc[2 * s + 1], fine[d], b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < kHead / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = square_row(2 * half, lane);
      store_shared(stage_k + (n / 8) * 2048 + row * 128 + (((n & 7) ^ (row & 7)) << 4) + (lane % 4) * 4,
                   pack_bf16(acc[n][2 * half] * strength[half], acc[n][2 * half + 1] * strength[half]));
    }
  fence_async();
  __syncwarp();
  if (lane == 0) {
    bulk_store(record + kASolved + warp * 2048, stage_a, 2048);
    bulk_store(record + kKSolved + warp * 2048, stage_k, 2048);
    bulk_store(record + kKSolved + 8192 + warp * 2048, stage_k + 2048, 2048);
    bulk_store_wait();
  }
}

namespace {

template <Gate GATE, bool SAFE, bool G32, bool L2NORM>
cudaError_t launch(const HopperForward& p, unsigned blocks, cudaStream_t stream) {
  const auto kernel = prepare_kernel<GATE, SAFE, G32, L2NORM>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  kernel<<<blocks, 128, kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

template <Gate GATE, bool SAFE, bool G32>
cudaError_t with_norm(const HopperForward& p, unsigned blocks, cudaStream_t stream) {
  return p.l2norm ? launch<GATE, SAFE, G32, true>(p, blocks, stream) : launch<GATE, SAFE, G32, false>(p, blocks, stream);
}
template <Gate GATE, bool SAFE>
cudaError_t with_dtype(const HopperForward& p, unsigned blocks, cudaStream_t stream) {
  return p.gate_float32 ? with_norm<GATE, SAFE, true>(p, blocks, stream) : with_norm<GATE, SAFE, false>(p, blocks, stream);
}

}  // namespace

cudaError_t launch_prepare(const HopperForward& p, int64_t slots, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(slots * p.HV);
  switch (p.gate) {
    case Gate::bounded: return with_dtype<Gate::bounded, true>(p, blocks, stream);
    case Gate::softplus: return with_dtype<Gate::softplus, false>(p, blocks, stream);
    case Gate::log_decay:
      return p.safe ? with_dtype<Gate::log_decay, true>(p, blocks, stream) : with_dtype<Gate::log_decay, false>(p, blocks, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace kdakit
