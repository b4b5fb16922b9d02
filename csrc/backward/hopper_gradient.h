// bfloat16 KDA backward for sm_90a, K = V = 64 or 128: what its kernel over chunks is given. Sizes are those of 128.
#pragma once
#include <type_traits>

#include "../prefill/hopper.h"

namespace kda::hopper {

struct HopperGradient {
  HopperForward in;         // inputs, sizes, strides and options of the forward
  const void* lower;        // [slots, HV, 64, 64] float16, or float32 with lower_float32: (I + A_kk)^-1 = I - Diag(beta) lower
  const float* factors;     // [slots, HV, 3, 64]  beta, 1 / |q|, 1 / |k|
  const void* states;       // [slots, HV, V, K] bfloat16: S before each chunk
  const void* d_states;     // [slots, HV, V, K] bfloat16: the gradient of the state after each chunk, dS'
  const void *r, *d_o, *d_v;  // [B, T, HV, 128] bfloat16: v - k_in S; the output's gradient; that of v
  const void* alone;        // [slots, HV, 64, 128] bfloat16: d_v / beta of tokens whose given beta is too small to divide by, or null
  const float* d_final;     // as initial_state, or null
  const float* before_last;  // the same, or null: S before the last of several chunks
  const float* after_first;  // the same, or null: dS' of the first of several chunks
  void *d_q, *d_k;          // [B, T, HV, 128] bfloat16, or float32 with wide
  void* d_g;                // [B, T, HV, 128], dtype of g
  void* d_beta;             // [B, T, HV], dtype of beta
  float *A_shares, *bias_shares;  // [slots, HV, 128] or null: what every chunk adds to d_A_log and d_dt_bias
  int lower_float32, wide;
  int group_bits;  // rows of lower and factors, group = 2^group_bits: token t of each 32 is in row t % group * (32 / group) + t / group
};

struct HopperGradient64 : HopperGradient {
  const void *states_lost, *d_states_lost;  // as states and d_states, both or neither: what rounding took from them, for sum_v S dS'
};
template <int HEAD>
using Given = std::conditional_t<HEAD == 64, HopperGradient64, HopperGradient>;

cudaError_t launch_gradient(const HopperGradient64& p, int head, int64_t slots, cudaStream_t stream);  // head: K = V, 64 or 128

}  // namespace kda::hopper
