// Stage intra of a short chunk, 32 tokens of a value head: the formulas of hopper_prepare_chunk.cuh. A thread block of two pairs of warps,
// a pair per block of 16 tokens: a group of eight tokens each while decays are formed, then row block b of A_kk and its inverse (even) and
// of A_qk (odd), then column block b of X with half the channels of k_solved each.
#pragma once
#include "hopper_prepare_decay.cuh"
#include "hopper_prepare_pairs.cuh"
#include "hopper_short_record.h"

namespace kda::hopper {

// Shared memory: two tiles each, a block each, of q rows, k rows, columns and tails; the float arrays; for any gate powers of two that move
// pairs (hopper_prepare_decay.cuh), and those that move the second block's rows to its start. Once A is done, from a block's k rows on -A_kk
// of the block before, X and squares of A_solved^T; from its q rows on A_qk of both; over the columns k_solved.
struct ShortPlaces {
  static constexpr int tile = kBlock * 256;
  static constexpr int rows_q = 0, rows_k = 2 * tile, columns = 4 * tile, tails = 6 * tile, sums = 8 * tile;
  static constexpr int total = sums + 4 * 128 * 4, betas = total + 128 * 4, norms = betas + kShort * 4;
  static constexpr int to_boundary = norms + 3 * kShort * 4, to_start = to_boundary + 2 * 128 * 4;
  static constexpr int bytes(bool bounded) { return bounded ? to_boundary : to_start + 128 * 4; }
  static constexpr int pitch = (kBlock + 8) * 2, next = kBlock * pitch;  // of a square; bytes to the one beside it
  static constexpr int x = next, stage = 2 * 1024;                       // from the k rows on
  static constexpr int threads = 128, blocks = 6;                        // on a multiprocessor
};
static_assert(ShortPlaces::blocks * (ShortPlaces::bytes(false) + 1024) <= 228 * 1024, "");

struct ShortShared {
  float (&sums)[4][128];  // log2-decay of each group's tokens
  float (&total)[128];    // decay of the second block
  float (&betas)[kShort];
  float (&norms)[3][kShort];
};

// Decayed tiles of a group's tokens; k_in, q_decayed and the decay go to the record.
template <bool BOUNDED, bool L2NORM>
__device__ __forceinline__ void decay_group(const HopperForward& p, const Inputs<128>& x, const ShortShared& shared, const Place& at,
                                            uint8_t* record) {
  using P = ShortPlaces;
  using R = ShortRecord;
  const int lane = at.lane;
  const auto sums_of = [&](float(&y)[4], int group) {
    const float4 z = *reinterpret_cast<const float4*>(&shared.sums[group][4 * lane]);
    y[0] = z.x, y[1] = z.y, y[2] = z.z, y[3] = z.w;
  };
  float first[4], second[4], before[4] = {}, sum[4] = {}, to_end[4];  // of the block's groups; of the block before
  sums_of(first, 2 * at.block), sums_of(second, 2 * at.block + 1);
  if (at.block) {
    float more[4];
    sums_of(before, 0), sums_of(more, 1);
#pragma unroll
    for (int c = 0; c < 4; ++c) before[c] += more[c];
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) to_end[c] = first[c] + second[c];
  if (at.block && !at.odd) {
    float all[4], own[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) all[c] = before[c] + to_end[c];
    exponentials(all, all), exponentials(own, to_end);
    *reinterpret_cast<float4*>(record + R::record_decay + 16 * lane) = make_float4(all[0], all[1], all[2], all[3]);
    *reinterpret_cast<float4*>(&shared.total[4 * lane]) = make_float4(own[0], own[1], own[2], own[3]);
  }
  if (BOUNDED) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] = at.odd ? first[c] : 0.0f;
    exponentials(to_end, to_end);
  } else {
    float to_boundary[4], to_start[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float whole = rintf(first[c]);
      if (at.odd) sum[c] = first[c] - whole, before[c] += whole;  // from the whole number at the boundary on
      const float m = rintf(sum[c] + ((x.g[0][c] + x.g[1][c]) + (x.g[2][c] + x.g[3][c])));
      sum[c] -= m, before[c] += m;
      to_boundary[c] = at.odd ? m : whole - m, to_start[c] = at.odd ? whole : m;
      to_end[c] = exp2_fast(0.5f * (sum[c] + (at.odd ? second[c] : to_end[c])));  // twice: a column may have grown by more
    }
    store_powers(at.smem + P::to_boundary + at.block * 128 * 4, at.odd, lane, to_boundary);
    if (at.block) store_powers(at.smem + P::to_start, at.odd, lane, to_start);
  }
  exponentials(before, before);
  float before_q[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) before_q[c] = before[c] * p.scale;
  uint32_t own = at.smem + at.block * P::tile + at.odd * kTokens * 256 + lane_offset<128>(0, lane);
  uint64_t out = reinterpret_cast<uint64_t>(record + (lane >> 4) * R::half + at.warp * kTokens * 128 +
                                            ((lane & 15) >> 1 << 4 | (lane & 1) << 3));
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t > 0) own ^= (t ^ (t - 1)) << 4, out ^= (t ^ (t - 1)) << 4;
    KDA_HIDE_WORD(own);
    KDA_HIDE(out);
    float e[4], y[4], z[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] += x.g[t][c], e[c] = exp2_fast(sum[c]);
    const uint32_t place = own + t * 256;
    const float inverse_q = x.norm_q(t), inverse_k = x.norm_k(t);
    scaled(y, load_shared_pair(place + P::rows_q), inverse_q), multiply(y, e);
    store_shared(place + P::rows_q, packed(y));
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] *= L2NORM ? before_q[c] : before_q[c] * inverse_power(inverse_q);
    store_global(out + R::q_decayed + t * 128, packed(y));
    scaled(z, load_shared_pair(place + P::rows_k), inverse_k);
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] = z[c] * e[c];
    store_shared(place + P::rows_k, packed(y));
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] *= L2NORM ? before[c] : before[c] * inverse_power(inverse_k);
    store_global(out + R::k_in + t * 128, packed(y));
#pragma unroll
    for (int c = 0; c < 4; ++c) z[c] *= exp2_fast(-sum[c]);
    store_shared(place + P::columns, packed(z));
    multiply(z, to_end);
    if (!BOUNDED) multiply(z, to_end);
    store_shared(place + P::tails, packed_half(z));
  }
}

// Row block of A_kk (even warps) or A_qk (odd): the pairs of the block's own columns, and of the second block those with the first's tails.
template <bool BOUNDED>
__device__ __forceinline__ void short_pairs(const Place& at, Square& near, Square& far) {
  using P = ShortPlaces;
  const uint32_t rows = at.smem + at.block * P::tile + (at.odd ? P::rows_q : P::rows_k) + row_fragment<128>(at.lane);
  const uint32_t fragment = at.smem + column_fragment<128>(at.lane), columns = fragment + P::columns + at.block * P::tile;
  const uint32_t powers = at.smem + P::to_boundary + at.block * 128 * 4;
  if (!BOUNDED) pairs_of_groups(rows, columns, powers, at.lane, near);
  if (!BOUNDED && !at.block) return;
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    uint32_t a[4], b[4];
    load_matrices(a, at_step(rows, s));
    if (BOUNDED) {
      load_matrices(b, at_step(columns, s));
      mma_bf16(near.x[0], a, b[0], b[1]), mma_bf16(near.x[1], a, b[2], b[3]);
      if (!at.block) continue;
    } else {
      move_second(a, Powers(powers, at.lane, s));
      const Powers to_start(at.smem + P::to_start, at.lane, s);
      move_second(a, to_start);
      a[0] = multiply_bf16(a[0], to_start.low_half.x), a[2] = multiply_bf16(a[2], to_start.high_half.x);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pack_half(low(a[i]), high(a[i]));
    load_matrices(b, at_step(fragment + P::tails, s));
    mma_half(far.x[0], a, b[0], b[1]), mma_half(far.x[1], a, b[2], b[3]);
  }
}

// The pair's squares to shared memory, as halves: -A_kk with its block's inverse, A_qk.
template <bool L2NORM>
__device__ __forceinline__ void store_squares(const Place& at, const ShortShared& shared, Square& near, Square& far) {
  using P = ShortPlaces;
  const int lane = at.lane;
  const uint32_t to = at.smem + at.block * P::tile + (at.odd ? P::rows_q : P::rows_k);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = square_row(r, lane), j = square_column(n, r, lane), row = at.block * kBlock + i;
      const float norm = L2NORM ? 1.0f : shared.norms[1][row];
      const float factor = at.odd ? 1.0f : -shared.betas[row] * norm * norm;
      near.x[n][r] = j < i ? factor * near.x[n][r] : 0.0f, far.x[n][r] *= factor;
      if (at.odd && j == i) near.x[n][r] = shared.norms[2][row];
    }
  if (at.block) store_square<P::pitch>(to, far, lane);
  if (at.odd)
    store_square<P::pitch>(to + P::next, near, lane);
  else
    store_square<P::pitch>(to + P::x, unit_lower_inverse(near, lane), lane);
}

// A operands: the blocks (block, block) and (1, 0) of X, transposed, as halves; the latter of the first block.
__device__ __forceinline__ void solve_short(const Place& at, uint32_t (&solved)[2][4]) {
  using P = ShortPlaces;
  const uint32_t k_rows = at.smem + P::rows_k, last = k_rows + P::tile;
  load_matrices_transposed(solved[0], square_unit<P::pitch>(k_rows + at.block * P::tile + P::x, (at.lane & 7) + ((at.lane >> 4) << 3),
                                                            (at.lane >> 3) & 1));
  if (at.block) return;
  Square acc = {}, next = {};
  multiply_transposed<P::pitch>(acc, solved[0], last, at.lane);
  uint32_t a[4];
  half_operand(a, acc);
  multiply_transposed<P::pitch>(next, a, last + P::x, at.lane);
  half_operand(solved[1], next);
}

// k_solved of this block's tokens, 64 channels per warp, staged for the record.
__device__ __forceinline__ void keys_of_short(const Place& at, const ShortShared& shared, const uint32_t (&solved)[2][4],
                                              const float (&strength)[2], uint32_t stage) {
  using P = ShortPlaces;
  const uint32_t tails = at.smem + P::tails + at.block * P::tile + row_fragment<128>(at.lane) + at.odd * 128;
  float acc[8][4] = {};
#pragma unroll
  for (int d = 0; d < 2; ++d) {
    if (d && at.block) continue;
    const float* factors = &shared.total[64 * at.odd + 2 * (at.lane % 4)];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if (d) {
        const float2 f0 = *reinterpret_cast<const float2*>(factors + 16 * s), f1 = *reinterpret_cast<const float2*>(factors + 16 * s + 8);
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[2 * s][r] *= r % 2 ? f0.y : f0.x, acc[2 * s + 1][r] *= r % 2 ? f1.y : f1.x;
      }
      uint32_t b[4];
      load_matrices_transposed(b, (tails ^ (s << 5)) + d * P::tile);
      mma_half(acc[2 * s], solved[d], b[0], b[1]), mma_half(acc[2 * s + 1], solved[d], b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < 8; n += 2) {  // matrices (tokens 0-7, 8-15) x (channels 8 n, 8 n + 8)
    const uint32_t words[4] = {pack_bf16(acc[n][0] * strength[0], acc[n][1] * strength[0]),
                               pack_bf16(acc[n][2] * strength[1], acc[n][3] * strength[1]),
                               pack_bf16(acc[n + 1][0] * strength[0], acc[n + 1][1] * strength[0]),
                               pack_bf16(acc[n + 1][2] * strength[1], acc[n + 1][3] * strength[1])};
    const int row = at.lane & 15;
    store_matrices(stage + row * 128 + (((n + (at.lane >> 4)) ^ (row & 7)) << 4), words);
  }
}

// Square (block, i) of A_solved^T, staged for the record.
template <bool L2NORM>
__device__ __forceinline__ void square_of_short(const HopperForward& p, const Place& at, const ShortShared& shared,
                                                const uint32_t (&solved)[2][4], const float (&strength)[2], int i, uint32_t stage) {
  using P = ShortPlaces;
  const int lane = at.lane;
  const uint32_t row_block = at.smem + P::rows_q + i * P::tile;  // A_qk
  Square acc = {};
  multiply_transposed<P::pitch>(acc, solved[0], row_block + (i == at.block ? P::next : 0), lane);
  if (i > at.block) multiply_transposed<P::pitch>(acc, solved[1], row_block + P::next, lane);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = square_row(2 * half, lane), column = i * kBlock + square_column(n, 0, lane);
      const float f = strength[half] * p.scale;
      const float f0 = L2NORM ? f : f * shared.norms[0][column], f1 = L2NORM ? f : f * shared.norms[0][column + 1];
      store_shared(stage + row * 32 + ((n ^ (row >> 2 & 1)) << 4) + (lane % 4) * 4,
                   pack_bf16(acc.x[n][2 * half] * f0, acc.x[n][2 * half + 1] * f1));
    }
}

template <Gate GATE, bool BOUNDED, bool G32, bool L2NORM>
__device__ __forceinline__ void prepare_short(const HopperForward& p, uint32_t slot) {
  using P = ShortPlaces;
  using R = ShortRecord;
#ifdef KDA_EMULATE
  uint8_t* bytes = memory;
#else
  extern __shared__ __align__(1024) uint8_t bytes[];
#endif
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const Place at{shared_address(bytes), lane, warp, warp / 2, warp % 2};
  const int which = blockIdx.x % 2, head = blockIdx.x / 2, group = 4 * which + warp;
  const ShortShared shared{*reinterpret_cast<float(*)[4][128]>(bytes + P::sums), *reinterpret_cast<float(*)[128]>(bytes + P::total),
                           *reinterpret_cast<float(*)[kShort]>(bytes + P::betas), *reinterpret_cast<float(*)[3][kShort]>(bytes + P::norms)};
  const Span span = chunk_span(p, slot, lane);
  if (span.length <= 0) return;
  uint8_t* record = static_cast<uint8_t*>(p.workspace) + (slot * p.HV + head) * R::chunk_bytes + which * R::bytes;

  Inputs<128> x;
  const uint32_t own = at.smem + at.block * P::tile + at.odd * kTokens * 256;
  load_tokens<128, GATE, G32>(p, span, head, group, lane, own + P::rows_q, own + P::rows_k, x);
  if (lane < kTokens) {
    const int row = group * kTokens + lane;
    const int64_t from = span.batch * p.beta_strides.batch + (span.first + row) * p.beta_strides.token + head * p.beta_strides.head;
    shared.betas[warp * kTokens + lane] = row < span.length ? write_strength(p, from) : 0.0f;
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
  decay_group<BOUNDED, L2NORM>(p, x, shared, at, record);
  __syncthreads();

  Square near = {}, far = {};
  short_pairs<BOUNDED>(at, near, far);
  __syncwarp();  // the rows are read: squares take their place
  store_squares<L2NORM>(at, shared, near, far);
  __syncthreads();

  uint32_t solved[2][4];
  solve_short(at, solved);
  float strength[2];  // of the two rows a lane holds
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = at.block * kBlock + square_row(2 * i, lane);
    strength[i] = shared.betas[row] * (L2NORM ? 1.0f : shared.norms[1][row]);
  }
  const uint32_t stage_k = at.smem + P::columns + at.block * P::tile + at.odd * 2048;
  const uint32_t stage_a = at.smem + P::rows_k + at.block * P::tile + P::stage + at.odd * R::square;
  keys_of_short(at, shared, solved, strength, stage_k);
  const bool has_square = !at.block || at.odd;  // (0, 0), (0, 1) and (1, 1)
  if (has_square) square_of_short<L2NORM>(p, at, shared, solved, strength, at.odd, stage_a);
  fence_async();
  __syncwarp();
  if (lane == 0) {
    bulk_store(record + R::k_solved + at.odd * R::solved_half + at.block * 2048, stage_k, 2048);
    if (has_square) bulk_store(record + R::a_solved + (at.block + at.odd) * R::square, stage_a, R::square);
    bulk_store_wait();
  }
}

}  // namespace kda::hopper
