// bfloat16 KDA backward for sm_90a, K = V = D, 64 or 128: what the walk along a sequence's chunks from its end is given.
#pragma once
#include "../prefill/hopper.h"

namespace kda::hopper {

struct HopperReverse {
  HopperForward in;       // sizes (D is its head), cu_seqlens, state_v_first and beta_kind of the forward
  const void* tiles;      // [slots, HV, 3, 64, D]: k_in, q_decayed, k_solved, bfloat16; the last float16 with half_solved
  const void* solved;     // [slots, HV, 64, 64] bfloat16: A_qk (I + A_kk)^-1
  const float* decay;     // [slots, HV, D]
  const float* factors;   // [slots, HV, 3, 64]: beta, 0 past a sequence's end, and two that are not read
  const void* d_o;        // [B, T, HV, D] bfloat16
  const float* d_final;   // as d_initial, or null
  void* d_states;         // [slots, HV, V, K] bfloat16: dS' after each chunk
  void* d_v;              // [B, T, HV, D] bfloat16
  uint16_t* alone;        // [slots, HV, 64, D] bfloat16 by token: d_v / beta where |beta| < 2^-64, or null
  uint16_t* y_lost;       // [N, HV, 64, D] bfloat16 by token: what rounding took from d_v, or from alone, of the last chunks, or null
  float* d_initial;       // [N, HV, K, V], or [N, HV, V, K] with state_v_first, or null
  float* after_first;     // the same, or null: dS' of the first of several chunks
  int half_solved;
  int group_bits;  // rows of tiles, solved and factors, as in HopperGradient
  int channels;    // of a block: 64 or 128; 0: two blocks a head where that many have a multiprocessor each
  void* d_states_lost;  // as d_states, what rounding took from it, or null; of 64 channels
  const void* q_lost;   // [slots, HV, 64, D] bfloat16, what rounding took from q_decayed, or null; of 64 channels, without half_solved
  const uint8_t* record;  // [slots, HV] records of the forward, squares by columns, or null: in place of tiles, solved, decay and, but
                          // where beta is given, factors
};

cudaError_t launch_reverse(const HopperReverse& p, int64_t slots, cudaStream_t stream);

}  // namespace kda::hopper
