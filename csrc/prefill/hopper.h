// bfloat16 KDA forward for sm_90a, K = V = head, 64 or 128: what its two kernels are given.
#pragma once
#ifdef KDA_EMULATE
#include "../tests/emulate_hopper.h"
#else
#include <cuda_runtime.h>
#endif

#include <cstddef>
#include <cstdint>

namespace kda::hopper {

enum class Gate : int { log_decay = 0, softplus = 1, bounded = 2 };
enum class Beta : int { given = 0, sigmoid = 1, double_sigmoid = 2 };

struct TokenStrides {  // in elements; channels are adjacent
  int64_t batch, token, head;
};

struct HopperForward {
  const void *q, *k, *v;           // [B, T, H | H | HV, head] bfloat16
  const void* g;                   // [B, T, HV, head] bfloat16, or float32 with gate_float32
  const void* beta;                // [B, T, HV] bfloat16, or float32 with beta_float32
  const float *A_log, *dt_bias;    // [HV], [HV * head], or null
  const float* initial_state;      // [N, HV, head, head] or null
  const void* cu_seqlens;          // [N + 1] int64, or int32 with cu_int32; null: N = B sequences of T tokens
  void* o;                         // [B, T, HV, head] bfloat16
  float* final_state;              // as initial_state, or null
  void* workspace;                 // a record per slot and value head
  void* links;                     // where parts > 1: hopper_links.cuh
  int64_t B, T, N, H, HV;
  TokenStrides q_strides, k_strides, v_strides, g_strides, beta_strides, o_strides;
  float scale, lower_bound;
  Gate gate;
  Beta beta_kind;
  int l2norm;
  int safe;  // the log-decay is known to lie in [-5, 0]
  int state_v_first, gate_float32, beta_float32, cu_int32;
  int parts;  // of each sequence, scanned beside each other: 1, 2 that only part where the first is forgotten, or 3 and more
  int head = 128;  // channels of a key and of a value
};

// What a backward begins with. Slots as in hopper_sequences.cuh; rows and columns of a chunk in the order of `row_of`, hopper_kept.cuh.
struct Kept {
  void* lower;       // [slots, HV, 64, 64] float16, or float32 with lower_float32: X = (I + A_kk)^-1 = I - Diag(beta) lower
  uint16_t* solved;  // [slots, HV, 64, 64] bfloat16: scale A_qk X
  void* states;      // [ceil(slots / every), HV, head values, head keys] bfloat16: before the chunk of every slot that `every` divides
  int lower_float32, group_bits, every;
  int states_float32;  // head = 64: states are float32
  // Where the records are kept too, `every` is 1, there is no `solved`, and rows are in the order of tokens:
  void* r;         // [B, T, HV, head] bfloat16: v - k_in S
  float* factors;  // [slots, HV, 3, 64]: beta, 0 past a sequence's end, 1 / |q|, 1 / |k|
};

// What a kernel of the forward leaves to a backward: nothing; `lower`, `solved` and checkpoints; or `lower`, all states, r and the records.
// plain_record: k_solved and A_solved of these have not been multiplied by beta, which may be 0; the scan multiplies r by it.
enum class Keep : int { nothing, checkpoints, record, plain_record };
__host__ __device__ constexpr bool keeps_records(Keep keep) { return keep == Keep::record || keep == Keep::plain_record; }

// The kernels; `slots` is the number of records per value head. launch_parts goes before launch_scan where there are parts.
cudaError_t launch_prepare(const HopperForward& p, int64_t slots, cudaStream_t stream);
cudaError_t launch_parts(const HopperForward& p, cudaStream_t stream);
cudaError_t launch_scan(const HopperForward& p, cudaStream_t stream);
// Whether there are so many heads that a block of the scan has all value channels of one.
cudaError_t find_width(const HopperForward& p, bool& many);
// The two along blocks of 16 tokens, of 128 channels, in one part.
cudaError_t launch_prepare_blocks(const HopperForward& p, int64_t slots, cudaStream_t stream);
cudaError_t launch_scan_blocks(const HopperForward& p, cudaStream_t stream);
// The two that keep something, in place of those that do not.
cudaError_t launch_prepare_kept(const HopperForward& p, const Kept& kept, int64_t slots, cudaStream_t stream);
cudaError_t launch_scan_kept(const HopperForward& p, const Kept& kept, cudaStream_t stream);
// And the two that keep the records, of 128 channels.
cudaError_t launch_prepare_record(const HopperForward& p, const Kept& kept, int64_t slots, cudaStream_t stream);
cudaError_t launch_scan_record(const HopperForward& p, const Kept& kept, cudaStream_t stream);

}  // namespace kda::hopper
