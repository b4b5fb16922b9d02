// bfloat16 KDA forward for sm_90a, K = V = 128. Plain pointers and sizes: no framework, no allocation, no host synchronisation.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace kdakit {

enum class Gate : int { log_decay = 0, softplus = 1, bounded = 2 };
enum class Beta : int { given = 0, sigmoid = 1, double_sigmoid = 2 };

struct TokenStrides {  // in elements; channels are adjacent
  int64_t batch, token, head;
};

struct HopperForward {
  const void *q, *k, *v;           // [B, T, H | H | HV, 128] bfloat16
  const void* g;                   // [B, T, HV, 128] bfloat16, or float32 with gate_float32
  const void* beta;                // [B, T, HV] bfloat16, or float32 with beta_float32
  const float *A_log, *dt_bias;    // [HV], [HV * 128], or null
  const float* initial_state;      // [N, HV, 128, 128] or null
  const void* cu_seqlens;          // [N + 1] int64, or int32 with cu_int32; null: N = B sequences of T tokens
  void* o;                         // [B, T, HV, 128] bfloat16, contiguous
  float* final_state;              // as initial_state, or null
  void* workspace;                 // hopper_workspace_bytes, 128-byte aligned
  int64_t B, T, N, H, HV;
  TokenStrides q_strides, k_strides, v_strides, g_strides, beta_strides;
  float scale, lower_bound;
  Gate gate;
  Beta beta_kind;
  int l2norm;
  int safe;  // the log-decay is known to lie in [-5, 0]
  int state_v_first, gate_float32, beta_float32, cu_int32;
  int stages;  // 3: both kernels; 1: only prepare, 2: only scan (to time them)
};

size_t hopper_workspace_bytes(int64_t B, int64_t T, int64_t N, int64_t HV, bool varlen);

// Why this problem cannot run, or null. Looks at pointers and sizes only.
const char* hopper_refusal(const HopperForward& p);

cudaError_t hopper_forward(const HopperForward& p, cudaStream_t stream);

}  // namespace kdakit
