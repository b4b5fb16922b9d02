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
// hopper_prepare_block.cuh: shared memory; hopper_tokens.cuh: inputs and norms; hopper_prepare_decay.cuh: decayed tiles;
// hopper_prepare_pairs.cuh: A_kk and A_qk; hopper_prepare_solve.cuh: X, k_solved and A_solved; hopper_prepare_keep.cuh: what a backward
// begins with. hopper_prepare.cu and hopper_prepare_kept.cu have the kernels without and with the latter.
#pragma once
#include "hopper.h"
#include "hopper_prepare_decay.cuh"
#include "hopper_prepare_keep.cuh"
#include "hopper_prepare_pairs.cuh"
#include "hopper_prepare_solve.cuh"

namespace kda::hopper {

constexpr uint32_t kGridRows = 32768;  // slots along the grid's second axis

#ifndef KDA_EMULATE
inline dim3 grid_of(const HopperForward& p, int64_t slots) {
  const auto rows = static_cast<unsigned>(slots);
  return dim3(static_cast<unsigned>(p.HV), rows < kGridRows ? rows : kGridRows, (rows + kGridRows - 1) / kGridRows);
}
#endif

// What a kernel is compiled for.
template <Gate G, bool B, bool W, bool L>
struct Form {
  static constexpr Gate gate = G;
  static constexpr bool bounded = B, gate_float32 = W, l2norm = L;
};
// run(Form) of a call.
template <Gate GATE, bool BOUNDED, typename Run>
auto with_form(const HopperForward& p, Run run) {
  if (p.gate_float32) return p.l2norm ? run(Form<GATE, BOUNDED, true, true>{}) : run(Form<GATE, BOUNDED, true, false>{});
  return p.l2norm ? run(Form<GATE, BOUNDED, false, true>{}) : run(Form<GATE, BOUNDED, false, false>{});
}
template <typename Run>
auto of_form(const HopperForward& p, Run run) {
  if (p.gate == Gate::bounded) return with_form<Gate::bounded, true>(p, run);
  if (p.gate == Gate::softplus) return with_form<Gate::softplus, false>(p, run);
  return p.safe ? with_form<Gate::log_decay, true>(p, run) : with_form<Gate::log_decay, false>(p, run);
}

// KEPT: also leaves what a backward begins with.
template <Gate GATE, bool BOUNDED, bool G32, bool L2NORM, bool KEPT>
__device__ __forceinline__ void prepare_chunk(const HopperForward& p, [[maybe_unused]] const Kept& kept) {
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
  const int64_t item = slot * p.HV + head;
  uint8_t* record = static_cast<uint8_t*>(p.workspace) + item * kRecordBytes;

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
  if constexpr (KEPT) {
    pair_barrier(at.block);  // M and `lower` lie in the place of rows and columns that both warps read
    store_and_keep_rows<L2NORM>(at, shared, near, far);
  } else {
    store_rows<L2NORM>(at, shared, near, far);
  }
  __syncthreads();

  uint32_t solved[4][4];
  if constexpr (KEPT) {
    solve_and_keep_columns<L2NORM>(at, shared, solved);
    __syncthreads();  // `lower` is there, A_kk is read
    lower_out(kept, item, at);
  } else {
    solve_columns(at, solved);
  }
  float strength[2];  // of the two rows a lane holds
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = at.block * kBlock + square_row(2 * i, lane);
    strength[i] = shared.betas[row] * (L2NORM ? 1.0f : shared.norms[1][row]);
  }
  square_out<L2NORM>(p, at, shared, solved, strength, [&](int i, const Square& sum) {
    if constexpr (KEPT) stage_solved<L2NORM>(p, at, shared, i, sum);
  });
  if constexpr (KEPT) {
    __syncthreads();  // `solved` is there, `lower` is read
    solved_out(kept, item, at);
  }
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

}  // namespace kda::hopper
