// Host side of the bfloat16 forward: what it refuses, its workspace, its launches.
#include "hopper_arguments.h"
#include "hopper_links.cuh"
#include "hopper_record.h"
#include "prefill.h"

namespace kda {
namespace {

using hopper::HopperForward;
using hopper::forward_of;
using hopper::kChunk;
using hopper::slots_of;

kda_status check_rows(const char *name, const kda_tensor &x) {
  if (reinterpret_cast<uintptr_t>(x.data) % 16 || x.batch_stride % 8 || x.token_stride % 8 || x.head_stride % 8)
    return fail(KDA_UNSUPPORTED, "%s must start at 16 bytes and have strides that are multiples of 8 elements", name);
  if (x.token_stride >= int64_t{1} << 24)
    return fail(KDA_UNSUPPORTED, "%s must have a token stride below 2^24 elements, got %lld", name, (long long)x.token_stride);
  return KDA_OK;
}

// The records and what else a backward need not make again: all of it.
kda_status check_record(const kda_prefill_args &args) {
  if (!args.record || !args.r || !args.factors || !args.lower || !args.checkpoints || args.solved)
    return fail(KDA_INVALID_ARGUMENT, "record, r, factors, lower and checkpoints must be given together, without solved");
  if (args.key_dim != 128 || args.initial_state)
    return fail(KDA_UNSUPPORTED, "record is kept with key_dim = 128, without initial_state, got %lld%s", (long long)args.key_dim,
                args.initial_state ? " and a state" : "");
  const bool given = args.gate == KDA_GATE_LOG_DECAY && args.beta_kind == KDA_BETA_GIVEN;
  if (!given && (!args.l2norm || args.beta_kind == KDA_BETA_GIVEN))
    return fail(KDA_UNSUPPORTED, "record is kept with l2norm and beta_kind %d or %d, or gate %d and beta_kind %d, got %d, %d, %d",
                KDA_BETA_SIGMOID, KDA_BETA_DOUBLE_SIGMOID, KDA_GATE_LOG_DECAY, KDA_BETA_GIVEN, args.l2norm, args.gate, args.beta_kind);
  const int64_t row = args.value_heads * args.value_dim;
  if (args.o.head_stride != args.value_dim || args.o.token_stride != row || (args.batch > 1 && args.o.batch_stride != args.tokens * row))
    return fail(KDA_UNSUPPORTED, "o must be packed as [B, T, HV, V] with record");
  if (args.checkpoint != 1 || args.group > 1)
    return fail(KDA_UNSUPPORTED, "record is kept with checkpoint = 1 and group = 0 or 1, got %d and %d", args.checkpoint, args.group);
  if (reinterpret_cast<uintptr_t>(args.record) % 128) return fail(KDA_UNSUPPORTED, "record must start at 128 bytes");
  for (const void *x : {args.r, static_cast<void *>(args.factors)})
    if (reinterpret_cast<uintptr_t>(x) % 16) return fail(KDA_UNSUPPORTED, "r and factors must start at 16 bytes");
  return KDA_OK;
}

// What a backward begins with: all of it or nothing.
kda_status check_kept(const kda_prefill_args &args) {
  if (!keeps(args)) return KDA_OK;
  if (args.record || args.r || args.factors) KDA_TRY(check_record(args));
  else if (!args.lower || !args.solved || !args.checkpoints)
    return fail(KDA_INVALID_ARGUMENT, "lower, solved and checkpoints must be given together");
  for (const void *x : {args.lower, args.solved, args.checkpoints})
    if (reinterpret_cast<uintptr_t>(x) % 16) return fail(KDA_UNSUPPORTED, "lower, solved and checkpoints must start at 16 bytes");
  if (args.lower_dtype != KDA_FLOAT16 && args.lower_dtype != KDA_FLOAT32)
    return fail(KDA_INVALID_ARGUMENT, "lower_dtype must be %d or %d, got %d", KDA_FLOAT16, KDA_FLOAT32, args.lower_dtype);
  if (args.group < 0 || args.group > 8 || (args.group & (args.group - 1)))
    return fail(KDA_INVALID_ARGUMENT, "group must be 0, 1, 2, 4 or 8, got %d", args.group);
  if (args.gate != KDA_GATE_LOG_DECAY && !args.l2norm)
    return fail(KDA_UNSUPPORTED, "lower, solved and checkpoints are kept for gate %d, or with l2norm, got gate %d", KDA_GATE_LOG_DECAY,
                args.gate);
  if (args.checkpoint_float32 && args.key_dim != 64)
    return fail(KDA_UNSUPPORTED, "checkpoints are float32 with key_dim = 64, got %lld", (long long)args.key_dim);
  if (args.checkpoint < 1) return fail(KDA_INVALID_ARGUMENT, "checkpoint must be at least 1, got %d", args.checkpoint);
  return KDA_OK;
}

// Into how many parts each sequence is scanned, by the microseconds that an H200 takes; 1: in one piece. All parts but the last are walked
// along once without outputs, then the states between them found, then all of them walked along. A multiprocessor holds one block. Where it
// fits no third part, two: they part only if the first is forgotten. With 32 heads that is 12 % less, or up to 5 % more where some heads
// part and others do not; softplus gates, which seldom forget everything, have two for up to kTwoSlow heads. Heads of 64 have no parts,
// nor have records without strengths.
int parts_of(const kda_prefill_args &args) {
  constexpr int kProcessors = 132, kMost = 64, kTwo = kProcessors / 4, kTwoSlow = 26;
  constexpr double kAgain = 0.9, kOutputs = 1.0, kLink = 1.2, kLaunch = 10.0;  // a chunk, a chunk, a part, once
  if (args.key_dim == 64 || args.block == 16 || (args.record && args.beta_kind == KDA_BETA_GIVEN)) return 1;
  if (args.parts > 0) return args.parts < kMost ? args.parts : kMost;
  const int64_t rows = args.sequences * args.value_heads;
  if (rows == 0) return 1;
  const int64_t chunks = args.cu_seqlens ? args.tokens / kChunk / args.sequences : (args.tokens + kChunk - 1) / kChunk;
  if (rows * 2 * 3 > kProcessors) return rows <= (args.gate == KDA_GATE_SOFTPLUS ? kTwoSlow : kTwo) && chunks >= 16 ? 2 : 1;
  int best = 1;
  double least = chunks * kOutputs;
  for (int n = 3; n <= kMost && rows * 2 * n <= kProcessors; ++n) {
    const double time = static_cast<double>((chunks + n - 1) / n) * (kAgain + kOutputs) + (n - 2) * kLink + kLaunch;
    if (time < least) least = time, best = n;
  }
  return best;
}

// Whether records are those of blocks: less to prepare, more steps from state to state. An H200 is faster with them from so many heads and
// sequences on.
bool by_blocks(const kda_prefill_args &args) {
  constexpr int64_t kMany = 48;
  if (args.block) return args.block == 16;
  return args.key_dim == 128 && !keeps(args) && args.sequences * args.value_heads >= kMany && parts_of(args) == 1;
}

kda_status check_block(const kda_prefill_args &args) {
  if (args.block != 0 && args.block != 16 && args.block != 64)
    return fail(KDA_INVALID_ARGUMENT, "block must be 0, 16 or 64, got %d", args.block);
  if (args.block == 16 && (args.key_dim != 128 || keeps(args)))
    return fail(KDA_UNSUPPORTED, "block = 16 needs key_dim = 128 and nothing that is kept for a backward, got key_dim = %lld",
                (long long)args.key_dim);
  return KDA_OK;
}

static_assert(hopper::Record<128>::record_bytes == KDA_RECORD_BYTES, "");

// Of the workspace.
size_t records_bytes(const kda_prefill_args &args) {
  if (args.record) return 0;
  const size_t each = args.key_dim == 64 ? hopper::Record<64>::record_bytes : hopper::Record<128>::record_bytes;
  return (static_cast<size_t>(slots_of(args) * args.value_heads) * each + 255) / 256 * 256;
}

}  // namespace

kda_status check_hopper() {
  int device = 0, major = 0, minor = 0;
  KDA_CUDA(cudaGetDevice(&device));
  KDA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  KDA_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major != 9 || minor != 0)
    return fail(KDA_UNSUPPORTED, "the bfloat16 kernels need compute capability 9.0, this device has %d.%d", major, minor);
  return KDA_OK;
}

kda_status workspace_bf16(const kda_prefill_args &args, size_t &bytes) {
  if (args.key_dim != args.value_dim || (args.key_dim != 64 && args.key_dim != 128))
    return fail(KDA_UNSUPPORTED, "the bfloat16 kernels need key_dim = value_dim = 64 or 128, got %lld and %lld", (long long)args.key_dim,
                (long long)args.value_dim);
  KDA_TRY(check_block(args));
  if (args.w || args.u) return fail(KDA_UNSUPPORTED, "the bfloat16 kernels do not give out w and u: pass NULL");
  const int64_t slots = slots_of(args);
  if (args.tokens >= int64_t{1} << 30 || slots >= int64_t{1} << 31 || slots * args.value_heads >= int64_t{1} << 31 ||
      args.sequences * args.value_heads >= int64_t{1} << 30)
    return fail(KDA_UNSUPPORTED, "the bfloat16 kernels take fewer than 2^30 tokens and 2^31 chunks of all heads");
  bytes = records_bytes(args) + hopper::links_bytes(args.sequences * args.value_heads, parts_of(args));
  return KDA_OK;
}

kda_status prefill_bf16(const kda_prefill_args &args) {
  KDA_TRY(check_rows("q", args.q));
  KDA_TRY(check_rows("k", args.k));
  KDA_TRY(check_rows("v", args.v));
  KDA_TRY(check_rows("g", args.g));
  KDA_TRY(check_rows("o", args.o));
  KDA_TRY(check_kept(args));
  if (reinterpret_cast<uintptr_t>(args.dt_bias) % 16) return fail(KDA_UNSUPPORTED, "dt_bias must start at 16 bytes");
  KDA_TRY(check_hopper());
  HopperForward p = forward_of(args);
  p.parts = parts_of(args), p.links = static_cast<uint8_t *>(args.workspace) + records_bytes(args);
  const auto stream = static_cast<cudaStream_t>(args.stream);
  const int64_t slots = slots_of(args);
  const hopper::Kept kept = hopper::kept_of(args);
  const bool keep = keeps(args), blocks = by_blocks(args);
  if (args.tokens > 0 && slots > 0)
    KDA_CUDA(args.record ? hopper::launch_prepare_record(p, kept, slots, stream)
             : keep      ? hopper::launch_prepare_kept(p, kept, slots, stream)
             : blocks    ? hopper::launch_prepare_blocks(p, slots, stream)
                         : hopper::launch_prepare(p, slots, stream));
  if (args.sequences > 0 && p.parts > 2) KDA_CUDA(hopper::launch_parts(p, stream));
  if (args.sequences > 0)
    KDA_CUDA(args.record ? hopper::launch_scan_record(p, kept, stream)
             : keep      ? hopper::launch_scan_kept(p, kept, stream)
             : blocks    ? hopper::launch_scan_blocks(p, stream)
                         : hopper::launch_scan(p, stream));
  return KDA_OK;
}

}  // namespace kda
