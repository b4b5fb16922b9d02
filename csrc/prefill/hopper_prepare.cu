// Stage intra: everything of a chunk that needs no state. One block of eight warps per chunk and value head.
//
// With d(j, i) the product of the decays of tokens j+1 .. i:
//
//   k_in = k d(start, i)        q_decayed = scale q d(start, i)        k_decayed = k d(i, end)        decay = d(start, end)
//   A_qk[i,j] = q_i . (k_j d(j, i)),  j <= i        A_kk[i,j] = beta_i k_i . (k_j d(j, i)),  j < i        X = (I + A_kk)^-1
//   k_solved = Diag(beta) X^T k_decayed        A_solved^T = scale Diag(beta) X^T A_qk^T
//
// A warp owns eight tokens, and each of its lanes four channels, while decays are formed: sums over tokens stay in registers. A pair of
// warps then owns a block of 16 tokens: row block b of A_kk (even warp) and A_qk (odd warp), afterwards column block b of X, half the
// channels each. The second is long where the first is short, and pairs wait for each other only three times.
//
// Off the diagonal, rows are decayed from the start of their own block and columns up to there: both factors <= 1. On it, where the gate is
// bounded, rows and columns of 16 tokens refer to their start. For any gate a warp's eight tokens are a group with a reference of its own,
// the whole number m nearest to the log2-decay s at its middle: rows 2^(s - m), columns 2^(m - s). Gates are raised to kFloor, so that both
// stay within 2^117. Pairs of one group meet as they are. Rows of a block's second group meet columns of its first after both are moved to
// the whole number x nearest to the boundary between them, by powers of two: that rounds nothing, and only pairs that vanish can underflow.
// Keys and queries are normalised throughout. Where the caller does not want that, they are divided by the power of two above their norm,
// which rounds nothing: X of such keys and beta |k|^2 is similar to the one asked for, and the powers go to the edges.
#include "hopper.h"
#include "hopper_square.cuh"
#include "hopper_tokens.cuh"

namespace kda::hopper {
namespace {

constexpr int kWarps = kChunk / kTokens;
constexpr uint32_t kGridRows = 32768;  // slots along the grid's second axis
constexpr float kFloor = -29.0f;  // log2-decays below are raised to it: under float32's resolution, and four of them fit bfloat16

// Shared memory: four tiles, a block each, of q rows, k rows, columns and tails, and the float arrays.
constexpr int kRowsQ = 0, kRowsK = 4 * kTile, kColumns = 8 * kTile, kTails = 12 * kTile, kSums = 16 * kTile;
constexpr int kTotals = kSums + kWarps * kHead * 4, kBetas = kTotals + 3 * kHead * 4;
constexpr int kNorms = kBetas + kChunk * 4, kBetween = kNorms + 3 * kChunk * 4;
// Powers of two per pair of channels, two words: to the boundary (first group's columns, second group's rows) of four blocks, then to the
// block's start (rows of either group, the second from the boundary) of blocks 1 to 3.
constexpr int kToBoundary = kBetween + 3 * kHead * 2, kToStart = kToBoundary + 4 * kHead * 4;
constexpr int shared_bytes(bool bounded) { return bounded ? kToBoundary : kToStart + 3 * kHead * 4; }
static_assert(3 * (shared_bytes(false) + 1024) <= 228 * 1024, "three blocks on a multiprocessor");
// Once A is done: halves of -A_kk and X over the k rows, of A_qk over the q rows; A_solved^T and k_solved on their way out.
constexpr int kPitch = (kChunk + 8) * 2, kPitchX = (kBlock + 8) * 2, kX = kBlock * kPitch;
constexpr int kStageA = kX + kBlock * kPitchX, kStageK = kColumns;  // from a block's k rows on, from its columns on
static_assert(kX + kBlock * kPitchX + 1024 <= kTile && kBlock * kPitch + 1024 <= kTile,
              "half of A_solved^T fits beside A_kk and X, half beside A_qk");

struct Place {
  uint32_t smem;
  int lane, warp, block, odd;  // odd: of the pair
};

struct Shared {  // the float arrays
  float (&sums)[kWarps][kHead];  // log2-decay of each warp's tokens
  float (&totals)[3][kHead];     // decay of each block but the first
  float (&betas)[kChunk];
  float (&norms)[3][kChunk];  // those taken from q and k where the caller keeps them; q . k of what is left
  uint2 (&between)[3][kHead / 4];  // float16 decay over block 1, block 2, both
};

__device__ __forceinline__ void pair_barrier(int block) { named_barrier(block + 1, 64); }

// Fragment addresses in a block's tile: 16 rows as an A operand, 16 rows as the columns of a B operand; k-step s is at address ^ (s << 5).
__device__ __forceinline__ uint32_t row_fragment(int lane) { return (lane & 15) * 256 + (((lane >> 4) ^ (lane & 7)) << 4); }
__device__ __forceinline__ uint32_t column_fragment(int lane) {
  return ((lane & 7) + ((lane >> 4) << 3)) * 256 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
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

// Two words of a lane's four channels, every second word of a table.
__device__ __forceinline__ void store_powers(uint32_t table, int which, int lane, const float (&exponent)[4]) {
  float y[4];
  exponentials(y, exponent);
  const uint2 words = packed(y);
  store_shared(table + lane * 16 + which * 4, words.x), store_shared(table + lane * 16 + 8 + which * 4, words.y);
}

// The group's reference m: `sum`, the log2-decay before the group's first token, becomes sum - m, and `before` that of the chunk up to m.
// Writes the powers of two that move the group's tiles.
__device__ __forceinline__ void refer(const Inputs& x, const Shared& shared, const Place& at, float (&sum)[4], float (&before)[4]) {
  float boundary[4] = {}, to_boundary[4], to_start[4];
  add_sums(boundary, shared, 2 * at.block, 2 * at.block + 1, at.lane);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float whole = rintf(boundary[c]);
    if (at.odd) sum[c] = boundary[c] - whole, before[c] += whole;  // from the whole number at the boundary on
    const float m = rintf(sum[c] + ((x.g[0][c] + x.g[1][c]) + (x.g[2][c] + x.g[3][c])));
    sum[c] -= m, before[c] += m;
    to_boundary[c] = at.odd ? m : whole - m, to_start[c] = at.odd ? whole : m;
  }
  store_powers(at.smem + kToBoundary + at.block * kHead * 4, at.odd, at.lane, to_boundary);
  if (at.block > 0) store_powers(at.smem + kToStart + (at.block - 1) * kHead * 4, at.odd, at.lane, to_start);
}

// Decayed tiles of this warp's tokens; k_in, q_decayed and the decay go to the record. Rows meet columns that have grown, and are bfloat16;
// tails, which cannot exceed 1, are float16.
template <bool BOUNDED, bool L2NORM>
__device__ __forceinline__ void decay_tokens(const HopperForward& p, Inputs& x, const Shared& shared, const Place& at, uint8_t* record) {
  const int lane = at.lane, first = 2 * at.block;
  float before[4] = {}, before_q[4], total[4] = {}, sum[4] = {}, tail[4];
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
  if (BOUNDED) {
    add_sums(sum, shared, first, first + at.odd, lane);
  } else {
    refer(x, shared, at, sum, before);
#pragma unroll
    for (int c = 0; c < 4; ++c) tail[c] = sum[c];
    add_sums(tail, shared, at.warp, first + 2, lane);
#pragma unroll
    for (int c = 0; c < 4; ++c) tail[c] = exp2_fast(0.5f * tail[c]);  // twice: a column may have grown by more than the whole has decayed
  }
  exponentials(before, before), exponentials(total, total);
  if (at.warp == 2 || at.warp == 4) shared.between[at.block - 1][lane] = packed_half(total);
#pragma unroll
  for (int c = 0; c < 4; ++c) before_q[c] = before[c] * p.scale;
  if (!at.odd && at.block > 0)
    *reinterpret_cast<float4*>(&shared.totals[at.block - 1][4 * lane]) = make_float4(total[0], total[1], total[2], total[3]);
  const uint32_t own = at.smem + at.block * kTile + at.odd * kTokens * 256, row = at.warp * kTokens * 128;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    float e[4], y[4], z[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] += x.g[t][c], e[c] = exp2_fast(sum[c]);
    const uint32_t offset = lane_offset(t, lane), out = row + record_offset(t, lane);
    const float inverse_q = x.norm_q(t), inverse_k = x.norm_k(t);
    scaled(y, x.q[t], inverse_q), multiply(y, e);
    store_shared(own + kRowsQ + offset, packed(y));
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] *= L2NORM ? before_q[c] : before_q[c] * __frcp_rn(inverse_q);
    *reinterpret_cast<uint2*>(record + (kQDecayed + out)) = packed(y);
    scaled(z, x.k[t], inverse_k);
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] = z[c] * e[c];
    store_shared(own + kRowsK + offset, packed(y));
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] *= L2NORM ? before[c] : before[c] * __frcp_rn(inverse_k);
    *reinterpret_cast<uint2*>(record + (kKIn + out)) = packed(y);
#pragma unroll
    for (int c = 0; c < 4; ++c) z[c] *= exp2_fast(-sum[c]);
    store_shared(own + kColumns + offset, packed(z));
    if (BOUNDED)
      multiply(z, total);
    else
      multiply(z, tail), multiply(z, tail);
    store_shared(own + kTails + offset, packed_half(z));
  }
}

// Pairs of the block's second group of rows with its first group of columns, both moved to the boundary. The rows stay there.
__device__ __forceinline__ void across_groups(float (&cross)[4], uint32_t (&rows)[4], uint32_t (&columns)[4], uint32_t powers) {
  const uint2 low_half = load_shared_pair(powers), high_half = load_shared_pair(powers + 32);
  columns[0] = multiply_bf16(columns[0], low_half.x), columns[1] = multiply_bf16(columns[1], high_half.x);
  rows[1] = multiply_bf16(rows[1], low_half.y), rows[3] = multiply_bf16(rows[3], high_half.y);
  mma_bf16(cross, rows, columns[0], columns[1]);
}

// Row block of A_kk (even warps) or A_qk (odd): the diagonal block and blocks j < block.
template <bool BOUNDED>
__device__ __forceinline__ void block_rows(const Place& at, Square& near, Square (&far)[3]) {
  constexpr int kSteps = kHead / 16;
  const uint32_t tile = at.smem + at.block * kTile, fragment = column_fragment(at.lane);
  const uint32_t rows = tile + (at.odd ? kRowsQ : kRowsK) + row_fragment(at.lane);
  uint32_t a[kSteps][4], b[4];
  float cross[4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    load_matrices(a[s], rows ^ (s << 5)), load_matrices(b, (tile + kColumns + fragment) ^ (s << 5));
    mma_bf16(near.x[0], a[s], b[0], b[1]), mma_bf16(near.x[1], a[s], b[2], b[3]);
    if (!BOUNDED) across_groups(cross, a[s], b, at.smem + kToBoundary + at.block * kHead * 4 + at.lane % 4 * 8 + s * 64);
  }
  if (!BOUNDED) near.x[0][2] = cross[2], near.x[0][3] = cross[3];
  if (at.block > 0) {  // the rows as halves, as the tails are
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (!BOUNDED) {
        const uint32_t powers = at.smem + kToStart + (at.block - 1) * kHead * 4 + at.lane % 4 * 8 + s * 64;
        const uint2 low_half = load_shared_pair(powers), high_half = load_shared_pair(powers + 32);
        a[s][0] = multiply_bf16(a[s][0], low_half.x), a[s][2] = multiply_bf16(a[s][2], high_half.x);
        a[s][1] = multiply_bf16(a[s][1], low_half.y), a[s][3] = multiply_bf16(a[s][3], high_half.y);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) a[s][i] = pack_half(low(a[s][i]), high(a[s][i]));
    }
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
__device__ __forceinline__ void keep_norms(Inputs& x, const Shared& shared, int warp, int lane) {
  x.inverse_norm = __uint_as_float(__float_as_uint(x.inverse_norm) & 0x7f800000u);
  if (lane % 2 == 0) shared.norms[lane / 16][warp * kTokens + lane / 2 % kTokens] = 1.0f / x.inverse_norm;
}

// The diagonal of A_qk in float32: where gates are strong it is most of the output.
__device__ __forceinline__ void exact_diagonal(const Inputs& x, const Shared& shared, int warp, int lane) {
  const int t = lane / 4;
  const float dot = x.dot * x.norm_q(t) * x.norm_k(t);
  if (lane % 4 == t / 2) shared.norms[2][warp * kTokens + t] = dot;
}

// The pair's squares to shared memory, as halves: -A_kk with its block's inverse, A_qk.
template <bool L2NORM>
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
__device__ __forceinline__ void keys_out(const Place& at, const Shared& shared, const uint32_t (&solved)[4][4],
                                         const float (&strength)[2]) {
  const int lane = at.lane;
  float acc[8][4] = {};
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    if (at.block + d >= 4) continue;
    const uint32_t tile = at.smem + kTails + (at.block + d) * kTile + (row_fragment(lane) ^ (at.odd << 7));
    const float* factors = d == 0 ? nullptr : &shared.totals[at.block + d - 1][64 * at.odd + 2 * (lane % 4)];
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

template <Gate GATE, bool BOUNDED, bool G32, bool L2NORM>
__global__ void __launch_bounds__(kWarps * 32, 3) prepare_kernel(const __grid_constant__ HopperForward p) {
#ifdef KDA_EMULATE
  uint8_t* bytes = memory;
#else
  extern __shared__ __align__(1024) uint8_t bytes[];
#endif
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const Place at{shared_address(bytes), lane, warp, warp / 2, warp % 2};
  const Shared shared{*reinterpret_cast<float(*)[kWarps][kHead]>(bytes + kSums), *reinterpret_cast<float(*)[3][kHead]>(bytes + kTotals),
                      *reinterpret_cast<float(*)[kChunk]>(bytes + kBetas), *reinterpret_cast<float(*)[3][kChunk]>(bytes + kNorms),
                      *reinterpret_cast<uint2(*)[3][kHead / 4]>(bytes + kBetween)};
  let_next_kernel_start();
  // Last chunks first: the scan starts with the first ones, which are then still in the cache.
  const uint32_t slot = (gridDim.z - 1 - blockIdx.z) * kGridRows + gridDim.y - 1 - blockIdx.y;
  const int head = blockIdx.x;
  const Span span = chunk_span(p, slot, lane);
  if (span.length <= 0) return;
  uint8_t* record = static_cast<uint8_t*>(p.workspace) + (slot * p.HV + head) * kRecordBytes;

  Inputs x;
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
      if (!BOUNDED) x.g[t][c] = max_or_nan(x.g[t][c], kFloor);
      sum[c] += x.g[t][c];
    }
  *reinterpret_cast<float4*>(&shared.sums[warp][4 * lane]) = make_float4(sum[0], sum[1], sum[2], sum[3]);
  __syncthreads();

  Square near = {}, far[3] = {};
  decay_tokens<BOUNDED, L2NORM>(p, x, shared, at, record);
  __syncthreads();
  block_rows<BOUNDED>(at, near, far);
  store_rows<L2NORM>(at, shared, near, far);
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
      if (const int column = 2 * at.odd + d; at.block + column < 4)
        bulk_store(record + first_square(at.block) + column * kSquare, squares + d * kSquare, kSquare);
    bulk_store_wait();
  }
}

#ifndef KDA_EMULATE
template <Gate GATE, bool BOUNDED, bool G32, bool L2NORM>
cudaError_t launch(const HopperForward& p, dim3 blocks, cudaStream_t stream) {
  const auto kernel = prepare_kernel<GATE, BOUNDED, G32, L2NORM>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes(BOUNDED));
  if (status != cudaSuccess) return status;
  kernel<<<blocks, kWarps * 32, shared_bytes(BOUNDED), stream>>>(p);
  return cudaGetLastError();
}

template <Gate GATE, bool BOUNDED, bool G32>
cudaError_t with_norm(const HopperForward& p, dim3 blocks, cudaStream_t stream) {
  return p.l2norm ? launch<GATE, BOUNDED, G32, true>(p, blocks, stream) : launch<GATE, BOUNDED, G32, false>(p, blocks, stream);
}
template <Gate GATE, bool BOUNDED>
cudaError_t with_dtype(const HopperForward& p, dim3 blocks, cudaStream_t stream) {
  return p.gate_float32 ? with_norm<GATE, BOUNDED, true>(p, blocks, stream) : with_norm<GATE, BOUNDED, false>(p, blocks, stream);
}

#endif
}  // namespace

#ifndef KDA_EMULATE
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
#endif

}  // namespace kda::hopper
