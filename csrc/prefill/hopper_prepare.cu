// Stage intra: everything of a chunk that needs no state. One block of eight warps per chunk and value head.
//
// With d(j, i) the product of the decays of tokens j+1 .. i:
//
//   k_in = k d(start, i)        q_decayed = scale q d(start, i)        k_decayed = k d(i, end)        decay = d(start, end)
//   A_qk[i,j] = q_i . (k_j d(j, i)),  j <= i        A_kk[i,j] = beta_i k_i . (k_j d(j, i)),  j < i        X = (I + A_kk)^-1
//   k_solved = Diag(beta) X^T k_decayed        A_solved^T = scale Diag(beta) X^T A_qk^T
//
// A warp owns eight tokens, and each of its lanes four channels, while decays are formed: sums over tokens stay in registers. A pair of warps
// then owns a block of 16 tokens: row block b of A_kk (even warp) and A_qk (odd warp), afterwards column block b of X, half the channels
// each. The second is long where the first is short, and pairs wait for each other only three times.
//
// No decay is a difference of sums that could cancel. Off the diagonal, rows are decayed from the start of their own block and columns up
// to there: both factors <= 1. On it, blocks of 16 tokens refer to their start where the gate is bounded; else `unbounded_diagonal`.
// Keys and queries are normalised throughout. Where the caller does not want that, they are divided by the power of two above their norm,
// which rounds nothing: X of such keys and beta |k|^2 is similar to the one asked for, and the powers go to the edges.
#include "hopper.h"
#include "hopper_square.cuh"
#include "hopper_tokens.cuh"

namespace kda::hopper {
namespace {

constexpr int kWarps = kChunk / kTokens;
constexpr uint32_t kGridRows = 32768;  // slots along the grid's second axis
constexpr float kFloor = -40.0f;  // log2-decays below are raised to it: far under float32's resolution, and three of them fit bfloat16

// Shared memory: four tiles, a block each, of q rows, k rows, columns and tails, and the float arrays.
constexpr int kRowsQ = 0, kRowsK = 4 * kTile, kColumns = 8 * kTile, kTails = 12 * kTile, kSums = 16 * kTile;
constexpr int kTotals = kSums + kWarps * kHead * 4, kBetas = kTotals + 4 * kHead * 4;
constexpr int kNorms = kBetas + kChunk * 4, kBetween = kNorms + 3 * kChunk * 4;
constexpr int kSharedBytes = kBetween + 3 * kHead * 2;
// Once A is done: halves of -A_kk and X over the k rows, of A_qk over the q rows; A_solved^T and k_solved on their way out.
constexpr int kPitch = (kChunk + 8) * 2, kPitchX = (kBlock + 8) * 2, kX = kBlock * kPitch;
constexpr int kStageA = kX + kBlock * kPitchX, kStageK = kColumns;  // from a block's k rows on, from its columns on
static_assert(kX + kBlock * kPitchX + 1024 <= kTile && kBlock * kPitch + 1024 <= kTile, "half of A_solved^T fits beside A_kk and X, half beside A_qk");

struct Place {
  uint32_t smem;
  int lane, warp, block, odd;  // odd: of the pair
};

struct Shared {  // the float arrays
  float (&sums)[kWarps][kHead];  // log2-decay of each warp's tokens
  float (&totals)[4][kHead];     // decay of each block
  float (&betas)[kChunk];
  float (&norms)[3][kChunk];  // those taken from q and k where the caller keeps them; q . k of what is left
  uint2 (&between)[3][kHead / 4];  // float16 decay over block 1, block 2, both
};

__device__ __forceinline__ void pair_barrier(int block) { asm volatile("bar.sync %0, 64;" ::"r"(block + 1) : "memory"); }

// Fragment addresses in a block's tile: 16 rows as an A operand, 16 rows as the columns of a B operand; k-step s is at address ^ (s << 5).
__device__ __forceinline__ uint32_t row_fragment(int lane) { return (lane & 15) * 256 + (((lane >> 4) ^ (lane & 7)) << 4); }
__device__ __forceinline__ uint32_t column_fragment(int lane) {
  return ((lane & 7) + ((lane >> 4) << 3)) * 256 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
}

// The diagonal block for any gate: groups of four tokens with one-sided factors, which the floor keeps finite, then two levels at which
// both factors are <= 1: groups of four beside each other, halves of eight.
__device__ __forceinline__ void unbounded_diagonal(Inputs<false>& x, const Place& at, Square& acc) {
  const uint32_t tile = at.smem + at.block * kTile, own = tile + at.odd * kTokens * 256;
  const LevelWriter w{x, own + kRowsQ, own + kRowsK, own + kColumns, at.lane};
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    if (level == 0)
      w.rows<true>(0, 4), w.grown(0, 4), w.rows<true>(4, 8), w.grown(4, 8);
    else if (level == 1)
      w.tails(0, 4), w.rows<false>(4, 8);
    else if (at.odd)
      w.rows<false>(0, 8);
    else
      w.tails(0, 8);
    forget_products(x);
    pair_barrier(at.block);
    Square fresh = {};
    const uint32_t rows = tile + (at.odd ? kRowsQ : kRowsK) + row_fragment(at.lane), columns = tile + kColumns + column_fragment(at.lane);
#pragma unroll
    for (int s = 0; s < kHead / 16; ++s) {
      uint32_t a[4], b[4];
      load_matrices(a, rows ^ (s << 5)), load_matrices(b, columns ^ (s << 5));
      if (level == 0)
        mma_bf16(fresh.x[0], a, b[0], b[1]), mma_bf16(fresh.x[1], a, b[2], b[3]);
      else
        mma_half(fresh.x[0], a, b[0], b[1]), mma_half(fresh.x[1], a, b[2], b[3]);
    }
    take(acc, fresh, level == 0 ? 0 : 2 << level, 4 << level, at.lane);
    pair_barrier(at.block);
  }
}

// Adds the log2-decays of warps first .. last - 1, for a lane's four channels.
__device__ __forceinline__ void add_sums(float (&sum)[4], const Shared& shared, int first, int last, int lane) {
#pragma unroll 1
  for (int m = first; m < last; ++m) {
    const float4 z = *reinterpret_cast<const float4*>(&shared.sums[m][4 * lane]);
    sum[0] += z.x, sum[1] += z.y, sum[2] += z.z, sum[3] += z.w;
  }
}
__device__ __forceinline__ void exponentials(float (&y)[4], const float (&sum)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) y[c] = exp2_fast(sum[c]);
}

// Decayed tiles of this warp's tokens; k_in, q_decayed and the decay go to the record. Rows meet columns that have grown where SAFE, and are
// bfloat16 there; tails, which cannot exceed 1, are float16.
template <bool SAFE, bool L2NORM>
__device__ __forceinline__ void decay_tokens(const HopperForward& p, Inputs<SAFE>& x, const Shared& shared, const Place& at, uint8_t* record) {
  const int lane = at.lane, first = 2 * at.block;
  float before[4] = {}, before_q[4], total[4] = {}, sum[4] = {}, rest[4] = {};
  add_sums(sum, shared, first, first + at.odd, lane), add_sums(rest, shared, at.warp + 1, first + 2, lane);
  add_sums(before, shared, 0, first, lane), add_sums(total, shared, first, first + 2, lane);
  if (at.warp == 0) {
    float all[4] = {};
    add_sums(all, shared, 0, kWarps, lane), exponentials(all, all);
    *reinterpret_cast<float4*>(record + kRecordDecay + 16 * lane) = make_float4(all[0], all[1], all[2], all[3]);
  }
  if (at.warp == 2) {
    float both[4] = {};
    add_sums(both, shared, 2, 6, lane), exponentials(both, both);
    shared.between[2][lane] = packed_half(both);
  }
  exponentials(before, before), exponentials(total, total);
  if (at.warp == 2 || at.warp == 4) shared.between[at.block - 1][lane] = packed_half(total);
#pragma unroll
  for (int c = 0; c < 4; ++c) before_q[c] = before[c] * p.scale;
  if (!at.odd) *reinterpret_cast<float4*>(&shared.totals[at.block][4 * lane]) = make_float4(total[0], total[1], total[2], total[3]);
  const uint32_t own = at.smem + at.block * kTile + at.odd * kTokens * 256, row = at.warp * kTokens * 128;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    float e[4], y[4], z[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] += x.g[t][c], e[c] = exp2_fast(sum[c]);
    const uint32_t offset = lane_offset(t, lane), out = row + record_offset(t, lane);
    const float inverse_q = x.norm_q(t), inverse_k = x.norm_k(t);
    scaled(y, x.q[t], inverse_q), multiply(y, e);
    store_shared(own + kRowsQ + offset, SAFE ? packed(y) : packed_half(y));
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] *= L2NORM ? before_q[c] : before_q[c] * __frcp_rn(inverse_q);
    *reinterpret_cast<uint2*>(record + (kQDecayed + out)) = packed(y);
    scaled(z, x.k[t], inverse_k);
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] = z[c] * e[c];
    store_shared(own + kRowsK + offset, SAFE ? packed(y) : packed_half(y));
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] *= L2NORM ? before[c] : before[c] * __frcp_rn(inverse_k);
    *reinterpret_cast<uint2*>(record + (kKIn + out)) = packed(y);
    if (SAFE) {
#pragma unroll
      for (int c = 0; c < 4; ++c) z[c] *= exp2_fast(-sum[c]);
      store_shared(own + kColumns + offset, packed(z));
      multiply(z, total);
      store_shared(own + kTails + offset, packed_half(z));
    }
  }
  if (!SAFE) {
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
      float z[4];
      scaled(z, x.k[t], x.norm_k(t));
#pragma unroll
      for (int c = 0; c < 4; ++c) z[c] *= exp2_fast(rest[c]), rest[c] += x.g[t][c];
      store_shared(own + kTails + lane_offset(t, lane), packed_half(z));
    }
  }
}

// Row block of A_kk (even warps) or A_qk (odd): the diagonal block where SAFE, and blocks j < block.
template <bool SAFE>
__device__ __forceinline__ void block_rows(const Place& at, Square& near, Square (&far)[3]) {
  constexpr int kSteps = kHead / 16;
  const uint32_t tile = at.smem + at.block * kTile, fragment = column_fragment(at.lane);
  const uint32_t rows = tile + (at.odd ? kRowsQ : kRowsK) + row_fragment(at.lane);
  uint32_t a[kSteps][4], b[4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    load_matrices(a[s], rows ^ (s << 5));
    if (!SAFE) continue;
    load_matrices(b, (tile + kColumns + fragment) ^ (s << 5));
    mma_bf16(near.x[0], a[s], b[0], b[1]), mma_bf16(near.x[1], a[s], b[2], b[3]);
  }
  if (SAFE && at.block > 0) {  // the rows as halves, as the tails are
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[s][i] = pack_half(low(a[s][i]), high(a[s][i]));
  }
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (j >= at.block) continue;
    const uint32_t columns = at.smem + kTails + j * kTile + fragment;
    if (j == at.block - 1) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        load_matrices(b, columns ^ (s << 5));
        mma_half(far[j].x[0], a[s], b[0], b[1]), mma_half(far[j].x[1], a[s], b[2], b[3]);
      }
    } else {  // columns end with block j: decay them over the blocks between
      const uint32_t factors = at.smem + kBetween + (j == 1 ? 1 : at.block == 2 ? 0 : 2) * kHead * 2 + at.lane % 4 * 4;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t f0 = load_shared_word(factors + s * 32), f1 = load_shared_word(factors + s * 32 + 16);
        load_matrices(b, columns ^ (s << 5));
        mma_half(far[j].x[0], a[s], multiply_half(b[0], f0), multiply_half(b[1], f1));
        mma_half(far[j].x[1], a[s], multiply_half(b[2], f0), multiply_half(b[3], f1));
      }
    }
  }
  __syncwarp();  // the rows are read: squares take their place
}

// Inputs that come without norms in the kernel are exact, and scaling them by powers of two keeps them so.
template <bool STAGED>
__device__ __forceinline__ void keep_norms(Inputs<STAGED>& x, const Shared& shared, int warp, int lane) {
  x.inverse_norm = __uint_as_float(__float_as_uint(x.inverse_norm) & 0x7f800000u);
  if (lane % 2 == 0) shared.norms[lane / 16][warp * kTokens + lane / 2 % kTokens] = 1.0f / x.inverse_norm;
}

// The diagonal of A_qk in float32: where gates are strong it is most of the output.
template <bool STAGED>
__device__ __forceinline__ void exact_diagonal(const Inputs<STAGED>& x, const Shared& shared, int warp, int lane) {
  const int t = lane / 4;
  const float dot = find_dots(x, lane) * x.norm_q(t) * x.norm_k(t);
  if (lane % 4 == t / 2) shared.norms[2][warp * kTokens + t] = dot;
}

// The pair's squares to shared memory, as halves: -A_kk with its block's inverse, A_qk.
template <bool SAFE, bool L2NORM>
__device__ __forceinline__ void store_rows(const Place& at, const Shared& shared, Square& near, Square (&far)[3]) {
  const int lane = at.lane;
  const uint32_t to = at.smem + at.block * kTile + (at.odd ? kRowsQ : kRowsK);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = square_row(r, lane), j = square_column(n, r, lane), row = at.block * kBlock + i;
      const float norm = L2NORM ? 1.0f : shared.norms[1][row];
      const float factor = at.odd ? 1.0f : -shared.betas[row] * norm * norm;
      near.x[n][r] = j < i ? factor * near.x[n][r] : 0.0f;
      if (at.odd && j == i) near.x[n][r] = shared.norms[2][row];
#pragma unroll
      for (int m = 0; m < 3; ++m) far[m].x[n][r] *= factor;
    }
#pragma unroll
  for (int j = 0; j < 3; ++j)
    if (j < at.block) store_square(to + j * kBlock * 2, kPitch, far[j], lane);
  if (at.odd)
    store_square(to + at.block * kBlock * 2, kPitch, near, lane);
  else
    store_square(to + kX, kPitchX, unit_lower_inverse(near, lane), lane);
}

// A operands: the blocks (block + d, block) of X, transposed, as halves.
__device__ __forceinline__ void solve_columns(const Place& at, uint32_t (&solved)[4][4]) {
  const uint32_t k_rows = at.smem + kRowsK;
  load_matrices_transposed(solved[0], k_rows + at.block * kTile + kX + ((at.lane & 7) + ((at.lane >> 4) << 3)) * kPitchX +
                                          ((at.lane >> 3) & 1) * 16);
#pragma unroll
  for (int d = 1; d < 4; ++d) {
    if (at.block + d >= 4) continue;
    const uint32_t below = k_rows + (at.block + d) * kTile;
    Square acc = {}, next = {};
#pragma unroll
    for (int e = 0; e < d; ++e) multiply_transposed(acc, solved[e], below + (at.block + e) * kBlock * 2, kPitch, at.lane);
    uint32_t a[4];
    half_operand(a, acc);
    multiply_transposed(next, a, below + kX, kPitchX, at.lane);
    half_operand(solved[d], next);
  }
}

// Rows of A_solved^T of this block, every second column block per warp, staged for the record: those at and right of the diagonal.
template <bool L2NORM>
__device__ __forceinline__ void square_out(const HopperForward& p, const Place& at, const Shared& shared, const uint32_t (&solved)[4][4],
                                           const float (&strength)[2]) {
  const int lane = at.lane;
  const uint32_t tile = at.smem + at.block * kTile;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const int i = at.block + d;
    if (i >= 4 || i % 2 != at.odd) continue;
    const uint32_t to = tile + (d < 2 ? kRowsK : kRowsQ) + kStageA + d % 2 * kSquare;
    Square acc = {};
#pragma unroll
    for (int e = 0; e <= d; ++e) multiply_transposed(acc, solved[e], tile + kRowsQ + d * kTile + (at.block + e) * kBlock * 2, kPitch, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = square_row(2 * half, lane), column = i * kBlock + square_column(n, 0, lane);
        const float f = strength[half] * p.scale;
        const float f0 = L2NORM ? f : f * shared.norms[0][column], f1 = L2NORM ? f : f * shared.norms[0][column + 1];
        store_shared(to + row * 32 + ((n ^ (row >> 2 & 1)) << 4) + (lane % 4) * 4,
                     pack_bf16(acc.x[n][2 * half] * f0, acc.x[n][2 * half + 1] * f1));
      }
  }
}

// Rows of k_solved of this block, 64 channels per warp: blocks from the nearest to the farthest, decayed on the way.
__device__ __forceinline__ void keys_out(const Place& at, const Shared& shared, const uint32_t (&solved)[4][4], const float (&strength)[2]) {
  const int lane = at.lane;
  float acc[8][4] = {};
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    if (at.block + d >= 4) continue;
    const uint32_t tile = at.smem + kTails + (at.block + d) * kTile + (row_fragment(lane) ^ (at.odd << 7));
    const float* factors = &shared.totals[at.block + d][64 * at.odd + 2 * (lane % 4)];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if (d > 0) {
        const float2 f0 = *reinterpret_cast<const float2*>(factors + 16 * s), f1 = *reinterpret_cast<const float2*>(factors + 16 * s + 8);
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[2 * s][r] *= r % 2 ? f0.y : f0.x, acc[2 * s + 1][r] *= r % 2 ? f1.y : f1.x;
      }
      uint32_t b[4];
      load_matrices_transposed(b, tile ^ (s << 5));
      mma_half(acc[2 * s], solved[d], b[0], b[1]), mma_half(acc[2 * s + 1], solved[d], b[2], b[3]);
    }
  }
  const uint32_t stage = at.smem + kStageK + at.block * kTile + at.odd * 2048;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = square_row(2 * half, lane);
      store_shared(stage + row * 128 + ((n ^ (row & 7)) << 4) + (lane % 4) * 4,
                   pack_bf16(acc[n][2 * half] * strength[half], acc[n][2 * half + 1] * strength[half]));
    }
}

template <Gate GATE, bool SAFE, bool G32, bool L2NORM>
__global__ void __launch_bounds__(kWarps * 32, SAFE ? 3 : 2) prepare_kernel(const __grid_constant__ HopperForward p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const Place at{shared_address(bytes), lane, warp, warp / 2, warp % 2};
  const Shared shared{*reinterpret_cast<float(*)[kWarps][kHead]>(bytes + kSums), *reinterpret_cast<float(*)[4][kHead]>(bytes + kTotals),
                      *reinterpret_cast<float(*)[kChunk]>(bytes + kBetas), *reinterpret_cast<float(*)[3][kChunk]>(bytes + kNorms),
                      *reinterpret_cast<uint2(*)[3][kHead / 4]>(bytes + kBetween)};
  let_next_kernel_start();
  // Last chunks first: the scan starts with the first ones, which are then still in the cache.
  const uint32_t slot = (gridDim.z - 1 - blockIdx.z) * kGridRows + gridDim.y - 1 - blockIdx.y;
  const int head = blockIdx.x;
  const Span span = chunk_span(p, slot, lane);
  if (span.length <= 0) return;
  uint8_t* record = static_cast<uint8_t*>(p.workspace) + (slot * p.HV + head) * kRecordBytes;

  Inputs<SAFE> x;
  const uint32_t own = at.smem + at.block * kTile + at.odd * kTokens * 256;
  load_tokens<GATE, G32>(p, span, head, warp, lane, own + kRowsQ, own + kRowsK, x);
  if (lane < kTokens) {
    const int row = warp * kTokens + lane;
    const int64_t from = span.batch * p.beta_strides.batch + (span.first + row) * p.beta_strides.token + head * p.beta_strides.head;
    shared.betas[row] = row < span.length ? write_strength(p, from) : 0.0f;
  }
  if (!L2NORM) keep_norms(x, shared, warp, lane);
  exact_diagonal(x, shared, warp, lane);
  float sum[4] = {};
#pragma unroll
  for (int t = 0; t < kTokens; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (!SAFE) x.g[t][c] = fmaxf(x.g[t][c], kFloor);
      sum[c] += x.g[t][c];
    }
  *reinterpret_cast<float4*>(&shared.sums[warp][4 * lane]) = make_float4(sum[0], sum[1], sum[2], sum[3]);
  __syncthreads();

  Square near = {}, far[3] = {};
  if constexpr (!SAFE) unbounded_diagonal(x, at, near);
  decay_tokens<SAFE, L2NORM>(p, x, shared, at, record);
  __syncthreads();
  block_rows<SAFE>(at, near, far);
  store_rows<SAFE, L2NORM>(at, shared, near, far);
  __syncthreads();

  uint32_t solved[4][4];
  solve_columns(at, solved);
  float strength[2];  // of the two rows a lane holds
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = at.block * kBlock + square_row(2 * i, lane);
    strength[i] = shared.betas[row] * (L2NORM ? 1.0f : shared.norms[1][row]);
  }
  square_out<L2NORM>(p, at, shared, solved, strength);
  keys_out(at, shared, solved, strength);
  fence_async();
  pair_barrier(at.block);
  if (lane == 0) {
    const int out = at.block * 2048, half = at.odd * 8192;
    bulk_store(record + kKSolved + half + out, at.smem + kStageK + at.block * kTile + at.odd * 2048, 2048);
    const uint32_t squares = at.smem + at.block * kTile + (at.odd ? kRowsQ : kRowsK) + kStageA;
#pragma unroll
    for (int d = 0; d < 2; ++d)
      if (at.block + 2 * at.odd + d < 4) bulk_store(record + first_square(at.block) + (2 * at.odd + d) * kSquare, squares + d * kSquare, kSquare);
    bulk_store_wait();
  }
}

template <Gate GATE, bool SAFE, bool G32, bool L2NORM>
cudaError_t launch(const HopperForward& p, dim3 blocks, cudaStream_t stream) {
  const auto kernel = prepare_kernel<GATE, SAFE, G32, L2NORM>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  kernel<<<blocks, kWarps * 32, kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

template <Gate GATE, bool SAFE, bool G32>
cudaError_t with_norm(const HopperForward& p, dim3 blocks, cudaStream_t stream) {
  return p.l2norm ? launch<GATE, SAFE, G32, true>(p, blocks, stream) : launch<GATE, SAFE, G32, false>(p, blocks, stream);
}
template <Gate GATE, bool SAFE>
cudaError_t with_dtype(const HopperForward& p, dim3 blocks, cudaStream_t stream) {
  return p.gate_float32 ? with_norm<GATE, SAFE, true>(p, blocks, stream) : with_norm<GATE, SAFE, false>(p, blocks, stream);
}

}  // namespace

cudaError_t launch_prepare(const HopperForward& p, int64_t slots, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(slots);
  const dim3 blocks(static_cast<unsigned>(p.HV), rows < kGridRows ? rows : kGridRows, (rows + kGridRows - 1) / kGridRows);
  switch (p.gate) {
    case Gate::bounded: return with_dtype<Gate::bounded, true>(p, blocks, stream);
    case Gate::softplus: return with_dtype<Gate::softplus, false>(p, blocks, stream);
    case Gate::log_decay:
      return p.safe ? with_dtype<Gate::log_decay, true>(p, blocks, stream) : with_dtype<Gate::log_decay, false>(p, blocks, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace kda::hopper
