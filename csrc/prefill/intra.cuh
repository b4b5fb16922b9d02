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
// The solve is block substitution: 16 x 16 diagonal blocks are inverted exactly, row by row; the rest is products. The results go into
// the chunk's record as tiles (tiles.cuh).
#pragma once

#include "gate.cuh"
#include "mma.cuh"
#include "tiles.cuh"

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
  static constexpr int LD_K = K + 4;
  static constexpr int LD_V = V + 4;
  static constexpr int LD_A = C + 8;
  static constexpr int LD_INV = 20;
  static constexpr int PART = HALF * LD_LEVEL;  // q rows, k rows or columns of one level
  static constexpr int TILES = (LEVELS - 1 < 4 ? LEVELS : 4) * (C / 16) + (C >= 32 ? (C / 16) * 2 : 0) + (C >= 64 ? (C / 16) * 4 : 0);
  static constexpr int WARP_TILES = TILES / WARPS;
  static_assert(TILES % WARPS == 0, "every warp has as many tiles");

  static constexpr int LOWER = C / 16 * (C / 16 - 1) / 2;  // tiles of A_kk below the diagonal blocks

  struct Shared {
    union {
      float levels[LEVELS * 3 * PART];
      struct {
        float u[C * LD_V];  // right sides, then the solution
        Tile lower[LOWER], inverse_tiles[C / 16];
        float lower_power[LOWER], inverse_power[C / 16];
      };
    };
    float w[C * LD_K];
    float A[C * LD_A];  // A_qk below and on the diagonal, A_kk transposed above it
    float inverse[C * LD_INV];
    float totals[GROUPS * SLICE];
    float beta[C];
    float q_norm[C];
    float k_norm[C];
    uint32_t k_largest[WARPS];
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

// X <- (I + A_kk)^-1 X for N * 8 columns of X, by one warp. X is float32; as they are read, rows give way to their hi and lo, which take
// the same place. `done(i, x)` is given the C fragments of row block i.
template <int N, int LD, typename Shared, typename Done>
__device__ __forceinline__ void solve_columns(const Shared &sh, int blocks, float *X, const Done &done) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t *words = reinterpret_cast<uint32_t *>(X);
  const Rows<LD> rows{words, words + N * 4};
  const uint32_t *lane_row = rows.lane_in_order();
  float power[4];  // 1 / m of the solved blocks
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= blocks) break;
    float sum[N][4], x[N][4] = {};
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 right = *reinterpret_cast<const float2 *>(&X[(i * 16 + g + half * 8) * LD + n * 8 + 2 * t]);
        sum[n][2 * half] = right.x, sum[n][2 * half + 1] = right.y;
      }
    }
    auto add_product = [&](float (&to)[N][4], const Tile &left, int block, float factor) {
      TileA a;
      a.read(left);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t b[4];
        load_transposed(b, lane_row + block * 16 * LD + n * 4);
        multiply_add(to[n], a, b, factor, factor);
      }
    };
#pragma unroll
    for (int j = 0; j < i; ++j) {
      const int tile = i * (i - 1) / 2 + j;
      add_product(sum, sh.lower[tile], j, -sh.lower_power[tile] * power[j]);
    }
    __syncwarp();
    const float right = rows.put(i * 16, sum);
    __syncwarp();
    add_product(x, sh.inverse_tiles[i], i, sh.inverse_power[i] * right);
    __syncwarp();
    power[i] = rows.put(i * 16, x);
    done(i, x);
    __syncwarp();
  }
}

// Four tokens of a channel, times a decay, as part of the tile that has tokens as rows. Two lanes with neighbouring channels share the
// work: the even one has the first two tokens, the odd one the others. Returns 1 / m of the warp's eight tokens.
__device__ __forceinline__ float store_row_tile(Tile &tile, const float (&x)[4], int token, int channel) {
  const Power power(warp_largest(largest_of(x)));
  const bool odd = channel % 2;
  const float other0 = __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[2], 1), other1 = __shfl_xor_sync(0xffffffffu, odd ? x[1] : x[3], 1);
  const int pair = channel / 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float other = i ? other1 : other0, mine = odd ? x[2 + i] : x[i];
    const int row = token % 16 + (odd ? 2 : 0) + i;
    uint32_t hi, lo;
    split_pair(odd ? other : mine, odd ? mine : other, power.m, hi, lo);
    const int lane = row % 8 * 4 + pair % 4, word = row / 8 + pair / 4 * 2;
    reinterpret_cast<uint32_t *>(&tile[0][lane])[word] = hi;
    reinterpret_cast<uint32_t *>(&tile[1][lane])[word] = lo;
  }
  return power.inverse;
}

// Four tokens of a channel as part of the tile that has channels as rows. Two lanes whose channels are 8 apart share the work likewise.
__device__ __forceinline__ void store_column_tile(Tile &tile, const float (&x)[4], int token, int channel, float m) {
  const bool low = channel >= 8;  // of the tile's rows
  const float other0 = __shfl_xor_sync(0xffffffffu, low ? x[0] : x[2], 8), other1 = __shfl_xor_sync(0xffffffffu, low ? x[1] : x[3], 8);
  uint2 hi, lo;
  split_pair(low ? other0 : x[0], low ? other1 : x[1], m, hi.x, lo.x);
  split_pair(low ? x[2] : other0, low ? x[3] : other1, m, hi.y, lo.y);
  const int lane = channel % 8 * 4 + token / 4 % 4;
  reinterpret_cast<uint2 *>(&tile[0][lane])[low] = hi;
  reinterpret_cast<uint2 *>(&tile[1][lane])[low] = lo;
}

// A_qk, the lower triangle of A [C, C], as tiles, a warp per tile.
template <int C, int LD_A>
__device__ __forceinline__ void store_triangle(const float *A, Tile *tiles, float2 *powers, int start, int step) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int tile = start; tile < (C / 16) * (C / 16 + 1) / 2; tile += step) {
    int i = 0;
    while ((i + 1) * (i + 2) / 2 <= tile) ++i;
    const int first = (tile - i * (i + 1) / 2) * 16 + 4 * t;  // token
    float x[8];  // row g's two pairs at 0 and 4, row g + 8's at 2 and 6
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = i * 16 + g + half * 8;
      const float4 a = *reinterpret_cast<const float4 *>(A + row * LD_A + first);
      const float four[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e / 2 * 4 + half * 2 + e % 2] = first + e <= row ? four[e] : 0.f;
    }
    const Power power(warp_largest(largest_of(x)));
    store_tile(tiles[tile], x, power.m);
    if (lane == 0) powers[tile] = make_float2(power.inverse, power.inverse);
  }
}

// C fragments to 16 rows of D floats in device memory.
template <int N, int D>
__device__ __forceinline__ void store_rows(float *to, const float (&x)[N][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2 *>(to + (g + half * 8) * D + n * 8 + 2 * t) = make_float2(x[n][2 * half], x[n][2 * half + 1]);
  }
}

// The blocks of A_kk below the diagonal blocks as tiles: column j of A holds A_kk[j, ..].
template <int C, int LD_A, typename Shared>
__device__ __forceinline__ void split_lower(Shared &sh, int first, int step) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int tile = first; tile < C / 16 * (C / 16 - 1) / 2; tile += step) {
    int i = 1;
    while (i * (i + 1) / 2 <= tile) ++i;
    const float *from = sh.A + ((tile - i * (i - 1) / 2) * 16 + 2 * t) * LD_A + i * 16 + g;
    const float x[8] = {from[0],        from[LD_A],     from[8],            from[LD_A + 8],
                        from[8 * LD_A], from[9 * LD_A], from[8 * LD_A + 8], from[9 * LD_A + 8]};
    const Power power(warp_largest(largest_of(x)));
    store_tile(sh.lower[tile], x, power.m);
    if (lane == 0) sh.lower_power[tile] = power.inverse;
  }
}

// Diagonal block `block`: a warp inverts it, half a warp per block, and makes tiles of both.
template <int LD_A, int LD_INV, typename Shared>
__device__ __forceinline__ void invert_two(Shared &sh, int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  invert_diagonal<LD_A, LD_INV>(sh.A, sh.inverse, 2 * warp + lane / 16, lane % 16);
  __syncwarp();
#pragma unroll
  for (int block = 2 * warp; block < 2 * warp + 2; ++block) {
    const float *from = sh.inverse + (block * 16 + g) * LD_INV + 2 * t;
    const float x[8] = {from[0], from[1], from[8 * LD_INV],     from[8 * LD_INV + 1],
                        from[8], from[9], from[8 * LD_INV + 8], from[8 * LD_INV + 9]};
    const Power power(warp_largest(largest_of(x)));
    store_tile(sh.inverse_tiles[block], x, power.m);
    if (lane == 0) sh.inverse_power[block] = power.inverse;
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
  Record<K, V, C> &record = static_cast<Record<K, V, C> *>(p.mid.records)[cell];

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
      q[i] *= prefix[i];
      k[i] *= suffix[i] * after;
      sh.w[(token0 + i) * S::LD_K + d] = kb[i] * prefix[i];
    }
    if (group == S::GROUPS - 1) record.small.decay[d] = prefix[S::OWN - 1];
    const int row_tile = token0 / 16 * (K / 16) + base / 16, column_tile = base / 16 * (C / 16) + token0 / 16;
    const float q_power = store_row_tile(record.q[row_tile], q, token0, channel);
    const uint32_t k_largest = warp_largest(largest_of(k));
    if (lane == 0) {
      reinterpret_cast<float *>(&record.small.q[row_tile])[token0 / 8 % 2] = q_power;
      sh.k_largest[warp] = k_largest;
    }
    __syncthreads();
    if (base + S::SLICE < K) load();
    const Power k_power(larger_of(sh.k_largest[warp & ~1], sh.k_largest[warp | 1]));
    store_column_tile(record.k[column_tile], k, token0, channel, k_power.m);
    if (lane == 0 && warp % 2 == 0) record.small.k[column_tile] = make_float2(k_power.inverse, k_power.inverse);
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
      solve_columns<N, S::LD_K>(sh, C / 16, sh.w + column, [&](int i, const float (&x)[N][4]) {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
          const float both[8] = {x[n][0], x[n][1], x[n][2], x[n][3], x[n + 1][0], x[n + 1][1], x[n + 1][2], x[n + 1][3]};
          const Power power(warp_largest(largest_of(both)));
          const int tile = i * (K / 16) + column / 16 + n / 2;
          store_tile(record.w[tile], both, power.m);
          if (lane == 0) record.small.w[tile] = make_float2(power.inverse, power.inverse);
        }
        if (p.mid.w != nullptr) store_rows<N, K>(p.mid.w + (cell * C + i * 16) * K + column, x);
      });
    } else {
      solve_columns<N, S::LD_V>(sh, C / 16, sh.u + column - K, [&](int i, const float (&x)[N][4]) {
#pragma unroll
        for (int n = 0; n < N; ++n) record.u[i * (V / 8) + (column - K) / 8 + n][lane] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
        if (p.mid.u != nullptr) store_rows<N, V>(p.mid.u + (cell * C + i * 16) * V + column - K, x);
      });
    }
  }
}

}  // namespace kda
