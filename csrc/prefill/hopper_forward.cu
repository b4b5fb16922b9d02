// Host side of the bfloat16 forward: what it refuses, its workspace, its launches.
#include "hopper_arguments.h"
#include "hopper_record.h"
#include "prefill.h"

namespace kda {
namespace {

using hopper::HopperForward;
using hopper::forward_of;
using hopper::slots_of;

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
