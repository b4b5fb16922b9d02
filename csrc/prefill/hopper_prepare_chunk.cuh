// Stage intra: everything of a chunk that needs no state. One block of eight warps, or of four for 64 channels, per chunk and value
// head.
//
// With d(j, i) the product of the decays of tokens j+1 .. i:
//
//   k_in = k d(start, i)        q_decayed = scale q d(start, i)        k_decayed = k d(i, end)        decay = d(start, end)
//   A_qk[i,j] = q_i . (k_j d(j, i)),  j <= i        A_kk[i,j] = beta_i k_i . (k_j d(j, i)),  j < i        X = (I + A_kk)^-1
//   k_solved = Diag(beta) X^T k_decayed        A_solved^T = scale Diag(beta) X^T A_qk^T
//
// A lane has four channels of a group of eight tokens while decays are formed: sums over tokens stay in registers. A pair of warps then
// owns a block of 16 tokens: row block b of A_kk (even warp) and A_qk (odd warp), afterwards column block b of X, half the channels each.
// The second is long where the first is short, and pairs wait for each other only three times. With 64 channels one warp owns a block.
//
// hopper_prepare_block.cuh: shared memory; hopper_tokens.cuh: inputs and norms; hopper_prepare_decay.cuh: decayed tiles;
// hopper_prepare_pairs.cuh and, of 64 channels, hopper_prepare_both.cuh: A_kk and A_qk; hopper_prepare_solve.cuh: X, k_solved and A_solved;
// hopper_prepare_keep.cuh and hopper_prepare_keep_out.cuh: what a backward begins with. hopper_prepare.cu and hopper_prepare_kept.cu have
// the kernels without and with the latter.
#pragma once
#include "hopper_forms.cuh"
#include "hopper_prepare_both.cuh"
#include "hopper_prepare_decay.cuh"
#include "hopper_prepare_keep.cuh"
#include "hopper_prepare_keep_out.cuh"
#include "hopper_prepare_pairs.cuh"
#include "hopper_prepare_solve.cuh"

namespace kda::hopper {

// KEEP: also leaves what a backward begins with.
template <int HEAD, Gate GATE, bool BOUNDED, bool G32, bool L2NORM, Keep KEEP>
__device__ __forceinline__ void prepare_chunk(const HopperForward& p, [[maybe_unused]] const Kept& kept) {
  constexpr bool KEPT = KEEP != Keep::nothing, RECORD = keeps_records(KEEP), PLAIN = KEEP == Keep::plain_record;
  static_assert(!RECORD || HEAD == 128, "");
  using P = Places<HEAD>;
  using W = Warp<HEAD>;
  using R = Record<HEAD>;
#ifdef KDA_EMULATE
  uint8_t* bytes = memory;
#else
  extern __shared__ __align__(1024) uint8_t bytes[];
#endif
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const Place at{shared_address(bytes), lane, warp, HEAD == 128 ? warp / 2 : warp, HEAD == 128 ? warp % 2 : lane >> 4};
  const Shared<HEAD> shared{
      *reinterpret_cast<float(*)[kGroups][HEAD]>(bytes + P::sums), *reinterpret_cast<float(*)[3][HEAD]>(bytes + P::totals),
      *reinterpret_cast<float(*)[kChunk]>(bytes + P::betas), *reinterpret_cast<float(*)[3][kChunk]>(bytes + P::norms),
      *reinterpret_cast<uint2(*)[3][HEAD / 4]>(bytes + P::between)};
  let_next_kernel_start();
  const uint32_t slot = slot_of_block();
  const int head = blockIdx.x;
  const Span span = chunk_span(p, slot, lane);
  if (span.length <= 0) return;
  const int64_t item = slot * p.HV + head;
  uint8_t* record = static_cast<uint8_t*>(p.workspace) + item * R::record_bytes;

  Inputs<HEAD> x;
  const int row = warp * W::tokens + lane;
  const bool has_beta = lane < W::tokens && row < span.length;
  uint32_t raw_beta = 0;
  if (has_beta) raw_beta = ask_for_beta(p, beta_offset(p, span, row, head));
  const uint32_t own = at.smem + at.block * P::tile + (HEAD == 128 ? at.odd * kTokens * 256 : 0);
  load_tokens<HEAD, GATE, G32>(p, span, head, warp, lane, own + P::rows_q, own + P::rows_k, x);
  if (lane < W::tokens) {
    const float beta = beta_of(p, raw_beta);
    shared.betas[row] = has_beta ? write_strength(p, beta) : 0.0f;
    if (RECORD) kept.factors[item * 3 * kChunk + row] = has_beta ? exact_strength(p, beta) : 0.0f;
  }
  if (RECORD && lane % 2 == 0)
    kept.factors[(item * 3 + 1 + norm_kind<HEAD>(lane)) * kChunk + warp * W::tokens + norm_token<HEAD>(lane)] =
        L2NORM ? x.inverse_norm : 1.0f;
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
  *reinterpret_cast<float4*>(&shared.sums[group_of<HEAD>(at)][4 * W::channels(lane)]) = make_float4(sum[0], sum[1], sum[2], sum[3]);
  __syncthreads();

  if constexpr (HEAD == 64) {
    decay_tokens<HEAD, BOUNDED, L2NORM>(p, x, shared, at, record);
    __syncthreads();
    both_rows<BOUNDED, L2NORM, KEPT>(at, shared);
  } else {
    Square near = {}, far[3] = {};
    decay_tokens<HEAD, BOUNDED, L2NORM>(p, x, shared, at, record);
    __syncthreads();
    block_rows<BOUNDED>(at, near, far);
    if constexpr (KEPT) {
      pair_barrier(at.block);  // M and `lower` lie in the place of rows and columns that both warps read
      store_and_keep_rows<L2NORM>(at, shared, near, far);
    } else {
      store_rows<L2NORM>(at, shared, near, far);
    }
  }
  __syncthreads();

  uint32_t solved[4][4];
  if constexpr (KEPT) {
    solve_and_keep_columns<L2NORM>(at, shared, solved);
    __syncthreads();  // `lower` is there, A_kk is read
    lower_out<HEAD>(kept, item, at);
  } else {
    solve_columns<HEAD>(at, solved);
  }
  float strength[2];  // of the two rows a lane holds
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = at.block * kBlock + square_row(2 * i, lane);
    strength[i] = (PLAIN ? 1.0f : shared.betas[row]) * (L2NORM ? 1.0f : shared.norms[1][row]);
  }
  square_out<HEAD, L2NORM>(p, at, shared, solved, strength, [&](int i, const Square& sum) {
    if constexpr (KEPT && !RECORD) stage_solved<L2NORM>(p, at, shared, i, sum);
  });
  if constexpr (RECORD) {
    __syncwarp();  // k_solved is staged where this warp has read `lower`
  } else if constexpr (KEPT) {
    __syncthreads();  // `solved` is there, `lower` is read
    solved_out<HEAD>(kept, item, at);
  }
  keys_out(at, shared, solved, strength);
  fence_async();
  if constexpr (HEAD == 64) {
    __syncwarp();
    if (lane == 0) {
      bulk_store(record + R::k_solved + at.block * 2048, at.smem + P::stage_k + at.block * P::tile, 2048);
      bulk_store(record + R::first_square(at.block), stage_of(at, 0), R::square);
      if (at.block < 3) bulk_store(record + R::first_square(at.block) + R::square, stage_of(at, 1), (3 - at.block) * R::square);
      bulk_store_wait();
    }
    return;
  }
  pair_barrier(at.block);
  if (lane == 0) {
    const int out = at.block * 2048, half = at.odd * 8192;
    bulk_store(record + R::k_solved + half + out, at.smem + P::stage_k + at.block * P::tile + at.odd * 2048, 2048);
    const uint32_t squares = at.smem + at.block * P::tile + (at.odd ? P::rows_q : P::rows_k) + P::stage_a;
#pragma unroll
    for (int d = 0; d < 2; ++d)
      if (const int column = 2 * at.odd + d; at.block + column < 4) {
        uint8_t* by_columns = record + R::square_by_columns(at.block, at.block + column);
        bulk_store(RECORD ? by_columns : record + R::first_square(at.block) + column * R::square, squares + d * R::square, R::square);
      }
    bulk_store_wait();
  }
}

}  // namespace kda::hopper
