// Host side of the bfloat16 forward: what it refuses, its workspace, its launches.
#include "hopper.h"
#include "hopper_record.h"
#include "prefill.h"

namespace kda {
namespace {

using hopper::HopperForward;
using hopper::kChunk;
using hopper::TokenStrides;

int64_t slots_of(const kda_prefill_args &args) {
  return args.cu_seqlens ? args.tokens / kChunk + args.sequences : args.batch * ((args.tokens + kChunk - 1) / kChunk);
}

TokenStrides strides_of(const kda_tensor &x) { return {x.batch_stride, x.token_stride, x.head_stride}; }

kda_status check_rows(const char *name, const kda_tensor &x) {
  if (reinterpret_cast<uintptr_t>(x.data) % 16 || x.batch_stride % 8 || x.token_stride % 8 || x.head_stride % 8)
    return fail(KDA_UNSUPPORTED, "%s must start at 16 bytes and have strides that are multiples of 8 elements", name);
  if (x.token_stride >= int64_t{1} << 24)
    return fail(KDA_UNSUPPORTED, "%s must have a token stride below 2^24 elements, got %lld", name, (long long)x.token_stride);
  return KDA_OK;
}

kda_status check_device() {
  int device = 0, major = 0, minor = 0;
  KDA_CUDA(cudaGetDevice(&device));
  KDA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  KDA_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major != 9 || minor != 0)
    return fail(KDA_UNSUPPORTED, "the bfloat16 kernels need compute capability 9.0, this device has %d.%d", major, minor);
  return KDA_OK;
}

HopperForward forward_of(const kda_prefill_args &args) {
  HopperForward p{};
  p.q = args.q.data, p.k = args.k.data, p.v = args.v.data, p.g = args.g.data, p.beta = args.beta.data, p.o = args.o.data;
  p.A_log = args.A_log, p.dt_bias = args.dt_bias, p.cu_seqlens = args.cu_seqlens;
  p.initial_state = args.initial_state, p.final_state = args.final_state, p.workspace = args.workspace;
  p.B = args.batch, p.T = args.tokens, p.N = args.sequences, p.H = args.heads, p.HV = args.value_heads;
  p.q_strides = strides_of(args.q), p.k_strides = strides_of(args.k), p.v_strides = strides_of(args.v);
  p.g_strides = strides_of(args.g), p.beta_strides = strides_of(args.beta), p.o_strides = strides_of(args.o);
  p.scale = args.scale, p.lower_bound = args.lower_bound, p.gate = static_cast<hopper::Gate>(args.gate);
  p.beta_kind = static_cast<hopper::Beta>(args.beta_kind), p.l2norm = args.l2norm, p.safe = args.safe_gate;
  p.state_v_first = args.state_v_first, p.gate_float32 = args.g.dtype == KDA_FLOAT32, p.beta_float32 = args.beta.dtype == KDA_FLOAT32;
  p.cu_int32 = !args.cu_seqlens_64;
  return p;
}

}  // namespace

kda_status workspace_bf16(const kda_prefill_args &args, size_t &bytes) {
  if (args.key_dim != 128 || args.value_dim != 128)
    return fail(KDA_UNSUPPORTED, "the bfloat16 kernels need key_dim = value_dim = 128, got %lld and %lld", (long long)args.key_dim,
                (long long)args.value_dim);
  if (args.w || args.u) return fail(KDA_UNSUPPORTED, "the bfloat16 kernels do not give out w and u: pass NULL");
  const int64_t slots = slots_of(args);
  if (args.tokens >= int64_t{1} << 30 || slots >= int64_t{1} << 31 || slots * args.value_heads >= int64_t{1} << 31 ||
      args.sequences * args.value_heads >= int64_t{1} << 30)
    return fail(KDA_UNSUPPORTED, "the bfloat16 kernels take fewer than 2^30 tokens and 2^31 chunks of all heads");
  bytes = static_cast<size_t>(slots * args.value_heads) * hopper::kRecordBytes;
  return KDA_OK;
}

kda_status prefill_bf16(const kda_prefill_args &args) {
  KDA_TRY(check_rows("q", args.q));
  KDA_TRY(check_rows("k", args.k));
  KDA_TRY(check_rows("v", args.v));
  KDA_TRY(check_rows("g", args.g));
  KDA_TRY(check_rows("o", args.o));
  if (reinterpret_cast<uintptr_t>(args.dt_bias) % 16) return fail(KDA_UNSUPPORTED, "dt_bias must start at 16 bytes");
  KDA_TRY(check_device());
  const HopperForward p = forward_of(args);
  const auto stream = static_cast<cudaStream_t>(args.stream);
  const int64_t slots = slots_of(args);
  if (args.tokens > 0 && slots > 0) KDA_CUDA(hopper::launch_prepare(p, slots, stream));
  if (args.sequences > 0) KDA_CUDA(hopper::launch_scan(p, stream));
  return KDA_OK;
}

}  // namespace kda
