// The recurrence over chunks, one block per (sequence, value head, BV value channels):
//
//     v_new = u - w S        o = q_decayed S + A_qk v_new        S <- Diag(decay) S + k_decayed^T v_new
//
// Half of the warps form w S, the other half q_decayed S, 16 tokens each; then all form their part of k_decayed^T v_new. The state lives
// in registers, 16 key channels a tile, and S and v_new pass through shared memory once per chunk as hi and lo (tiles.cuh), with a power of
// two per 16 rows. Every tile of a record has one warp that uses it, which loads it from device memory straight into registers: the
// place of a tile is refilled with the next chunk's as soon as it was used, so loads run one whole chunk ahead.
#pragma once

#include "chunks.cuh"
#include "tiles.cuh"

namespace kda {

template <int K, int V, int C, int BV>
struct State {
  static_assert(V % BV == 0 && BV % 8 == 0, "BV divides V");
  using R = Record<K, V, C>;
  static constexpr int WARPS = 2 * R::ROWS;  // half for w S, half for q_decayed S
  static constexpr int THREADS = WARPS * 32;
  static constexpr int N = BV / 8;
  static constexpr int OWN = (R::STEPS + WARPS - 1) / WARPS;  // tiles of the state per warp
  static constexpr int AHEAD = 4;
  static constexpr int REST = N > 2 * R::ROWS ? N : 2 * R::ROWS;
  static constexpr int LD = BV == 8 ? 4 : BV / 2 + 4;  // words of two numbers; the eight rows of a block fall into 32 banks

  struct Shared {
    uint32_t state[2][K * LD];  // hi, lo
    uint32_t v_new[2][C * LD];
    typename R::Small small[2];
    float state_power[R::STEPS];  // 1 / m of 16 rows
    float v_new_power[R::ROWS];
  };
};

template <int K, int V, int C, int BV>
__global__ __launch_bounds__(State<K, V, C, BV>::THREADS, 1) void state_kernel(const __grid_constant__ Params p) {
  using S = State<K, V, C, BV>;
  using R = typename S::R;
  constexpr int N = S::N, ROWS = R::ROWS, STEPS = R::STEPS;
  extern __shared__ __align__(16) unsigned char memory[];
  typename S::Shared &sh = *reinterpret_cast<typename S::Shared *>(memory);

  const int64_t part = blockIdx.x % (V / BV), index = blockIdx.x / (V / BV);  // index: [sequences, value heads]
  const int64_t sequence = index / p.value_heads, head = index % p.value_heads;
  const int v0 = int(part) * BV;
  const bool packed = p.sequences.cu_seqlens != nullptr;
  const int64_t batch = packed ? 0 : sequence;
  const int64_t first = packed ? p.sequences.edge(sequence) : 0;
  const int64_t length = (packed ? p.sequences.edge(sequence + 1) : p.sequences.tokens) - first;
  const int64_t chunks = (length + C - 1) / C;
  const int64_t cell0 = (batch * p.value_heads + head) * p.sequences.slots + (packed ? p.sequences.first_slot(sequence, C) : 0);
  const R *record = static_cast<const R *>(p.mid.records) + cell0;

  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const bool output = warp >= ROWS;  // this warp forms q_decayed S and o, the others w S and v_new
  const int row = warp % ROWS;       // of tiles

  const int64_t state_offset = index * K * V;
  auto state_at = [&](int k, int v) { return state_offset + (p.state_v_first ? int64_t(v) * K + k : int64_t(k) * V + v); };

  TileA rows[STEPS];    // of w or q_decayed
  TileA keys[S::OWN][ROWS];
  uint4 rest[S::REST];  // u, or the tiles of A_qk
  auto load_row = [&](const R &from, int j) { rows[j].load((output ? from.q : from.w)[row * STEPS + j]); };
  auto load_keys = [&](const R &from, int m, int j) {
    const int tile = warp + m * S::WARPS;
    if (STEPS % S::WARPS == 0 || tile < STEPS) keys[m][j].load(from.k[tile * ROWS + j]);
  };
  auto load_rest = [&](const R &from) {
    if (output) {
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        if (j > row) continue;
        const Tile &tile = from.A[row * (row + 1) / 2 + j];
        rest[2 * j] = load_once(&tile[0][lane]);
        rest[2 * j + 1] = load_once(&tile[1][lane]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) rest[n] = load_once(reinterpret_cast<const uint4 *>(&from.u[row * (V / 8) + v0 / 8 + n][lane]));
    }
  };
  auto copy_small = [&](const R &from, int place) {
    for (int i = tid; i < int(sizeof(typename R::Small) / 16); i += S::THREADS)
      copy_async(reinterpret_cast<uint4 *>(&sh.small[place]) + i, reinterpret_cast<const uint4 *>(&from.small) + i);
    copies_commit();
  };
  const Rows<S::LD> state_rows{sh.state[0], sh.state[1]}, v_new_rows{sh.v_new[0], sh.v_new[1]};
  float state[S::OWN][N][4];
#pragma unroll
  for (int m = 0; m < S::OWN; ++m) {
    const int tile = warp + m * S::WARPS;
    if (tile >= STEPS) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        state[m][n][e] = p.initial_state != nullptr ? p.initial_state[state_at(tile * 16 + g + e / 2 * 8, v0 + n * 8 + 2 * t + e % 2)] : 0.f;
    }
    const Split<N> split(state[m]);
    state_rows.put(tile * 16, split);
    if (lane == 0) sh.state_power[tile] = split.inverse;
  }

  wait_for_previous_kernel();
  // Into the L2 cache, AHEAD chunks before it is needed; the blocks of a head share the work.
  auto prefetch = [&](int64_t chunk) {
    if (chunk >= chunks) return;
    for (int i = int(part) + tid * (V / BV); i < int(sizeof(R) / 128); i += S::THREADS * (V / BV))
      prefetch_line(reinterpret_cast<const char *>(record + chunk) + i * 128);
  };
  for (int ahead = 0; ahead < S::AHEAD; ++ahead) prefetch(ahead);
  if (chunks > 0) {
    copy_small(record[0], 0);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) load_row(record[0], j);
    load_rest(record[0]);
#pragma unroll
    for (int m = 0; m < S::OWN; ++m) {
#pragma unroll
      for (int j = 0; j < ROWS; ++j) load_keys(record[0], m, j);
    }
  }

  const uint32_t *state_row = state_rows.lane_in_order(), *v_new_row = v_new_rows.lane_of_tokens();
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    copies_wait<0>();
    __syncthreads();  // the state and this chunk's small parts are there
    prefetch(chunk + S::AHEAD);
    const R &next = record[chunk + 1 < chunks ? chunk + 1 : chunk];
    const typename R::Small &small = sh.small[chunk % 2];
    if (chunk + 1 < chunks) copy_small(next, int((chunk + 1) % 2));

    float sum[N][4] = {};
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      const float2 power = (output ? small.q : small.w)[row * STEPS + j];
      const float upper = power.x * sh.state_power[j], lower = power.y * sh.state_power[j];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t b[4];
        load_transposed(b, state_row + j * 16 * S::LD + n * 4);
        multiply_add(sum[n], rows[j], b, upper, lower);
      }
      load_row(next, j);
    }
    if (!output) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        sum[n][0] = __uint_as_float(rest[n].x) - sum[n][0];
        sum[n][1] = __uint_as_float(rest[n].y) - sum[n][1];
        sum[n][2] = __uint_as_float(rest[n].z) - sum[n][2];
        sum[n][3] = __uint_as_float(rest[n].w) - sum[n][3];
      }
      const Split<N> split(sum);
      v_new_rows.put(row * 16, split);
      if (lane == 0) sh.v_new_power[row] = split.inverse;
    }
    __syncthreads();  // v_new is there; the state may be overwritten
#pragma unroll
    for (int m = 0; m < S::OWN; ++m) {
      const int tile = warp + m * S::WARPS;
      if (STEPS % S::WARPS != 0 && tile >= STEPS) continue;
      float added[N][4] = {};
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        const float power = small.k[tile * ROWS + j].x * sh.v_new_power[j];
#pragma unroll
        for (int n = 0; n < N; ++n) {
          uint32_t b[4];
          load_transposed(b, v_new_row + j * 16 * S::LD + n * 4);
          multiply_add(added[n], keys[m][j], b, power, power);
        }
        load_keys(next, m, j);
      }
      const float decay[2] = {small.decay[tile * 16 + g], small.decay[tile * 16 + g + 8]};
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state[m][n][e] = fmaf(decay[e / 2], state[m][n][e], added[n][e]);
      }
      const Split<N> split(state[m]);
      state_rows.put(tile * 16, split);
      if (lane == 0) sh.state_power[tile] = split.inverse;
    }
    if (output) {
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        if (j > row) continue;
        const float2 power = small.A[row * (row + 1) / 2 + j];
        const float upper = power.x * sh.v_new_power[j], lower = power.y * sh.v_new_power[j];
#pragma unroll
        for (int n = 0; n < N; ++n) {
          uint32_t b[4];
          load_transposed(b, v_new_row + j * 16 * S::LD + n * 4);
          multiply_add(sum[n], TileA{rest[2 * j], rest[2 * j + 1]}, b, upper, lower);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t token = chunk * C + row * 16 + g + half * 8;
        if (token < length) {
          float *o = const_cast<float *>(row_of(p.o, batch, head, first + token)) + v0 + 2 * t;
#pragma unroll
          for (int n = 0; n < N; ++n) *reinterpret_cast<float2 *>(o + n * 8) = make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
        }
      }
    }
    load_rest(next);
  }
  if (p.final_state != nullptr) {
#pragma unroll
    for (int m = 0; m < S::OWN; ++m) {
      const int tile = warp + m * S::WARPS;
      if (tile >= STEPS) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          p.final_state[state_at(tile * 16 + g + e / 2 * 8, v0 + n * 8 + 2 * t + e % 2)] = state[m][n][e];
      }
    }
  }
}

}  // namespace kda
