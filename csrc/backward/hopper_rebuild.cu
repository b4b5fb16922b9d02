// Backward, first launch: the tiles of every chunk again, from its inputs and `lower`. One block per chunk and value head.
//
// With d(j, i) the product of the decays of tokens j+1 .. i, and X = (I + A_kk)^-1 = I - Diag(beta) lower:
//
//   k_in = k d(start, i)    q_decayed = scale q d(start, i)    decay = d(start, end)    k_solved = X^T (k d(i, end))
//
// With 128 channels eight warps have eight tokens each, with 64 four warps sixteen, and a lane four channels of eight, as in the prepare
// kernel (../prefill/hopper_tokens.cuh): k_in and q_decayed leave by whole rows as they are made. Decayed keys take the place of the rows
// that they were made from, and all warps multiply them by X (hopper_rebuild_solve.cuh).
#include "../prefill/hopper_tokens.cuh"
#include "hopper_rebuild_solve.cuh"

namespace kda::hopper {
namespace {

constexpr uint32_t kRebuildRows = 32768;  // slots along the grid's second axis
constexpr int kRowsOfK = 2048;            // bytes of a warp's rows of q, before those of k
constexpr float kRowFloor = -160.0f;  // log2-decays below are raised to it: nothing of a float32 number is left of either

// Shared memory: of every warp its eight rows of q and of k, in whose place its decayed keys come; X; sums of log2-decays over eight
// tokens; strengths.
template <int HEAD, bool LOWER32>
struct RebuildPlaces {
  static constexpr int inverse = 8 * kOwn<HEAD>, sums = inverse + kChunk * kChunk * (LOWER32 ? 4 : 2);
  static constexpr int betas = sums + 8 * HEAD * 4, bytes = betas + kChunk * 4;
};
template <int HEAD>
constexpr int kRebuildBlocks = HEAD == 128 ? 3 : 6;  // on a multiprocessor
static_assert(kRebuildBlocks<128> * (RebuildPlaces<128, true>::bytes + 1024) <= 228 * 1024 &&
              kRebuildBlocks<64> * (RebuildPlaces<64, true>::bytes + 1024) <= 228 * 1024, "as many fit");

// scale q and k of a token, decayed from the chunk's start, and k. `sum`: the log2-decay to the token before, becomes that to this one.
template <int HEAD>
__device__ __forceinline__ void decay_token(float (&q_decayed)[4], float (&k)[4], float (&k_in)[4], float (&sum)[4],
                                            const Inputs<HEAD>& x, int t, float scale, uint32_t place) {
  float e[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) sum[c] += x.g[t][c], e[c] = exp2_fast(sum[c]);
  scaled(q_decayed, load_shared_pair(place), x.norm_q(t) * scale), multiply(q_decayed, e);
  scaled(k, load_shared_pair(place + kRowsOfK), x.norm_k(t));
#pragma unroll
  for (int c = 0; c < 4; ++c) k_in[c] = k[c] * e[c];
}

__device__ __forceinline__ uint2 lost_of(const float (&y)[4]) {
  const uint2 rounded = packed(y);
  const float lost[4] = {y[0] - low(rounded.x), y[1] - high(rounded.x), y[2] - low(rounded.y), y[3] - high(rounded.y)};
  return packed(lost);
}

// What rounding takes from k_in and q_decayed, in a sequence's first chunk. `row`: bytes before the group's first token.
template <int HEAD, bool LOWER32>
__device__ __forceinline__ void keep_lost(const HopperRebuild& p, const Span& span, int head, int row, const Inputs<HEAD>& x,
                                          const float (&before)[4], uint32_t own, int lane) {
  const int64_t n = sequence_of(p.in, span.batch, span.first);
  if (span.first != sequence_span(p.in, n).first) return;
  uint8_t* first = static_cast<uint8_t*>(p.first) + (n * p.in.HV + head) * (2 * kChunk * HEAD * 2) + row;
  float sum[4] = {before[0], before[1], before[2], before[3]};
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    uint8_t* to = first + row_of(t, LOWER32 ? p.group_bits : 0) * (HEAD * 2);
    float q_decayed[4], k[4], k_in[4];
    decay_token(q_decayed, k, k_in, sum, x, t, p.in.scale, own + lane_offset<HEAD>(t, lane));
    *reinterpret_cast<uint2*>(to) = lost_of(k_in);
    *reinterpret_cast<uint2*>(to + kChunk * HEAD * 2) = lost_of(q_decayed);
  }
}

}  // namespace

template <int HEAD, Gate GATE, bool G32, bool LOWER32>
__global__ void __launch_bounds__(Warp<HEAD>::threads, kRebuildBlocks<HEAD>) rebuild_kernel(const __grid_constant__ HopperRebuild p) {
  using W = Warp<HEAD>;
  using Places = RebuildPlaces<HEAD, LOWER32>;
#ifdef KDA_EMULATE
  uint8_t* bytes = memory;
#else
  extern __shared__ __align__(1024) uint8_t bytes[];
#endif
  const int bits = LOWER32 ? p.group_bits : 0;
  const int thread = threadIdx.x, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const uint32_t smem = shared_address(bytes);
  float* sums = reinterpret_cast<float*>(bytes + Places::sums);    // [8][HEAD]
  float* betas = reinterpret_cast<float*>(bytes + Places::betas);  // [64], by token
  const uint32_t slot = blockIdx.z * kRebuildRows + blockIdx.y;
  const int head = blockIdx.x;
  const Span span = chunk_span(p.in, slot, lane);
  if (span.length <= 0) return;
  const int64_t item = slot * p.in.HV + head;
  fetch_lower<W::threads, LOWER32>(p, item, thread, smem + Places::inverse);

  Inputs<HEAD> x;
  const uint32_t own = smem + warp * (W::groups * kOwn<HEAD>);  // rows of q, then rows of k
  load_tokens<HEAD, GATE, G32>(p.in, span, head, warp, lane, own, own + kRowsOfK, x);
  if (!p.in.l2norm) x.inverse_norm = 1.0f;
  float* factors = p.factors + item * 3 * kChunk;
  if (lane < W::tokens) {
    const int token = warp * W::tokens + lane;
    const float strength = token < span.length ? exact_strength(p.in, beta_at(p.in, beta_offset(p.in, span, token, head))) : 0.0f;
    betas[token] = strength, factors[row_of(token, bits)] = strength;
  }
  if (HEAD == 64 || lane % 2 == 0)
    factors[(1 + norm_kind<HEAD>(lane)) * kChunk + row_of(warp * W::tokens + norm_token<HEAD>(lane), bits)] = x.inverse_norm;
  float rest[4] = {};  // the log2-decay from a token to the chunk's end
#pragma unroll
  for (int t = 0; t < kTokens; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (GATE != Gate::bounded) x.g[t][c] = max_or_nan(x.g[t][c], kRowFloor);
      rest[c] += x.g[t][c];
    }
  const int group = warp * W::groups + W::group(lane), channel = 4 * W::channels(lane);
  *reinterpret_cast<float4*>(sums + group * HEAD + channel) = make_float4(rest[0], rest[1], rest[2], rest[3]);
  __syncthreads();

  make_inverse<W::threads, LOWER32>(p, betas, thread, smem + Places::inverse);
  float sum[4] = {};  // from the chunk's start to a token
#pragma unroll (HEAD == 128 ? 8 : 2)
  for (int w = 0; w < 8; ++w) {
    const float4 y = *reinterpret_cast<const float4*>(sums + w * HEAD + channel);
    if (w < group) sum[0] += y.x, sum[1] += y.y, sum[2] += y.z, sum[3] += y.w;
    if (w > group) rest[0] += y.x, rest[1] += y.y, rest[2] += y.z, rest[3] += y.w;
  }
  if (group == 0) {
    float y[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] = exp2_fast(rest[c]);
    *reinterpret_cast<float4*>(p.decay + item * HEAD + channel) = make_float4(y[0], y[1], y[2], y[3]);
  }
  // Rows of a chunk are its tokens' numbers with their bits in another order, so that those of eight tokens are sums.
  const int row = row_of(group * kTokens, bits) * (HEAD * 2) + 2 * channel;
  if (p.first) keep_lost<HEAD, LOWER32>(p, span, head, row, x, sum, own, lane);
  uint8_t* tile = static_cast<uint8_t*>(p.tiles) + item * (3 * kChunk * HEAD * 2) + row;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    uint8_t* to = tile + row_of(t, bits) * (HEAD * 2);
    float q_decayed[4], k[4], k_in[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) rest[c] -= x.g[t][c];
    decay_token(q_decayed, k, k_in, sum, x, t, p.in.scale, own + lane_offset<HEAD>(t, lane));
    *reinterpret_cast<uint2*>(to) = packed(k_in);
    *reinterpret_cast<uint2*>(to + kChunk * HEAD * 2) = packed(q_decayed);
    if (HEAD == 64 && LOWER32 && p.q_lost) {
      auto* lost = static_cast<uint8_t*>(p.q_lost) + item * (kChunk * HEAD * 2) + row + row_of(t, bits) * (HEAD * 2);
      *reinterpret_cast<uint2*>(lost) = lost_of(q_decayed);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) x.g[t][c] = k[c] * exp2_fast(rest[c]);
  }
  __syncwarp();  // all rows are read
#pragma unroll
  for (int t = 0; t < kTokens; ++t) store_decayed<HEAD, LOWER32>(own + W::group(lane) * kOwn<HEAD>, t, W::channels(lane), x.g[t]);
  __syncthreads();
  // Of the blocks of 16 rows the first has most tokens to meet. Eight warps: w and w + 4 take turns at one scheduler, blocks 0 and 3, or 1
  // and 2. Four warps: each of them has a scheduler, and from head to head another block.
  const int block = HEAD == 64 ? (warp + head) % 4 : warp < 4 ? warp / 2 : 5 - warp / 2;
  solve_keys<HEAD, LOWER32>(p, item, block, HEAD == 64 ? 0 : warp % 2, lane, smem + Places::inverse, smem);
}

#ifndef KDA_EMULATE
namespace {

template <int HEAD, Gate GATE, bool G32, bool LOWER32>
cudaError_t launch(const HopperRebuild& p, int64_t slots, cudaStream_t stream) {
  const auto kernel = rebuild_kernel<HEAD, GATE, G32, LOWER32>;
  constexpr int bytes = RebuildPlaces<HEAD, LOWER32>::bytes;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  const auto rows = static_cast<unsigned>(slots);
  const dim3 grid(static_cast<unsigned>(p.in.HV), rows < kRebuildRows ? rows : kRebuildRows, (rows + kRebuildRows - 1) / kRebuildRows);
  kernel<<<grid, Warp<HEAD>::threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
template <int HEAD, Gate GATE>
cudaError_t with_dtypes(const HopperRebuild& p, int64_t slots, cudaStream_t stream) {
  if (p.in.gate_float32)
    return p.lower_float32 ? launch<HEAD, GATE, true, true>(p, slots, stream) : launch<HEAD, GATE, true, false>(p, slots, stream);
  return p.lower_float32 ? launch<HEAD, GATE, false, true>(p, slots, stream) : launch<HEAD, GATE, false, false>(p, slots, stream);
}
template <int HEAD>
cudaError_t with_gate(const HopperRebuild& p, int64_t slots, cudaStream_t stream) {
  switch (p.in.gate) {
    case Gate::bounded: return with_dtypes<HEAD, Gate::bounded>(p, slots, stream);
    case Gate::softplus: return with_dtypes<HEAD, Gate::softplus>(p, slots, stream);
    case Gate::log_decay: return with_dtypes<HEAD, Gate::log_decay>(p, slots, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_rebuild(const HopperRebuild& p, int64_t slots, cudaStream_t stream) {
  return p.in.head == 64 ? with_gate<64>(p, slots, stream) : with_gate<128>(p, slots, stream);
}
#endif

}  // namespace kda::hopper
