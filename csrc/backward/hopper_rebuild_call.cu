// Host side of the bfloat16 kernel that makes a forward's tiles again: what it refuses, its launch.
#include "backward.h"
#include "hopper_rebuild_arguments.h"

namespace kda {
namespace {

kda_status check_address(const char *name, const void *data, bool needed) {
  if (needed && data == nullptr) return fail(KDA_INVALID_ARGUMENT, "%s must not be NULL", name);
  if (reinterpret_cast<uintptr_t>(data) % 16) return fail(KDA_UNSUPPORTED, "%s must start at 16 bytes", name);
  return KDA_OK;
}

kda_status check_rows(const char *name, const kda_tensor &x) {
  if (x.data == nullptr) return fail(KDA_INVALID_ARGUMENT, "forward->%s.data must not be NULL", name);
  if (reinterpret_cast<uintptr_t>(x.data) % 16 || x.batch_stride % 8 || x.token_stride % 8 || x.head_stride % 8)
    return fail(KDA_UNSUPPORTED, "forward->%s must start at 16 bytes and have strides that are multiples of 8 elements", name);
  return KDA_OK;
}

}  // namespace

kda_status rebuild_bf16(const kda_rebuild_args &args, const kda_prefill_args &forward) {
  if (forward.key_dim != 128)
    return fail(KDA_UNSUPPORTED, "the bfloat16 backward needs key_dim = 128, got %lld", (long long)forward.key_dim);
  const int64_t slots = hopper::slots_of(forward);
  if (forward.tokens >= int64_t{1} << 30 || slots >= int64_t{1} << 31)
    return fail(KDA_UNSUPPORTED, "the bfloat16 backward takes fewer than 2^30 tokens and 2^31 chunks");
  if (args.lower_dtype != KDA_FLOAT16 && args.lower_dtype != KDA_FLOAT32)
    return fail(KDA_INVALID_ARGUMENT, "lower_dtype must be %d or %d, got %d", KDA_FLOAT16, KDA_FLOAT32, args.lower_dtype);
  if (args.group < 0 || args.group > 8 || (args.group & (args.group - 1)))
    return fail(KDA_INVALID_ARGUMENT, "group must be 0, 1, 2, 4 or 8, got %d", args.group);
  if (args.group > 1 && args.lower_dtype != KDA_FLOAT32)
    return fail(KDA_UNSUPPORTED, "group must be 0 or 1 where lower is float16, got %d", args.group);
  if (forward.batch * forward.tokens == 0) return KDA_OK;
  KDA_TRY(check_rows("q", forward.q));
  KDA_TRY(check_rows("k", forward.k));
  KDA_TRY(check_rows("g", forward.g));
  if (forward.beta.data == nullptr) return fail(KDA_INVALID_ARGUMENT, "forward->beta.data must not be NULL");
  KDA_TRY(check_address("dt_bias", forward.dt_bias, false));
  KDA_TRY(check_address("lower", args.lower, true));
  KDA_TRY(check_address("tiles", args.tiles, true));
  KDA_TRY(check_address("decay", args.decay, true));
  KDA_TRY(check_address("factors", args.factors, true));
  KDA_TRY(check_address("first", args.first, false));
  KDA_TRY(check_hopper());
  KDA_CUDA(hopper::launch_rebuild(hopper::rebuild_of(args, forward), slots, static_cast<cudaStream_t>(forward.stream)));
  return KDA_OK;
}

}  // namespace kda
