// bfloat16 KDA backward for sm_90a, K = V = HEAD = 64 or 128: what the kernel that makes a forward's tiles again is given.
#pragma once
#include "../prefill/hopper.h"

namespace kda::hopper {

struct HopperRebuild {
  HopperForward in;    // inputs but v, sizes, strides and options of the forward
  const void* lower;   // [slots, HV, 64, 64] float16, or float32 with lower_float32: X = (I + A_kk)^-1 = I - Diag(beta) lower
  void* tiles;         // [slots, HV, 3, 64, HEAD]: k_in, q_decayed, bfloat16; k_solved, float16, or bfloat16 with lower_float32
  float* decay;        // [slots, HV, HEAD]
  float* factors;      // [slots, HV, 3, 64]  beta, 1 / |q|, 1 / |k|
  void* first;         // [N, HV, 2, 64, HEAD] bfloat16: what rounding took from k_in and q_decayed of the first chunks; or null
  int lower_float32;
  int group_bits;      // rows of all of these, and columns of lower, in the order of `row_of`, hopper_kept.cuh; 0 with a float16 lower
  void* q_lost;        // [slots, HV, 64, HEAD] bfloat16: what rounding took from q_decayed, with HEAD = 64 and lower_float32; or null
};

cudaError_t launch_rebuild(const HopperRebuild& p, int64_t slots, cudaStream_t stream);

}  // namespace kda::hopper
