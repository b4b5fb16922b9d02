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
// The solve is block substitution: 16 x 16 diagonal blocks are inverted exactly, row by row; the rest is products.
#pragma once

#include "gate.cuh"
#include "mma.cuh"

namespace kda {

constexpr int log2_of(int x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }
constexpr int larger(int a, int b) { return a > b ? a : b; }

template <int K, int V, int C>
struct Intra {
  static_assert(K % 32 == 0 && V % 32 == 0 && (C == 32 || C == 64), "unsupported sizes");
  static constexpr int SLICE = 16;  // channels at a time
  static constexpr int OWN = 4;     // consecutive tokens of a thread
  static constexpr int GROUPS = C / OWN;
  static constexpr int THREADS = SLICE * GROUPS;
  static constexpr int WARPS = THREADS / 32;
  static constexpr int LEVELS = log2_of(C);
  static constexpr int HALF = C / 2;  // rows, and columns, of a level
  // Row strides in floats: multiples of 4, and such that a fragment's 32 loads fall into 32 banks.
  static constexpr int LD_LEVEL = SLICE + 4;
  static constexpr int LD_K = K + 8;
  static constexpr int LD_V = V + 8;
  static constexpr int LD_A = C + 8;
  static constexpr int LD_INV = 20;
  static constexpr int PART = HALF * LD_LEVEL;  // q rows, k rows or columns of one level
  static constexpr int TILES = (LEVELS - 1 < 4 ? LEVELS : 4) * (C / 16) + (C >= 32 ? (C / 16) * 2 : 0) + (C >= 64 ? (C / 16) * 4 : 0);
  static constexpr int WARP_TILES = TILES / WARPS;
  static_assert(TILES % WARPS == 0, "every warp has as many tiles");

  struct Shared {
    float levels[larger(LEVELS * 3 * PART, C * LD_V)];  // later the right sides and solution u
    float w[C * LD_K];
    float A[C * LD_A];  // A_qk below and on the diagonal, A_kk transposed above it
    float inverse[C * LD_INV];
    float totals[GROUPS * SLICE];
    float beta[C];
    float q_norm[C];
    float k_norm[C];
  };
};

// Tile `id` of the pair products: level b, 8 odd tokens (rows), 8 even tokens (columns). Levels 1, 2, 4, 8 have C/16 tiles each.
template <int C>
struct PairTile {
  int level, rows, columns;
  __device__ explicit PairTile(int id) {
    constexpr int N = C / 16;
    if (id < 4 * N) {
      level = id / N, rows = columns = id % N;
    } else if (id < 6 * N) {
      id -= 4 * N;
      level = 4, rows = id / 2, columns = (rows & ~1) + id % 2;
    } else {
      id -= 6 * N;
      level = 5, rows = id / 4, columns = id % 4;
    }
  }
};

// 1 / sqrt(sum x^2 + 1e-6) of every row, a warp per row.
template <int K, int C, int WARPS>
__device__ void row_norms(const kda_tensor &x, int64_t batch, int64_t head, const Tokens &tokens, float *norms) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = warp; i < C; i += WARPS) {
    float sum = 0.f;
    if (i < tokens.length) {
      const float *row = row_of(x, batch, head, tokens.first + i);
      for (int d = lane; d < K; d += 32) sum += row[d] * row[d];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) norms[i] = 1.f / sqrtf(sum + 1e-6f);
  }
}

// The inverse of one unit lower 16 x 16 diagonal block, a thread per column: x_r = -(A[r,c] + sum_{c<j<r} A[r,j] x_j).
template <int LD_A, int LD_INV>
__device__ void invert_diagonal(const float *A, float *inverse, int block, int column) {
  const float *L = A + block * 16 * (LD_A + 1);  // L[j * LD_A + r] = A_kk[r, j]
  float x[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < r; ++j) sum = fmaf(L[j * LD_A + r], x[j], sum);
    x[r] = (r == column ? 1.f : 0.f) - sum;
    inverse[(block * 16 + r) * LD_INV + column] = x[r];
  }
}

// X <- (I + A_kk)^-1 X for N * 8 columns of X, by one warp.
template <int C, int N, int LD_A, int LD_INV, int LD_X>
__device__ void solve_columns(const float *A, const float *inverse, float *X) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < C; i += 16) {
    float sum[N][4] = {};
    for (int j = 0; j < i; j += 8) {
      const float *L = A + (j + t) * LD_A + i + g;
      const FragA a = frag_a(L[0], L[8], L[4 * LD_A], L[4 * LD_A + 8]);
#pragma unroll
      for (int n = 0; n < N; ++n) mma3(sum[n], a, frag_b(X[(j + t) * LD_X + n * 8 + g], X[(j + t + 4) * LD_X + n * 8 + g]));
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 *x = reinterpret_cast<float2 *>(&X[(i + g + half * 8) * LD_X + n * 8 + 2 * t]);
        const float2 before = *x;
        *x = make_float2(before.x - sum[n][2 * half], before.y - sum[n][2 * half + 1]);
        sum[n][2 * half] = sum[n][2 * half + 1] = 0.f;
      }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 16; j += 8) {
      float x[4];
      load_blocks(x, inverse + i * LD_INV + j + frag_a_offset<LD_INV>());
      const FragA a = frag_a(x);
#pragma unroll
      for (int n = 0; n < N; ++n) mma3(sum[n], a, frag_b(X[(i + j + t) * LD_X + n * 8 + g], X[(i + j + t + 4) * LD_X + n * 8 + g]));
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2 *>(&X[(i + g + half * 8) * LD_X + n * 8 + 2 * t]) = make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
    }
    __syncwarp();
  }
}

// [C, N * 8] columns of shared memory to rows of D floats in device memory, by one warp, 16 bytes a lane.
template <int C, int N, int LD_X, int D>
__device__ void store_columns(const float *X, float *out) {
  constexpr int QUADS = N * 2;
  for (int e = threadIdx.x % 32; e < C * QUADS; e += 32) {
    const int row = e / QUADS, column = e % QUADS * 4;
    *reinterpret_cast<float4 *>(out + row * D + column) = *reinterpret_cast<const float4 *>(X + row * LD_X + column);
  }
}

// Blocks that share a multiprocessor: two have the shared memory on sm_90 and sm_100.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KDA_INTRA_BLOCKS 2
#else
#define KDA_INTRA_BLOCKS 1
#endif

template <int K, int V, int C>
__global__ __launch_bounds__(Intra<K, V, C>::THREADS, KDA_INTRA_BLOCKS) void intra_kernel(const __grid_constant__ Params p) {
  using S = Intra<K, V, C>;
  extern __shared__ __align__(16) unsigned char memory[];
  typename S::Shared &sh = *reinterpret_cast<typename S::Shared *>(memory);

  const int64_t cell = blockIdx.x;  // [rows, slots]
  const int64_t row = cell / p.sequences.slots, slot = cell % p.sequences.slots;
  const int64_t batch = row / p.value_heads, head = row % p.value_heads, key_head = head / p.group;
  const Tokens tokens = p.sequences.chunk(batch, slot, C);
  if (tokens.length <= 0) return;
  const int length = int(tokens.length < C ? tokens.length : C);

  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g8 = lane / 4, t4 = lane % 4;
  const int channel = tid % S::SLICE, group = tid / S::SLICE;

  for (int i = tid; i < C; i += S::THREADS) {
    sh.beta[i] = i < length ? write_strength(p.beta_kind, *row_of(p.beta, tokens.batch, head, tokens.first + i)) : 0.f;
    sh.q_norm[i] = sh.k_norm[i] = 1.f;
  }
  __syncthreads();
  if (p.l2norm) {
    row_norms<K, C, S::WARPS>(p.q, tokens.batch, key_head, tokens, sh.q_norm);
    row_norms<K, C, S::WARPS>(p.k, tokens.batch, key_head, tokens, sh.k_norm);
    __syncthreads();
  }

  float *pair_place = sh.levels + 2 * group * S::LD_LEVEL + channel;  // of levels 1 and 2
  const float a = p.A_log != nullptr ? expf(p.A_log[head]) : 1.f;
  const int token0 = group * S::OWN;
  const float *q_from = row_of(p.q, tokens.batch, key_head, tokens.first + token0) + channel;
  const float *k_from = row_of(p.k, tokens.batch, key_head, tokens.first + token0) + channel;
  const float *g_from = row_of(p.g, tokens.batch, head, tokens.first + token0) + channel;
  float q_next[S::OWN], k_next[S::OWN], g_next[S::OWN];
  auto load = [&]() {  // the next slice
#pragma unroll
    for (int i = 0; i < S::OWN; ++i) {
      q_next[i] = token0 + i < length ? q_from[i * p.q.token_stride] : 0.f;
      k_next[i] = token0 + i < length ? k_from[i * p.k.token_stride] : 0.f;
      g_next[i] = token0 + i < length ? g_from[i * p.g.token_stride] : 0.f;
    }
    q_from += S::SLICE, k_from += S::SLICE, g_from += S::SLICE;
  };
  const int64_t out = (cell * C + token0) * K + channel;

  float pairs[S::WARP_TILES][4] = {};
  float diagonal[S::OWN] = {};
  load();
  for (int base = 0; base < K; base += S::SLICE) {
    const int d = base + channel;
    float q[S::OWN], k[S::OWN], kb[S::OWN], prefix[S::OWN], suffix[S::OWN];
    const float bias = p.dt_bias != nullptr ? p.dt_bias[head * K + d] : 0.f;
#pragma unroll
    for (int i = 0; i < S::OWN; ++i) {
      const int token = token0 + i;
      q[i] = p.scale * (q_next[i] * sh.q_norm[token]);
      k[i] = k_next[i] * sh.k_norm[token];
      kb[i] = k[i] * sh.beta[token];
      prefix[i] = token0 + i < length ? expf(log_decay(p.gate, g_next[i] + bias, a, p.lower_bound)) : 1.f;
      suffix[i] = 1.f;
      diagonal[i] = fmaf(q[i], k[i], diagonal[i]);
    }
    // Row `i` of the thread's place in a level: tokens of odd blocks are rows, of even ones columns.
    auto put_row = [&](float *at, int i, float decay) {
      at[0] = q[i] * decay;
      at[S::PART] = kb[i] * decay;
    };
    auto put_column = [&](float *at, int i, float decay) { at[2 * S::PART] = k[i] * decay; };
    // Levels 1 and 2: pairs inside the thread's four tokens.
#pragma unroll
    for (int level = 0; level < 2; ++level) {
      const int b = 1 << level;
#pragma unroll
      for (int i = 0; i < S::OWN; ++i) {
        float *at = pair_place + level * 3 * S::PART + (i / (2 * b) * b + i % b) * S::LD_LEVEL;
        if (i / b % 2) put_row(at, i, prefix[i]);
        else put_column(at, i, suffix[i]);
      }
#pragma unroll
      for (int i = 0; i < S::OWN; ++i)
        if (i / b % 2 == 0) suffix[i] *= prefix[i / b * b + 2 * b - 1];
#pragma unroll
      for (int i = S::OWN - 1; i >= 0; --i)
        if (i / b % 2) prefix[i] *= prefix[i / b * b - 1];
    }
    sh.totals[group * S::SLICE + channel] = prefix[S::OWN - 1];
    __syncthreads();
    // Levels 4 and up: pairs of blocks of groups.
    float before = 1.f, after = 1.f;
#pragma unroll
    for (int level = 2; level < S::LEVELS; ++level) {
      const int b = 1 << (level - 2), block = group >> (level - 2);
      float sibling = 1.f;
#pragma unroll
      for (int i = 0; i < b; ++i) sibling *= sh.totals[((block ^ 1) * b + i) * S::SLICE + channel];
      float *at = sh.levels + level * 3 * S::PART + ((block / 2 * b + group % b) * S::OWN) * S::LD_LEVEL + channel;
      if (block % 2) {
#pragma unroll
        for (int i = 0; i < S::OWN; ++i) put_row(at + i * S::LD_LEVEL, i, prefix[i] * before);
        before *= sibling;
      } else {
#pragma unroll
        for (int i = 0; i < S::OWN; ++i) put_column(at + i * S::LD_LEVEL, i, suffix[i] * after);
        after *= sibling;
      }
    }
#pragma unroll
    for (int i = 0; i < S::OWN; ++i) {
      prefix[i] *= before;
      p.mid.q_decayed[out + i * K + base] = q[i] * prefix[i];
      p.mid.k_decayed[out + i * K + base] = k[i] * (suffix[i] * after);
      sh.w[(token0 + i) * S::LD_K + d] = kb[i] * prefix[i];
    }
    if (group == S::GROUPS - 1) p.mid.decay[cell * K + d] = prefix[S::OWN - 1];
    __syncthreads();
    if (base + S::SLICE < K) load();
#pragma unroll
    for (int n = 0; n < S::WARP_TILES; ++n) {
      const PairTile<C> tile(warp + n * S::WARPS);
      const float *level = sh.levels + tile.level * 3 * S::PART;
      float columns[4];  // B of both steps
      load_blocks(columns, level + 2 * S::PART + (tile.columns * 8 + lane % 8) * S::LD_LEVEL + lane / 8 * 4);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float rows[4];  // q above k
        load_blocks(rows, level + lane / 8 % 2 * S::PART + (tile.rows * 8 + lane % 8) * S::LD_LEVEL + j * 8 + lane / 16 * 4);
        mma3(pairs[n], frag_a(rows), frag_b(columns[2 * j], columns[2 * j + 1]));
      }
    }
    __syncthreads();
  }

  // The pair products to their places; only tokens of the same pair of blocks meet.
#pragma unroll
  for (int n = 0; n < S::WARP_TILES; ++n) {
    const PairTile<C> tile(warp + n * S::WARPS);
    const int b = 1 << tile.level, r = tile.rows * 8 + g8, i = (r >> tile.level) * 2 * b + b + r % b;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int c = tile.columns * 8 + 2 * t4 + e, j = (c >> tile.level) * 2 * b + c % b;
      if (r >> tile.level == c >> tile.level) {
        sh.A[i * S::LD_A + j] = pairs[n][e];
        sh.A[j * S::LD_A + i] = pairs[n][2 + e];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < S::OWN; ++i) {
#pragma unroll
    for (int step = S::SLICE / 2; step > 0; step /= 2) diagonal[i] += __shfl_xor_sync(0xffffffffu, diagonal[i], step);
    if (channel == i) sh.A[(group * S::OWN + i) * (S::LD_A + 1)] = diagonal[i];
  }
  float *u = sh.levels;
  for (int e = tid; e < C * (V / 4); e += S::THREADS) {
    const int i = e / (V / 4), d = e % (V / 4) * 4;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (i < length) x = *reinterpret_cast<const float4 *>(row_of(p.v, tokens.batch, head, tokens.first + i) + d);
    const float beta = sh.beta[i];
    *reinterpret_cast<float4 *>(u + i * S::LD_V + d) = make_float4(beta * x.x, beta * x.y, beta * x.z, beta * x.w);
  }
  __syncthreads();
  if (tid < C) invert_diagonal<S::LD_A, S::LD_INV>(sh.A, sh.inverse, tid / 16, tid % 16);
  for (int e = tid; e < C * C; e += S::THREADS) {
    const int i = e / C, j = e % C;
    p.mid.A_qk[cell * C * C + e] = j <= i ? sh.A[i * S::LD_A + j] : 0.f;
  }
  __syncthreads();

  constexpr int N = (K + V) / S::WARPS / 8 < 4 ? (K + V) / S::WARPS / 8 : 4;  // 8-column tiles at a time
  for (int column = warp * N * 8; column < K + V; column += S::WARPS * N * 8) {
    if (column < K) {
      solve_columns<C, N, S::LD_A, S::LD_INV, S::LD_K>(sh.A, sh.inverse, sh.w + column);
      store_columns<C, N, S::LD_K, K>(sh.w + column, p.mid.w + cell * C * K + column);
    } else {
      solve_columns<C, N, S::LD_A, S::LD_INV, S::LD_V>(sh.A, sh.inverse, u + column - K);
      store_columns<C, N, S::LD_V, V>(u + column - K, p.mid.u + cell * C * V + column - K);
    }
  }
}

}  // namespace kda
