// Everything of a chunk that needs no state, one block per chunk:
//
//     A_qk[i,j] = scale sum_d q[i,d] k[j,d] exp(g[j+1,d] + .. + g[i,d])      j <= i
//     A_kk[i,j] = beta_i sum_d k[i,d] k[j,d] exp(g[j+1,d] + .. + g[i,d])     j <  i
//     (I + A_kk) u = beta v        (I + A_kk) w = beta k exp(G)        q_decayed = scale q exp(G)        k_decayed = k exp(G_C - G)
//
// Decays are products of exp(g) <= 1 between the two tokens: never a ratio, never a difference of sums. At level b = 1, 2, 4, .. C/2 the
// tokens of every odd block of b (rows, decayed from the block's start) meet those of the even block before it (columns, decayed to the
// block's end): both factors are <= 1 whatever the gate. The q and k rows of 8 odd tokens fill one 16-row tile of the tensor core.
//
// The solve is in solve.cuh. The results go into the chunk's record as tiles (tiles.cuh, intra_store.cuh).
#pragma once

#include "gate.cuh"
#include "intra_block.cuh"
#include "intra_store.cuh"
#include "solve.cuh"
#include "tiles.cuh"

namespace kda {

// scale / sqrt(sum x^2 + 1e-6) of every row, a warp per row.
template <int K, int C, int WARPS>
__device__ void row_norms(const kda_tensor &x, int64_t batch, int64_t head, const Tokens &tokens, float scale, float *norms) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = warp; i < C; i += WARPS) {
    float sum = 0.f;
    if (i < tokens.length) {
      const float *row = row_of(x, batch, head, tokens.first + i);
      for (int d = lane; d < K; d += 32) sum += row[d] * row[d];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) norms[i] = scale / sqrtf(sum + 1e-6f);
  }
}

// Blocks that share a multiprocessor: as many as have the shared memory on sm_90 and sm_100.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KDA_INTRA_BLOCKS (C == 64 ? 2 : 4)
#else
#define KDA_INTRA_BLOCKS 1
#endif

template <int K, int V, int C>
__global__ __launch_bounds__(Intra<K, V, C>::THREADS, KDA_INTRA_BLOCKS) void intra_kernel(const __grid_constant__ Params p) {
  using S = Intra<K, V, C>;
  extern __shared__ __align__(16) unsigned char memory[];
  typename S::Shared &sh = *reinterpret_cast<typename S::Shared *>(memory);
  let_next_kernel_start();

  // The first chunks last: they are what `state` wants first, and are still in the L2 cache then.
  const unsigned slots = unsigned(p.sequences.slots), value_heads = unsigned(p.value_heads), rows = unsigned(p.rows);
  const unsigned row = blockIdx.x % rows, slot = slots - 1 - blockIdx.x / rows;
  const int64_t cell = int64_t(row) * slots + slot;
  const int64_t head = row % value_heads, key_head = unsigned(head) / unsigned(p.group);
  const Tokens tokens = p.sequences.chunk(row / value_heads, slot, C);
  if (tokens.length <= 0) return;
  const int length = int(tokens.length < C ? tokens.length : C);

  const int tid = threadIdx.x, warp = tid / 32 % S::WARPS, lane = tid % 32, g8 = lane / 4, t4 = lane % 4;

  for (int i = tid; i < C; i += S::THREADS) {
    sh.beta[i] = i < length ? write_strength(p.beta_kind, *row_of(p.beta, tokens.batch, head, tokens.first + i)) : 0.f;
    sh.q_norm[i] = p.scale, sh.k_norm[i] = 1.f;
  }
  __syncthreads();
  if (p.l2norm) {
    row_norms<K, C, S::WARPS>(p.q, tokens.batch, key_head, tokens, p.scale, sh.q_norm);
    row_norms<K, C, S::WARPS>(p.k, tokens.batch, key_head, tokens, 1.f, sh.k_norm);
    __syncthreads();
  }

  const float a = p.A_log != nullptr ? expf(p.A_log[head]) : 1.f;
  const int token0 = warp * S::OWN, own = length - token0;  // own: how many of the eight tokens there are
  const float *q_from = row_of(p.q, tokens.batch, key_head, tokens.first + token0) + lane;
  const float *k_from = row_of(p.k, tokens.batch, key_head, tokens.first + token0) + lane;
  const float *g_from = row_of(p.g, tokens.batch, head, tokens.first + token0) + lane;
  float q[S::OWN], k[S::OWN], prefix[S::OWN];
  const int q_stride = int(p.q.token_stride), k_stride = int(p.k.token_stride), g_stride = int(p.g.token_stride);
  auto load = [&]() {  // q, k and g of the next slice
#pragma unroll
    for (int i = 0; i < S::OWN; ++i) {
      q[i] = i < own ? q_from[int64_t(i) * q_stride] : 0.f;
      k[i] = i < own ? k_from[int64_t(i) * k_stride] : 0.f;
      prefix[i] = i < own ? g_from[int64_t(i) * g_stride] : 0.f;
    }
    q_from += S::SLICE, k_from += S::SLICE, g_from += S::SLICE;
  };
  Record<K, V, C> &record = static_cast<Record<K, V, C> *>(p.mid.records)[cell];

  // Of this warp's tiles: where this lane's rows and columns are in the levels (13 bits each), and which warps made them.
  uint32_t where[S::WARP_TILES];
#pragma unroll
  for (int n = 0; n < S::WARP_TILES; ++n) {
    const PairTile<C> tile(n, warp);
    const uint32_t rows = (tile.level * 3 + lane / 8 % 2) * 2 * S::PLANE + S::place(lane / 16 * 8 + lane % 8, tile.rows);
    const uint32_t columns = ((tile.level * 3 + 2) * 2 + lane / 16) * S::PLANE + S::place(lane % 16, tile.columns);
    where[n] = rows | columns << 13 | tile.row_maker(g8) << 26 | tile.column_maker(t4) << 29;
  }
  static_assert(S::LEVELS * 6 * S::PLANE <= 1 << 13 && S::WARPS <= 8, "it fits");
  float pairs[S::WARP_TILES][4] = {};
  float diagonal[S::OWN] = {};
  load();
  for (int base = 0; base < K; base += S::SLICE) {
    const int d = base + lane;
    float kb[S::OWN], suffix[S::OWN];
    if (p.gate != KDA_GATE_LOG_DECAY) {
      const float bias = p.dt_bias != nullptr ? p.dt_bias[head * K + d] : 0.f;
#pragma unroll
      for (int i = 0; i < S::OWN; ++i) prefix[i] = i < own ? log_decay(p.gate, prefix[i] + bias, a, p.lower_bound) : 0.f;
    }
    float q_largest = 0.f, k_largest = 0.f, kb_largest = 0.f;
#pragma unroll
    for (int i = 0; i < S::OWN; ++i) {
      q[i] *= sh.q_norm[token0 + i];
      k[i] *= sh.k_norm[token0 + i];
      kb[i] = k[i] * sh.beta[token0 + i];
      prefix[i] = expf(prefix[i]);
      suffix[i] = 1.f;
      diagonal[i] = fmaf(q[i], k[i], diagonal[i]);
      q_largest = fmaxf(q_largest, fabsf(q[i]));
      k_largest = fmaxf(k_largest, fabsf(k[i]));
      kb_largest = fmaxf(kb_largest, fabsf(kb[i]));
    }
    const Power q_power(warp_largest(q_largest)), k_power(warp_largest(k_largest)), kb_power(warp_largest(kb_largest));
#pragma unroll
    for (int i = 0; i < S::OWN; ++i) q[i] *= q_power.m, k[i] *= k_power.m, kb[i] *= kb_power.m;
    if (lane == 0) sh.q_power[warp] = q_power.inverse, sh.k_power[warp] = k_power.inverse, sh.kb_power[warp] = kb_power.inverse;

    // Levels 1, 2 and 4: pairs inside the warp's eight tokens. Tokens of odd blocks are rows, of even ones columns.
    const int near = S::place(lane, warp / 2);
#pragma unroll
    for (int level = 0; level < 3; ++level) {
      const int b = 1 << level;
      float rows_q[4], rows_k[4], columns[4];
#pragma unroll
      for (int i = 0; i < S::OWN; ++i) {
        const int r = i / (2 * b) * b + i % b;
        if (i / b % 2) rows_q[r] = q[i] * prefix[i], rows_k[r] = kb[i] * prefix[i];
        else columns[r] = k[i] * suffix[i];
      }
      auto put = [&](int which, const float (&x)[4]) {
        uint2 hi, lo;
        split_pair(x[0], x[1], 1.f, hi.x, lo.x);
        split_pair(x[2], x[3], 1.f, hi.y, lo.y);
        reinterpret_cast<uint2 *>(&sh.levels[level][which][0][near])[warp % 2] = hi;
        reinterpret_cast<uint2 *>(&sh.levels[level][which][1][near])[warp % 2] = lo;
      };
      put(0, rows_q), put(1, rows_k), put(2, columns);
#pragma unroll
      for (int i = 0; i < S::OWN; ++i)
        if (i / b % 2 == 0) suffix[i] *= prefix[i / b * b + 2 * b - 1];
#pragma unroll
      for (int i = S::OWN - 1; i >= 0; --i)
        if (i / b % 2) prefix[i] *= prefix[i / b * b - 1];
    }
    sh.totals[warp * S::SLICE + lane] = prefix[S::OWN - 1];
    __syncthreads();
    // Levels 8 and up: pairs of blocks of warps.
    float before = 1.f, after = 1.f;
#pragma unroll
    for (int level = 3; level < S::LEVELS; ++level) {
      const int b = 1 << (level - 3), block = warp >> (level - 3);
      float sibling = 1.f;
#pragma unroll
      for (int i = 0; i < b; ++i) sibling *= sh.totals[((block ^ 1) * b + i) * S::SLICE + lane];
      const int far = S::place(lane, block / 2 * b + warp % b);
      auto put = [&](int which, const float (&x)[S::OWN], const float (&decay)[S::OWN], float more) {
        uint4 hi, lo;
        split_pair(x[0] * (decay[0] * more), x[1] * (decay[1] * more), 1.f, hi.x, lo.x);
        split_pair(x[2] * (decay[2] * more), x[3] * (decay[3] * more), 1.f, hi.y, lo.y);
        split_pair(x[4] * (decay[4] * more), x[5] * (decay[5] * more), 1.f, hi.z, lo.z);
        split_pair(x[6] * (decay[6] * more), x[7] * (decay[7] * more), 1.f, hi.w, lo.w);
        sh.levels[level][which][0][far] = hi;
        sh.levels[level][which][1][far] = lo;
      };
      if (block % 2) {
        put(0, q, prefix, before), put(1, kb, prefix, before);
        before *= sibling;
      } else {
        put(2, k, suffix, after);
        after *= sibling;
      }
    }
#pragma unroll
    for (int i = 0; i < S::OWN; ++i) {
      prefix[i] *= before;
      sh.w[(token0 + i) * S::LD_K + d] = kb[i] * prefix[i] * kb_power.inverse;
      q[i] *= prefix[i];
      k[i] *= suffix[i] * after;
    }
    if (warp == S::WARPS - 1) record.small.decay[d] = prefix[S::OWN - 1];
    const int row_tile = warp / 2 * (K / 16) + base / 16;
    const float stored = store_row_tiles(record.q + row_tile, q, warp % 2) * q_power.inverse;
    if (lane % 16 == 0) reinterpret_cast<float *>(&record.small.q[row_tile + lane / 16])[warp % 2] = stored;
#pragma unroll
    for (int i = 0; i < S::OWN; ++i) k[i] *= k_power.inverse;
    const float k_stored = warp_largest(largest_of(k));
    if (lane == 0) sh.k_largest[warp] = k_stored;
    __syncthreads();
    const Power power(fmaxf(sh.k_largest[warp & ~1], sh.k_largest[warp | 1]));
    const int column_tile = base / 16 * (C / 16) + warp / 2;
    store_column_tiles(record.k + column_tile, C / 16, k, warp % 2, power.m);
    if (lane % 16 == 0 && warp % 2 == 0) record.small.k[column_tile + lane / 16 * (C / 16)] = make_float2(power.inverse, power.inverse);
    if (base + S::SLICE < K) load();
#pragma unroll
    for (int n = 0; n < S::WARP_TILES; ++n) {
      const uint4 *levels = &sh.levels[0][0][0][0], *rows = levels + (where[n] & 0x1fff), *columns = levels + (where[n] >> 13 & 0x1fff);
      const int maker = where[n] >> 26 & 7;
      const float common = sh.k_power[where[n] >> 29];
      const float upper = sh.q_power[maker] * common, lower = sh.kb_power[maker] * common;
#pragma unroll
      for (int step = 0; step < S::SLICE / 16; ++step) {
        TileA left;  // q above k
        uint32_t b[4];
        load_transposed(left.hi, rows + step * 16 * S::UNITS);
        load_transposed(left.lo, rows + step * 16 * S::UNITS + S::PLANE);
        load_transposed(b, columns + step * 16 * S::UNITS);
        multiply_add(pairs[n], left, b, upper, lower);
      }
    }
    __syncthreads();
  }

  // The pair products to their places; only tokens of the same pair of blocks meet.
#pragma unroll
  for (int n = 0; n < S::WARP_TILES; ++n) {
    const PairTile<C> tile(n, warp);
    const int b = 1 << tile.level, r = tile.rows * 8 + g8, i = (r >> tile.level) * 2 * b + b + (r & (b - 1));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int c = tile.columns * 8 + 2 * t4 + e, j = (c >> tile.level) * 2 * b + (c & (b - 1));
      if (r >> tile.level == c >> tile.level) {
        sh.A[i * S::LD_A + j] = pairs[n][e];
        sh.A[j * S::LD_A + i] = pairs[n][2 + e];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < S::OWN; ++i) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) diagonal[i] += __shfl_xor_sync(0xffffffffu, diagonal[i], step);
    if (lane == i) sh.A[(token0 + i) * (S::LD_A + 1)] = diagonal[i];
  }
  for (int e = tid; e < C * (V / 4); e += S::THREADS) {
    const int i = e / (V / 4), d = e % (V / 4) * 4;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (i < length) x = *reinterpret_cast<const float4 *>(row_of(p.v, tokens.batch, head, tokens.first + i) + d);
    const float beta = sh.beta[i];
    *reinterpret_cast<float4 *>(sh.u + i * S::LD_V + d) = make_float4(beta * x.x, beta * x.y, beta * x.z, beta * x.w);
  }
  __syncthreads();
  constexpr int INVERTING = C / 32, OTHERS = S::WARPS - INVERTING;
  if (warp < INVERTING) {
    invert_two<S::LD_A, S::LD_INV>(sh, warp);
  } else {
    split_lower<C, S::LD_A>(sh, warp - INVERTING, OTHERS);
    store_triangle<C, S::LD_A>(sh.A, record.A, record.small.A, warp - INVERTING, OTHERS);
  }
  __syncthreads();

  constexpr int N = (K + V) / S::WARPS / 8 < 4 ? (K + V) / S::WARPS / 8 : 4;  // 8-column tiles at a time, an even number
  for (int column = warp * N * 8; column < K + V; column += S::WARPS * N * 8) {
    if (column < K) {
      solve_columns<C / 16, N, S::LD_K>(sh, sh.w + column, [&](int i, const float (&x)[N][4], const Split<N> &split) {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
          const int tile = i * (K / 16) + column / 16 + n / 2;
          record.w[tile][0][lane] = make_uint4(split.hi[n][0], split.hi[n][1], split.hi[n + 1][0], split.hi[n + 1][1]);
          record.w[tile][1][lane] = make_uint4(split.lo[n][0], split.lo[n][1], split.lo[n + 1][0], split.lo[n + 1][1]);
          if (lane == 0) record.small.w[tile] = make_float2(split.inverse, split.inverse);
        }
        if (p.mid.w != nullptr) store_rows<N, K>(p.mid.w + (cell * C + i * 16) * K + column, x);
      });
    } else {
      solve_columns<C / 16, N, S::LD_V>(sh, sh.u + column - K, [&](int i, const float (&x)[N][4], const Split<N> &) {
#pragma unroll
        for (int n = 0; n < N; ++n) record.u[i * (V / 8) + (column - K) / 8 + n][lane] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
        if (p.mid.u != nullptr) store_rows<N, V>(p.mid.u + (cell * C + i * 16) * V + column - K, x);
      });
    }
  }
}

}  // namespace kda
