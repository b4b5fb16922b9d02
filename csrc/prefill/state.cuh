// The recurrence over chunks, one block per (sequence, value head, BV value channels):
//
//     v_new = u - w S        o = q_decayed S + A_qk v_new        S <- Diag(decay) S + k_decayed^T v_new
//
// Half of the warps form w S, the other half q_decayed S, 16 rows each. The state lives in registers, 16 key channels a tile, and goes
// through shared memory once per chunk as ready-split fragments. Each of w, q_decayed, A_qk, k_decayed is read from shared memory by one
// warp only. Tiles of the coming chunks are copied (cp.async) while this one is worked on: FIRST places for w, q_decayed, u, decay and
// SECOND for A_qk, k_decayed, as many as the shared memory holds. With a single place the copy starts when every warp is past the last one.
#pragma once

#include "chunks.cuh"
#include "mma.cuh"

namespace kda {

template <int K, int V, int C, int BV, int FIRST, int SECOND>
struct State {
  static_assert(V % BV == 0 && BV % 8 == 0, "BV divides V");
  static_assert(FIRST == SECOND || (FIRST == 2 && SECOND == 1), "how far copies run ahead");
  static constexpr int WARPS = C / 8;  // C / 16 for w S, C / 16 for q_decayed S
  static constexpr int THREADS = WARPS * 32;
  static constexpr int N = BV / 8;
  static constexpr int OWN = (K / 16 + WARPS - 1) / WARPS;  // 16-row tiles of the state per warp
  // Row strides in floats: multiples of 4 (cp.async copies 16 bytes), and a fragment's 32 loads fall into 32 banks.
  static constexpr int LD_W = K + 4;
  static constexpr int LD_K = K + 8;  // read transposed
  static constexpr int LD_A = C + 4;
  static constexpr int LD_U = BV == 8 ? 8 : BV + 8;

  struct Shared {
    float w[FIRST][C * LD_W];
    float q_decayed[FIRST][C * LD_W];
    float k_decayed[SECOND][C * LD_K];
    float A_qk[SECOND][C * LD_A];
    float u[FIRST][C * LD_U];
    float decay[FIRST][K];
    uint4 state[K / 8 * N * 32];  // B fragments: hi, hi, lo, lo of a lane
    uint4 v_new[C / 8 * N * 32];
  };
};

// As many places as a block of sm_90 holds.
template <int K, int V, int C, int BV>
struct Places {
  static constexpr size_t LIMIT = 227 * 1024;
  static constexpr bool three = sizeof(typename State<K, V, C, BV, 3, 3>::Shared) <= LIMIT;
  static constexpr bool two = sizeof(typename State<K, V, C, BV, 2, 2>::Shared) <= LIMIT;
  static constexpr int FIRST = three ? 3 : 2;
  static constexpr int SECOND = three ? 3 : two ? 2 : 1;
};

// [ROWS, COLUMNS] floats, rows LD_FROM apart, to rows LD apart.
template <int ROWS, int COLUMNS, int LD, int LD_FROM, int THREADS>
__device__ __forceinline__ void copy_tile(float *to, const float *from) {
  constexpr int QUADS = COLUMNS / 4, STEP = THREADS / QUADS;  // rows at a time
  static_assert(THREADS % QUADS == 0 && (ROWS % STEP == 0 || ROWS < STEP), "every thread copies as much");
  const int row = threadIdx.x / QUADS, column = threadIdx.x % QUADS * 4;
  if (ROWS < STEP && row >= ROWS) return;
  to += row * LD + column;
  from += row * LD_FROM + column;
#pragma unroll
  for (int i = 0; i < ROWS; i += STEP) copy_async(to + i * LD, from + i * LD_FROM);
}

// One element of a [8 rows, 8 columns] tile to its lane's place in a B fragment.
__device__ __forceinline__ void put_b(uint4 *tile, int row, int column, float x) {
  uint32_t hi, lo;
  split(x, hi, lo);
  uint32_t *words = reinterpret_cast<uint32_t *>(tile + column * 4 + row % 4);
  words[row / 4] = hi;
  words[row / 4 + 2] = lo;
}

// A C fragment (16 rows from `row`, 8 columns of tile n) into B fragments.
template <int N>
__device__ __forceinline__ void put_c(uint4 *tiles, int row, int n, const float (&c)[4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 *tile = tiles + ((row / 8 + half) * N + n) * 32;
    put_b(tile, g, 2 * t, c[2 * half]);
    put_b(tile, g, 2 * t + 1, c[2 * half + 1]);
  }
}

__device__ __forceinline__ FragB get_b(const uint4 *tile) {
  const uint4 x = tile[threadIdx.x % 32];
  return {{x.x, x.y}, {x.z, x.w}};
}

// sum[n] += A tiles, with A [16, 8 * steps] row-major, `rows` this lane's address for load_blocks, and B fragments.
template <int N, int MOST>
__device__ __forceinline__ void multiply(float (&sum)[N][4], const float *rows, const uint4 *tiles, int steps) {
#pragma unroll(MOST < 8 ? MOST : 8)
  for (int j = 0; j < steps; ++j) {
    float x[4];
    load_blocks(x, rows + j * 8);
    const FragA a = frag_a(x);
#pragma unroll
    for (int n = 0; n < N; ++n) mma3(sum[n], a, get_b(tiles + (j * N + n) * 32));
  }
}

template <int K, int V, int C, int BV, int FIRST, int SECOND>
__global__ __launch_bounds__(State<K, V, C, BV, FIRST, SECOND>::THREADS, 1) void state_kernel(const __grid_constant__ Params p) {
  using S = State<K, V, C, BV, FIRST, SECOND>;
  constexpr int N = S::N;
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

  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const bool output = warp >= C / 16;  // this warp forms q_decayed S and o, the others w S and v_new
  const int row = warp % (C / 16) * 16;

  const int64_t state_offset = index * K * V;
  auto state_at = [&](int k, int v) { return state_offset + (p.state_v_first ? int64_t(v) * K + k : int64_t(k) * V + v); };

  float state[S::OWN][N][4];
#pragma unroll
  for (int m = 0; m < S::OWN; ++m) {
    const int k0 = (warp + m * S::WARPS) * 16;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int k = k0 + g + e / 2 * 8, v = v0 + n * 8 + 2 * t + e % 2;
        state[m][n][e] = p.initial_state != nullptr && k0 < K ? p.initial_state[state_at(k, v)] : 0.f;
      }
      if (k0 < K) put_c<N>(sh.state, k0, n, state[m][n]);
    }
  }

  auto copy_first = [&](int64_t chunk) {
    const int64_t cell = cell0 + chunk;
    copy_tile<C, K, S::LD_W, K, S::THREADS>(sh.w[chunk % FIRST], p.mid.w + cell * C * K);
    copy_tile<C, K, S::LD_W, K, S::THREADS>(sh.q_decayed[chunk % FIRST], p.mid.q_decayed + cell * C * K);
    copy_tile<C, BV, S::LD_U, V, S::THREADS>(sh.u[chunk % FIRST], p.mid.u + cell * C * V + v0);
    copy_tile<1, K, K, K, S::THREADS>(sh.decay[chunk % FIRST], p.mid.decay + cell * K);
  };
  auto copy_second = [&](int64_t chunk) {
    const int64_t cell = cell0 + chunk;
    copy_tile<C, C, S::LD_A, C, S::THREADS>(sh.A_qk[chunk % SECOND], p.mid.A_qk + cell * C * C);
    copy_tile<C, K, S::LD_K, K, S::THREADS>(sh.k_decayed[chunk % SECOND], p.mid.k_decayed + cell * C * K);
  };
  constexpr int AHEAD = FIRST - 1;  // chunks that copies run ahead
#pragma unroll
  for (int chunk = 0; chunk < (AHEAD ? AHEAD : 1); ++chunk) {
    if (chunk < chunks) copy_first(chunk);
    if (SECOND > 1 && chunk < chunks) copy_second(chunk);
    copies_commit();
  }
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    copies_wait<(FIRST > 2 ? FIRST - 2 : 0)>();
    __syncthreads();  // the state and this chunk's tiles are there; those of the last chunk may be overwritten
    if (SECOND == 1) {
      copy_second(chunk);
      copies_commit();
    }
    if (FIRST > 1) {
      if (chunk + AHEAD < chunks) copy_first(chunk + AHEAD);
      if (SECOND > 1 && chunk + AHEAD < chunks) copy_second(chunk + AHEAD);
      copies_commit();
    }
    const int place = int(chunk % FIRST), place2 = int(chunk % SECOND);

    float sum[N][4] = {};
    multiply<N, K / 8>(sum, (output ? sh.q_decayed : sh.w)[place] + row * S::LD_W + frag_a_offset<S::LD_W>(), sh.state, K / 8);
    if (!output) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float v_new[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 u = *reinterpret_cast<const float2 *>(&sh.u[place][(row + g + half * 8) * S::LD_U + n * 8 + 2 * t]);
          v_new[2 * half] = u.x - sum[n][2 * half];
          v_new[2 * half + 1] = u.y - sum[n][2 * half + 1];
        }
        put_c<N>(sh.v_new, row, n, v_new);
      }
    }
    float decay[S::OWN][2];
#pragma unroll
    for (int m = 0; m < S::OWN; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = (warp + m * S::WARPS) * 16 + g + half * 8;
        decay[m][half] = k < K ? sh.decay[place][k] : 0.f;
      }
    }
    if (SECOND == 1) copies_wait<FIRST == 2 ? 1 : 0>();
    __syncthreads();  // v_new, A_qk and k_decayed are there; the state and, with a single place, w, q_decayed, u, decay may be overwritten
    if (FIRST == 1) {
      if (chunk + 1 < chunks) copy_first(chunk + 1);
      copies_commit();
    }
    if (output) {
      multiply<N, C / 8>(sum, sh.A_qk[place2] + row * S::LD_A + frag_a_offset<S::LD_A>(), sh.v_new, row / 8 + 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t token = chunk * C + row + g + half * 8;
        if (token < length) {
          float *o = const_cast<float *>(row_of(p.o, batch, head, first + token)) + v0 + 2 * t;
#pragma unroll
          for (int n = 0; n < N; ++n) *reinterpret_cast<float2 *>(o + n * 8) = make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < S::OWN; ++m) {
      const int k0 = (warp + m * S::WARPS) * 16;
      if (k0 < K) {
        float added[N][4] = {};
#pragma unroll
        for (int j = 0; j < C / 8; ++j) {
          const float *x = sh.k_decayed[place2] + (j * 8 + t) * S::LD_K + k0 + g;
          const FragA a = frag_a(x[0], x[8], x[4 * S::LD_K], x[4 * S::LD_K + 8]);
#pragma unroll
          for (int n = 0; n < N; ++n) mma3(added[n], a, get_b(sh.v_new + (j * N + n) * 32));
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) state[m][n][e] = fmaf(decay[m][e / 2], state[m][n][e], added[n][e]);
          put_c<N>(sh.state, k0, n, state[m][n]);
        }
      }
    }
  }
  if (p.final_state != nullptr) {
#pragma unroll
    for (int m = 0; m < S::OWN; ++m) {
      const int k0 = (warp + m * S::WARPS) * 16;
      if (k0 >= K) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          p.final_state[state_at(k0 + g + e / 2 * 8, v0 + n * 8 + 2 * t + e % 2)] = state[m][n][e];
      }
    }
  }
}

}  // namespace kda
