// Products over V. With e = r - lower (beta r), what the state gets wrong about each key, and v_new = beta e:
//
//   d_beta_i = (d_v_i / beta_i) . e_i        d_A_qk = scale d_o v_new^T,  j <= i        d_A_kk / beta = -d_v v_new^T,  j < i
//   d_q_decayed = scale d_o S^T        d_k_in = -d_v S^T        d_k_decayed = v_new dS'^T        d_decay = sum_v S dS'
#pragma once
#include "../prefill/hopper_gate.cuh"
#include "../prefill/hopper_wgmma.cuh"
#include "hopper_gradient_block.cuh"

namespace kda::hopper {

using Results = float[4][4];  // 16 tokens, 32 channels: four C tiles side by side

// Block (block, j) of lower Diag(beta) as an A operand: two bfloat16 numbers whose sum it is. `rows`: where lower's rows of the lane's two
// tokens lie, with the lane's first column; row_of moves bits, so columns differ by bits too.
template <int HEAD>
struct Lower {
  uint32_t rows[2];
  int first;  // row_of the lane's first column

  __device__ __forceinline__ Lower(bool wide, int bits, const Seat<HEAD>& at) : first(row_of(2 * (at.lane % 4), bits)) {
    if (wide) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int from = row_of(at.result_row() + 8 * half, bits);
        rows[half] = at.smem + at.kAtLower + ((from * 256 + ((from & 7) << 4)) ^ (first << 2));
      }
    } else {
      rows[0] = at.smem + at.kAtLower + pair_at(16 * at.block + (at.lane & 15), at.lane >> 4);
    }
  }

  template <bool WIDE>
  __device__ __forceinline__ void load(uint32_t (&big)[4], uint32_t (&small)[4], const float* beta, int bits, int j,
                                       const Seat<HEAD>& at) const {
    float x[4][2], b[2][2];  // [operand][column]; [columns 0 and 1 | 8 and 9]
    const int to_j = row_of(16 * j, bits);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) b[i][c] = beta[first | to_j | row_of(8 * i + c, bits)];
    if (WIDE) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          x[i][c] = __uint_as_float(load_shared_word(rows[i % 2] ^ ((to_j | row_of(8 * (i / 2) + c, bits)) << 2)));
    } else {
      uint32_t halves[4];
      load_matrices(halves, rows[0] ^ (j << 5));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 y = unpack_half(halves[i]);
        x[i][0] = y.x, x[i][1] = y.y;
      }
    }
    if (j == at.block)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) x[i][c] = 2 * (at.lane % 4) + 8 * (i / 2) + c < at.lane / 4 + 8 * (i % 2) ? x[i][c] : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float y0 = x[i][0] * b[i / 2][0], y1 = x[i][1] * b[i / 2][1];
      big[i] = pack_bf16(y0, y1);
      small[i] = pack_bf16(y0 - low(big[i]), y1 - high(big[i]));
    }
  }
};

template <bool WIDE, int HEAD>
__device__ __forceinline__ void lower_times_r(Results& acc, int bits, const float* beta, const Seat<HEAD>& at) {
  const Lower<HEAD> lower(WIDE, bits, at);
  uint32_t depth = at.smem + at.kAtR + tile_at<kChunk>(at.lane & 15, 4 * at.slice + (at.lane >> 4));
#pragma unroll 1
  for (int j = 0; j <= at.block; ++j, depth += 2 * at.kEight) {
    uint32_t big[4], small[4], b[2][4];
    load_matrices_transposed(b[0], depth), load_matrices_transposed(b[1], depth ^ (2 << 4));
    lower.template load<WIDE>(big, small, beta, bits, j, at);
#pragma unroll
    for (int t = 0; t < 4; ++t) mma_bf16(acc[t], big, b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
#pragma unroll
    for (int t = 0; t < 4; ++t) mma_bf16(acc[t], small, b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
  }
}

// Too small a given beta to divide by what was multiplied by it and rounded.
__device__ __forceinline__ bool too_small(float beta) { return fabsf(beta) < 5.421010862427522e-20f; }

// v_new of the warp's tokens, value channels of its slice, into shared memory, and its share of d_v . e.
template <int HEAD>
__device__ __forceinline__ void make_v_new(const HopperGradient& p, const Chunk& c, const float* beta, const Seat<HEAD>& at) {
  Results acc = {};
  p.lower_float32 ? lower_times_r<true>(acc, p.group_bits, beta, at) : lower_times_r<false>(acc, 0, beta, at);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = at.result_row() + 8 * half;
    const uint32_t tile = at.smem + at.result_in_tile() + half * at.kEight;
    const float strength = beta[row_of(row, p.group_bits)];
    uint32_t d[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) d[t] = load_shared_word((tile ^ (t << 4)) + at.kAtDV);
    if (p.alone && too_small(strength) && row < c.length) {
      const auto* alone = static_cast<const uint32_t*>(p.alone) + (c.item * kChunk + row) * (HEAD / 2) + 16 * at.slice + at.lane % 4;
#pragma unroll
      for (int t = 0; t < 4; ++t) d[t] = alone[4 * t];
    }
    float dot = 0.0f;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t r = load_shared_word((tile ^ (t << 4)) + at.kAtR);
      const float e0 = low(r) - acc[t][2 * half], e1 = high(r) - acc[t][2 * half + 1];
      dot = fmaf(low(d[t]), e0, fmaf(high(d[t]), e1, dot));
      store_shared((tile ^ (t << 4)) + at.kAtVNew, pack_bf16(strength * e0, strength * e1));
    }
    dot += __shfl_xor_sync(~0u, dot, 1);
    dot += __shfl_xor_sync(~0u, dot, 2);
    if (at.lane % 4 == 0) at.floats(at.kAtDots)[row * at.kSlices + at.slice] = dot;
  }
}

// What every slice has of one sum.
template <int HEAD>
__device__ __forceinline__ auto load_slices(const float* at) {
  return *reinterpret_cast<const std::conditional_t<HEAD == 64, float2, float4>*>(at);
}
__device__ __forceinline__ float sum_of_slices(float2 x) { return x.x + x.y; }
__device__ __forceinline__ float sum_of_slices(float4 x) { return (x.x + x.y) + (x.z + x.w); }

// d_beta of one token per thread, from the slices' shares of d_v . e.
template <int HEAD>
__device__ __forceinline__ void write_d_beta(const HopperGradient& p, const Chunk& c, const float* factors, int row, const Seat<HEAD>& at) {
  if (row >= c.length) return;
  float d = sum_of_slices(load_slices<HEAD>(at.floats(at.kAtDots) + row * at.kSlices));
  if (p.in.beta_kind == Beta::given) {
    const float beta = factors[row_of(row, p.group_bits)];
    d = d / (too_small(beta) ? 1.0f : beta);
  } else {  // of s = 1 / (1 + e^-x), or 2 s: (1 - s) d, where d has the strength in it
    const int64_t from = c.offsets[3] + row * p.in.beta_strides.token;
    const float y = p.in.beta_float32 ? static_cast<const float*>(p.in.beta)[from]
                                      : __bfloat162float(static_cast<const __nv_bfloat16*>(p.in.beta)[from]);
    const float e = exp2_fast(-fabsf(y) * kLog2e);
    d = (y >= 0.0f ? e : 1.0f) * d * reciprocal_fast(1.0f + e);
  }
  const int64_t to = c.token + row * p.in.HV;
  if (p.in.beta_float32)
    static_cast<float*>(p.d_beta)[to] = d;
  else
    static_cast<uint16_t*>(p.d_beta)[to] = static_cast<uint16_t>(pack_bf16(d, 0.0f));
}

// Pairs of all tokens: a warp group makes columns of the gradient of A_qk or of A_kk, its warps 16 rows each, as results of wgmma. Those
// right of the diagonal are made too, and nobody reads them.
template <int HEAD>
struct Pairs {
  using At = Seat<HEAD>;
  static constexpr int kColumns = At::kNarrow ? 64 : 32, kTiles = kColumns / 8;
  float x[kColumns / 2];

  static __device__ __forceinline__ bool of_q(const At& at) { return at.slice < At::kSlices / 2; }
  static __device__ __forceinline__ int first(const At& at) { return At::kNarrow ? 0 : (at.slice & 1) * kColumns; }

  __device__ __forceinline__ void begin(const At& at) {
    static_assert(At::kAtDV == At::kAtDO + At::kTile, "");  // no choice between two addresses: registers would be spilled
    const uint32_t base = descriptor_base(at.smem), rows = base + ((At::kAtDO + at.slice / (At::kSlices / 2) * At::kTile) >> 4);
    const uint32_t columns = base + ((At::kAtVNew + first(at) * At::kPitch) >> 4);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < HEAD / 16; ++s) {
      const int step = s / 4 * At::kPanel + s % 4 * 32;
      wgmma_shared<0>(x, descriptor(rows, step), descriptor(columns, step), s > 0);
    }
    wgmma_commit();
  }

  // The diagonal of A_qk goes to shared memory. Returns the largest of the others.
  __device__ __forceinline__ float finish(const HopperGradient& p, const At& at) {
    wgmma_wait<0>();
    touch(x);
    const float by = of_q(at) ? p.in.scale : 1.0f;
    const int to_diagonal = 16 * at.block - first(at), left = to_diagonal + at.lane / 4 - 2 * (at.lane % 4);
    float largest = 0.0f;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&y)[2] = *reinterpret_cast<float(*)[2]>(x + 4 * t + 2 * half);
        y[0] *= by, y[1] *= by;
        if (of_q(at) && 8 * t == to_diagonal + 8 * half && at.lane % 4 == at.lane / 8)
          at.floats(at.kAtDiagonal)[at.result_row() + 8 * half] = at.lane & 4 ? y[1] : y[0];
        y[0] = 8 * (t - half) < left ? y[0] : 0.0f, y[1] = 8 * (t - half) + 1 < left ? y[1] : 0.0f;
        largest = fmaxf(largest, fmaxf(fabsf(y[0]), fabsf(y[1])));
      }
    return largest;
  }

  __device__ __forceinline__ void store(float unit, const At& at) const {
    const float by = of_q(at) ? unit : -unit;
    const uint32_t to = at.smem + at.kAtPairs + pair_at(at.result_row() + (of_q(at) ? 0 : kChunk), first(at) / 8) + at.lane % 4 * 4;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (first(at) + 8 * t >= 16 * at.block + 16) break;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared((to ^ (t << 4)) + half * 1024, pack_bf16(x[4 * t + 2 * half] * by, x[4 * t + 2 * half + 1] * by));
    }
  }
};

// A warp has eight rows of a state, its lanes four channels of four of them at once: all lanes the same, or either half of them its own.
template <int HEAD>
__device__ __forceinline__ int own_rows(const Seat<HEAD>& at) { return 4 * (at.lane / at.kLanes); }
template <int HEAD>
__device__ __forceinline__ int own_channel(const Seat<HEAD>& at) { return at.lane % at.kLanes; }  // the first, divided by four

// Four rows from `row` on of a float32 state [K, V], or [V, K], four channels per lane.
template <int HEAD>
__device__ __forceinline__ void load_rows(float (&x)[4][4], const float* state, int row, const Seat<HEAD>& at) {
#pragma unroll
  for (int r = 0; r < 4; ++r) unpack(x[r], __ldg(reinterpret_cast<const float4*>(state + (row + r) * HEAD + 4 * own_channel(at))));
}
// Where they lie in a tile [V, K]. V_FIRST: rows are the tile's, row r at ^ (r << 4) + r * kPitch. Else columns: of value channel j of the
// lane's four they are the four at ^ (j << 4) + j * kPitch.
template <bool V_FIRST, int HEAD>
__device__ __forceinline__ uint32_t rows_in_tile(int row, const Seat<HEAD>& at) {
  const int channel = own_channel(at);
  return V_FIRST ? tile_at<HEAD>(row, channel >> 1) + (channel & 1) * 8 : tile_at<HEAD>(4 * channel, row >> 3) + (row & 7) * 2;
}
template <bool V_FIRST, int HEAD>
__device__ __forceinline__ void load_rows(float (&x)[4][4], uint32_t tile) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[4];
    unpack(y, load_shared_pair((tile ^ (i << 4)) + i * Seat<HEAD>::kPitch));
#pragma unroll
    for (int j = 0; j < 4; ++j) (V_FIRST ? x[i][j] : x[j][i]) = y[j];
  }
}

// What rounding takes from the caller's state, or zeros if it is null, to a tile [V, K].
template <bool V_FIRST, int HEAD>
__device__ __forceinline__ void put_lost(uint32_t place, const float* state, const Seat<HEAD>& at) {
#pragma unroll 1
  for (int row = 8 * at.warp + own_rows(at); row < 8 * at.warp + 8; row += 512 / HEAD) {
    const uint32_t tile = at.smem + place + rows_in_tile<V_FIRST>(row, at);
    float x[4][4] = {};
    if (state) load_rows(x, state, row, at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = V_FIRST ? x[i][j] : x[j][i], y[j] -= low(pack_bf16(y[j], 0.0f));
      store_shared((tile ^ (i << 4)) + i * at.kPitch, uint2{pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])});
    }
  }
}

// Gradients of q_decayed, k_in and k_decayed: asked for. `add`: to what is there.
template <int HEAD>
__device__ __forceinline__ void begin_state_products(Results& d_q, Results& d_k, Results& d_c, int add, const Seat<HEAD>& at) {
  using At = Seat<HEAD>;
  float(&q)[16] = reinterpret_cast<float(&)[16]>(d_q), (&k)[16] = reinterpret_cast<float(&)[16]>(d_k);
  float(&columns)[16] = reinterpret_cast<float(&)[16]>(d_c);
  const uint32_t base = descriptor_base(at.smem);
  const uint32_t states = base + ((at.slice / 2 * At::kStatePanel + (at.slice & 1) * 64) >> 4);  // the warp group's channels
  touch(q), touch(k), touch(columns);
  wgmma_begin();
#pragma unroll
  for (int s = 0; s < HEAD / 16; ++s) {
    const int rows = s / 4 * At::kPanel + s % 4 * 32, depth = s * 2 * At::kEight;
    wgmma_shared<1>(q, descriptor(base, At::kAtDO + rows), descriptor(states, At::kAtS + depth), s > 0 || add);
    wgmma_shared<1>(k, descriptor(base, At::kAtDV + rows), descriptor(states, At::kAtS + depth), s > 0 || add);
    wgmma_shared<1>(columns, descriptor(base, At::kAtVNew + rows), descriptor(states, At::kAtDS + depth), s > 0 || add);
  }
  wgmma_commit();
}

// And made, divided by the chunk's power of two. Where S or dS' is the caller's, what rounding takes from it then lies in the tile's place
// and is multiplied too: where few tokens follow, or gates forget all that was before, it is the only rounding of a gate's gradient.
template <int HEAD>
__device__ __forceinline__ void finish_state_products(const HopperGradient& p, const Chunk& c, Results& d_q, Results& d_k, Results& d_c,
                                                      float unit, const Seat<HEAD>& at) {
  const auto wait = [&] {
    wgmma_wait<0>();
    touch(reinterpret_cast<float(&)[16]>(d_q)), touch(reinterpret_cast<float(&)[16]>(d_k)), touch(reinterpret_cast<float(&)[16]>(d_c));
  };
  wait();
  if (const int callers = c.states & (kInitial | kFinal); callers != 0) {
    __syncthreads();
    const Seat<HEAD> here = seat_of<HEAD>(at.bytes);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int place = i ? at.kAtDS : at.kAtS;
      const float* state = callers & (i ? kFinal : kInitial) ? i ? c.final : c.initial : nullptr;
      p.in.state_v_first ? put_lost<true>(place, state, here) : put_lost<false>(place, state, here);
    }
    fence_async();
    __syncthreads();
    begin_state_products(d_q, d_k, d_c, 1, here);
    wait();
  }
  const float unit_q = p.in.scale * unit;
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int r = 0; r < 4; ++r) d_q[t][r] *= unit_q, d_k[t][r] *= -unit, d_c[t][r] *= unit;
}

// The warp's part of sum_v S dS', four key channels per lane, and of half of its rows where a row has half of the lanes.
template <int HEAD>
__device__ __forceinline__ void store_part(float (&sum)[4], const Seat<HEAD>& at) {
  if constexpr (Seat<HEAD>::kNarrow) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] += __shfl_xor_sync(~0u, sum[j], 16);
    if (at.lane >= at.kLanes) return;
  }
  store_four(at.floats(at.kAtParts) + at.warp * HEAD + 4 * at.lane, sum);
}

// sum_v S dS' at the ends of a sequence, where S and dS' are float32, or one of them: short sequences have no rounding that this could hide
// behind. Rows as they lie in memory, eight a warp, four at a time: of [V, K] they are value channels and add up as in `decay_products`;
// of [K, V] key channels, two of four in a lane once it has added its neighbour's, and pairs of lanes make a part each.
template <bool V_FIRST, int HEAD>
__device__ __forceinline__ void decay_products_of_ends(const float* initial, const float* final, const Seat<HEAD>& at) {
  float sum[4] = {}, *parts = at.floats(at.kAtParts);
#pragma unroll 1
  for (int row = 8 * at.warp + own_rows(at); row < 8 * at.warp + 8; row += 512 / HEAD) {
    const uint32_t tile = at.smem + rows_in_tile<V_FIRST>(row, at);
    float S[4][4], dS[4][4];
    initial ? load_rows(S, initial, row, at) : load_rows<V_FIRST, HEAD>(S, tile + at.kAtS);
    final ? load_rows(dS, final, row, at) : load_rows<V_FIRST, HEAD>(dS, tile + at.kAtDS);
    if (V_FIRST) {
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] = fmaf(S[r][j], dS[r][j], sum[j]);
    } else {
      const bool odd = at.lane & 1;
#pragma unroll
      for (int r = 0; r < 4; ++r)
        sum[r] = fmaf(S[r][0], dS[r][0], S[r][1] * dS[r][1]) + fmaf(S[r][2], dS[r][2], S[r][3] * dS[r][3]);
      float2 mine = odd ? make_float2(sum[2], sum[3]) : make_float2(sum[0], sum[1]);
      mine.x += __shfl_xor_sync(~0u, odd ? sum[0] : sum[2], 1), mine.y += __shfl_xor_sync(~0u, odd ? sum[1] : sum[3], 1);
      *reinterpret_cast<float2*>(parts + (own_channel(at) >> 1) * HEAD + row + 2 * odd) = mine;
    }
  }
  if (V_FIRST) store_part(sum, at);
}

// Parts of sum_v S dS' to `parts` [warps][HEAD]: the warp's eight value channels, four key channels per lane. With 64 channels S and dS'
// may be in two parts, of which the second is what rounding took.
template <int HEAD>
__device__ __forceinline__ void decay_products(const Given<HEAD>& p, const Chunk& c, const Seat<HEAD>& at) {
  bool exact = false;
  if constexpr (Seat<HEAD>::kNarrow) exact = p.states_lost != nullptr;
  if (!exact && (c.initial || c.final)) {
    p.in.state_v_first ? decay_products_of_ends<true>(c.initial, c.final, at) : decay_products_of_ends<false>(c.initial, c.final, at);
    return;
  }
  float sum[4] = {};
  const int channel = own_channel(at), row = own_rows(at);
  const uint32_t from = at.smem + tile_at<HEAD>(8 * at.warp + row, channel >> 1) + (channel & 1) * 8;
#pragma unroll
  for (int i = 0; i < HEAD / 16; ++i) {
    float S[4], dS[4];
    const uint32_t offset = (from ^ (i << 4)) + i * at.kPitch;
    unpack(S, load_shared_pair(offset + at.kAtS)), unpack(dS, load_shared_pair(offset + at.kAtDS));
    if (exact) {
      float S_lost[4], dS_lost[4];
      unpack(S_lost, load_shared_pair(offset + at.kAtLostS)), unpack(dS_lost, load_shared_pair(offset + at.kAtLostDS));
#pragma unroll
      for (int j = 0; j < 4; ++j) S[j] += S_lost[j], dS[j] += dS_lost[j];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] = fmaf(S[j], dS[j], sum[j]);
  }
  store_part(sum, at);
}
template <int HEAD>
__device__ __forceinline__ void add_decay_products(int channel, const Seat<HEAD>& at) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < at.kWarps; ++i) sum += at.floats(at.kAtParts)[i * HEAD + channel];
  at.floats(at.kAtDDecay)[channel] = sum;
}

}  // namespace kda::hopper
