// The recurrence over chunks, one block per (sequence, value head, BV value channels):
//
//     v_new = u - w S        o = q_decayed S + A_qk v_new        S <- Diag(decay) S + k_decayed^T v_new
//
// Half of the warps form w S, the other half q_decayed S, 16 tokens each; then all form their part of k_decayed^T v_new. The state lives
// in registers, 16 key channels a tile, and S and v_new pass through shared memory once per chunk as hi and lo (tiles.cuh), with a power of
// two per 16 rows. Every tile of a record has one warp that uses it, which loads it from device memory straight into registers: the
// place of a tile is refilled with a later chunk's as soon as it was used. The L2 cache is asked for records in advance.
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
  static constexpr int DEPTH = K == 64 && C == 32 ? 2 : 1;  // chunks that the registers hold
  static constexpr int AHEAD = 4;                           // chunks that the L2 cache is ahead
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

template <int N>
struct Count {
  static constexpr int value = N;
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

  const int tid = threadIdx.x, warp = tid / 32 % S::WARPS, lane = tid % 32, g = lane / 4, t = lane % 4;
  const bool output = warp >= ROWS;  // this warp forms q_decayed S and o, the others w S and v_new
  const int row = warp % ROWS;       // of tiles

  const int64_t state_offset = index * K * V;
  auto state_at = [&](int k, int v) { return state_offset + (p.state_v_first ? int64_t(v) * K + k : int64_t(k) * V + v); };

  // What this lane needs of the record: its tiles lie 64 pieces of 16 bytes apart.
  TileA rows[S::DEPTH][STEPS];  // of w or q_decayed
  TileA keys[S::DEPTH][S::OWN][ROWS];
  uint4 rest[S::DEPTH][S::REST];  // u, or the tiles of A_qk
  const uint4 *rows_from = &(output ? record->q : record->w)[row * STEPS][0][lane], *keys_from = &record->k[0][0][lane] + warp * ROWS * 64;
  const uint4 *rest_from = output ? &record->A[row * (row + 1) / 2][0][lane] : reinterpret_cast<const uint4 *>(&record->u[row * (V / 8) + v0 / 8][lane]);
  auto load_row = [&](int d, int64_t at, int j) { rows[d][j].load(rows_from + at + j * 64); };
  auto load_keys = [&](int d, int64_t at, int m, int j) {
    if (STEPS % S::WARPS == 0 || warp + m * S::WARPS < STEPS) keys[d][m][j].load(keys_from + at + (m * S::WARPS * ROWS + j) * 64);
  };
  auto load_rest = [&](int d, int64_t at) {
    if (output) {
#pragma unroll
      for (int i = 0; i < 2 * ROWS; ++i)
        if (i / 2 <= row) rest[d][i] = load_once(rest_from + at + i * 32);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) rest[d][n] = load_once(rest_from + at + n * 32);
    }
  };
  // Where a chunk's record is, in pieces; beyond the last, the last.
  auto piece_of = [&](int64_t chunk) { return (chunk < chunks ? chunk : chunks - 1) * int64_t(sizeof(R) / 16); };

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
  // Bring a record into the L2 cache: the blocks of a head share this.
  auto bring = [&](int64_t chunk) {
    constexpr int BYTES = sizeof(R) / (V / BV);
    static_assert(BYTES % 16 == 0 && BYTES * (V / BV) == sizeof(R), "equal parts");
    if (chunk < chunks) prefetch(reinterpret_cast<const char *>(record + chunk) + part * BYTES, BYTES);
  };
  // By the output warps: the small parts of a chunk to shared memory.
  auto copy_small = [&](int64_t chunk) {
    constexpr int PIECES = sizeof(typename R::Small) / 16;
    const int thread = tid - S::THREADS / 2;
    if (chunk < chunks) {
#pragma unroll
      for (int i = 0; i < PIECES; i += S::THREADS / 2)
        if (i + thread < PIECES)
          copy_async(reinterpret_cast<uint4 *>(&sh.small[chunk % 2]) + i + thread, reinterpret_cast<const uint4 *>(&record[chunk].small) + i + thread);
    }
    copies_commit();
  };
  if (chunks > 0) {
    if (output) copy_small(0);
    if (tid == 0)
      for (int ahead = 1; ahead < S::AHEAD; ++ahead) bring(ahead);
#pragma unroll
    for (int d = 0; d < S::DEPTH; ++d) {
      const int64_t at = piece_of(d);
#pragma unroll
      for (int j = 0; j < STEPS; ++j) load_row(d, at, j);
      load_rest(d, at);
#pragma unroll
      for (int m = 0; m < S::OWN; ++m) {
#pragma unroll
        for (int j = 0; j < ROWS; ++j) load_keys(d, at, m, j);
      }
    }
  }

  float *o = const_cast<float *>(row_of(p.o, batch, head, first + row * 16 + g)) + v0 + 2 * t;
  const uint32_t *state_row = state_rows.lane_in_order(), *v_new_row = v_new_rows.lane_of_tokens();
  auto step = [&](int64_t chunk, int d) {
    copies_wait<0>();
    __syncthreads();  // the state and this chunk's small parts are there
    const int64_t next = piece_of(chunk + S::DEPTH);
    const typename R::Small &small = sh.small[chunk % 2];

    float sum[N][4] = {};
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      const float2 power = (output ? small.q : small.w)[row * STEPS + j];
      const float upper = power.x * sh.state_power[j], lower = power.y * sh.state_power[j];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t b[4];
        load_transposed(b, state_row + j * 16 * S::LD + n * 4);
        multiply_add(sum[n], rows[d][j], b, upper, lower);
      }
      load_row(d, next, j);
    }
    if (!output) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        sum[n][0] = __uint_as_float(rest[d][n].x) - sum[n][0];
        sum[n][1] = __uint_as_float(rest[d][n].y) - sum[n][1];
        sum[n][2] = __uint_as_float(rest[d][n].z) - sum[n][2];
        sum[n][3] = __uint_as_float(rest[d][n].w) - sum[n][3];
      }
      const Split<N> split(sum);
      v_new_rows.put(row * 16, split);
      if (lane == 0) sh.v_new_power[row] = split.inverse;
    } else {
      copy_small(chunk + 1);
      if (tid == S::THREADS - 1) bring(chunk + S::AHEAD);
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
          multiply_add(added[n], keys[d][m][j], b, power, power);
        }
        load_keys(d, next, m, j);
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
      auto add_inside = [&](auto count) {  // o += A_qk v_new, `count` tiles
#pragma unroll
        for (int j = 0; j < count.value; ++j) {
          const float2 power = small.A[row * (row + 1) / 2 + j];
          const float upper = power.x * sh.v_new_power[j], lower = power.y * sh.v_new_power[j];
#pragma unroll
          for (int n = 0; n < N; ++n) {
            uint32_t b[4];
            load_transposed(b, v_new_row + j * 16 * S::LD + n * 4);
            multiply_add(sum[n], TileA{rest[d][2 * j], rest[d][2 * j + 1]}, b, upper, lower);
          }
        }
      };
      if (row == 0) add_inside(Count<1>{});
      else if (row == 1) add_inside(Count<2>{});
      else if (row == 2) add_inside(Count<ROWS < 3 ? 1 : 3>{});
      else add_inside(Count<ROWS < 4 ? 1 : 4>{});
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (chunk * C + row * 16 + g + half * 8 < length) {
          float *to = o + half * 8 * p.o.token_stride;
#pragma unroll
          for (int n = 0; n < N; ++n) *reinterpret_cast<float2 *>(to + n * 8) = make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
        }
      }
      o += C * p.o.token_stride;
    }
    load_rest(d, next);
  };
  for (int64_t chunk = 0; chunk < chunks; chunk += S::DEPTH) {
#pragma unroll
    for (int d = 0; d < S::DEPTH; ++d)
      if (chunk + d < chunks) step(chunk + d, d);
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
