// Host side of the bfloat16 backward over chunks: what it refuses, its launch.
#include "backward.h"
#include "hopper_gradient_arguments.h"
#include "hopper_rebuild_arguments.h"
#include "hopper_reverse_arguments.h"

namespace kda {
namespace {

struct Pointer {
  const char *name;
  const void *data;
  bool needed;
};

template <size_t COUNT>
kda_status check_pointers(const Pointer (&tensors)[COUNT]) {
  for (const auto &x : tensors) {
    if (x.needed && x.data == nullptr) return fail(KDA_INVALID_ARGUMENT, "%s must not be NULL", x.name);
    if (reinterpret_cast<uintptr_t>(x.data) % 16) return fail(KDA_UNSUPPORTED, "%s must start at 16 bytes", x.name);
  }
  return KDA_OK;
}

// Every tensor but those of q, k, g and beta, which the forward describes.
kda_status check_gradient(const kda_gradient_args &args, const kda_prefill_args &forward) {
  const Pointer tensors[] = {
      {"lower", args.lower, true},   {"factors", args.factors, true},         {"states", args.states, true},
      {"d_states", args.d_states, true}, {"r", args.r, true},                 {"d_o", args.d_o, true},
      {"d_v", args.d_v, true},       {"alone", args.alone, false},            {"d_final", args.d_final, false},
      {"d_q", args.d_q, true},       {"d_k", args.d_k, true},                 {"d_g", args.d_g, true},
      {"d_beta", args.d_beta, true}, {"A_shares", args.A_shares, forward.A_log != nullptr && forward.gate != KDA_GATE_LOG_DECAY},
      {"bias_shares", args.bias_shares, forward.dt_bias != nullptr && forward.gate != KDA_GATE_LOG_DECAY},
      {"before_last", args.before_last, false}, {"after_first", args.after_first, false},
      {"states_lost", args.states_lost, args.d_states_lost != nullptr},
      {"d_states_lost", args.d_states_lost, args.states_lost != nullptr},
      {"forward->initial_state", forward.initial_state, false},
  };
  return check_pointers(tensors);
}

kda_status check_reverse(const kda_reverse_args &args) {
  const Pointer tensors[] = {
      {"tiles", args.tiles, !args.record}, {"solved", args.solved, !args.record}, {"decay", args.decay, !args.record},
      {"factors", args.factors, !args.record}, {"record", args.record, false},
      {"d_o", args.d_o, true},     {"d_final", args.d_final, false},   {"d_states", args.d_states, true}, {"d_v", args.d_v, true},
      {"alone", args.alone, false}, {"y_lost", args.y_lost, false},    {"d_initial", args.d_initial, false},
      {"after_first", args.after_first, false}, {"d_states_lost", args.d_states_lost, false}, {"q_lost", args.q_lost, false},
  };
  return check_pointers(tensors);
}

kda_status check_rebuild(const kda_rebuild_args &args) {
  const Pointer tensors[] = {
      {"lower", args.lower, true},     {"tiles", args.tiles, true},  {"decay", args.decay, true},
      {"factors", args.factors, true}, {"first", args.first, false}, {"q_lost", args.q_lost, false},
  };
  return check_pointers(tensors);
}

kda_status check_group(int32_t group) {
  if (group >= 0 && group <= 8 && (group & (group - 1)) == 0) return KDA_OK;
  return fail(KDA_INVALID_ARGUMENT, "group must be 0, 1, 2, 4 or 8, got %d", group);
}

kda_status check_lower(int32_t dtype, int32_t group) {
  if (dtype != KDA_FLOAT16 && dtype != KDA_FLOAT32)
    return fail(KDA_INVALID_ARGUMENT, "lower_dtype must be %d or %d, got %d", KDA_FLOAT16, KDA_FLOAT32, dtype);
  KDA_TRY(check_group(group));
  if (group > 1 && dtype != KDA_FLOAT32) return fail(KDA_UNSUPPORTED, "group must be 0 or 1 where lower is float16, got %d", group);
  return KDA_OK;
}

kda_status check_sizes(const kda_prefill_args &forward, bool or_64 = false) {
  const int64_t K = forward.key_dim;
  if (K != forward.value_dim || (K != 128 && !(or_64 && K == 64)))
    return fail(KDA_UNSUPPORTED, "this stage of the bfloat16 backward needs key_dim = value_dim = %s128, got %lld and %lld",
                or_64 ? "64 or " : "", (long long)K, (long long)forward.value_dim);
  if (forward.tokens >= int64_t{1} << 30 || hopper::slots_of(forward) >= int64_t{1} << 31)
    return fail(KDA_UNSUPPORTED, "the bfloat16 backward takes fewer than 2^30 tokens and 2^31 chunks");
  return KDA_OK;
}

kda_status check_rows(const char *name, const kda_tensor &x) {
  if (x.data == nullptr) return fail(KDA_INVALID_ARGUMENT, "forward->%s.data must not be NULL", name);
  if (reinterpret_cast<uintptr_t>(x.data) % 16 || x.batch_stride % 8 || x.token_stride % 8 || x.head_stride % 8)
    return fail(KDA_UNSUPPORTED, "forward->%s must start at 16 bytes and have strides that are multiples of 8 elements", name);
  return KDA_OK;
}

kda_status check_inputs(const kda_prefill_args &forward) {
  KDA_TRY(check_rows("q", forward.q));
  KDA_TRY(check_rows("k", forward.k));
  KDA_TRY(check_rows("g", forward.g));
  if (forward.beta.data == nullptr) return fail(KDA_INVALID_ARGUMENT, "forward->beta.data must not be NULL");
  if (reinterpret_cast<uintptr_t>(forward.dt_bias) % 16) return fail(KDA_UNSUPPORTED, "dt_bias must start at 16 bytes");
  return KDA_OK;
}

}  // namespace

kda_status gradient_bf16(const kda_gradient_args &args, const kda_prefill_args &forward) {
  KDA_TRY(check_sizes(forward, true));
  if (args.states_lost != nullptr && forward.key_dim != 64)
    return fail(KDA_UNSUPPORTED, "states_lost must be NULL but with key_dim = 64, got key_dim = %lld", (long long)forward.key_dim);
  KDA_TRY(check_lower(args.lower_dtype, args.group));
  if (args.d_q_dtype != KDA_BFLOAT16 && args.d_q_dtype != KDA_FLOAT32)
    return fail(KDA_INVALID_ARGUMENT, "d_q_dtype must be %d or %d, got %d", KDA_BFLOAT16, KDA_FLOAT32, args.d_q_dtype);
  if (forward.batch * forward.tokens == 0) return KDA_OK;
  KDA_TRY(check_inputs(forward));
  KDA_TRY(check_gradient(args, forward));
  KDA_TRY(check_hopper());
  const auto stream = static_cast<cudaStream_t>(forward.stream);
  const int head = static_cast<int>(forward.key_dim);
  KDA_CUDA(hopper::launch_gradient(hopper::gradient_of(args, forward), head, hopper::slots_of(forward), stream));
  return KDA_OK;
}

kda_status rebuild_bf16(const kda_rebuild_args &args, const kda_prefill_args &forward) {
  KDA_TRY(check_sizes(forward, true));
  KDA_TRY(check_lower(args.lower_dtype, args.group));
  if (args.q_lost != nullptr && (forward.key_dim != 64 || args.lower_dtype != KDA_FLOAT32))
    return fail(KDA_UNSUPPORTED, "q_lost must be NULL but with key_dim = 64 and lower_dtype = %d, got %lld and %d", KDA_FLOAT32,
                (long long)forward.key_dim, args.lower_dtype);
  if (forward.batch * forward.tokens == 0) return KDA_OK;
  KDA_TRY(check_inputs(forward));
  KDA_TRY(check_rebuild(args));
  KDA_TRY(check_hopper());
  const auto stream = static_cast<cudaStream_t>(forward.stream);
  KDA_CUDA(hopper::launch_rebuild(hopper::rebuild_of(args, forward), hopper::slots_of(forward), stream));
  return KDA_OK;
}

kda_status reverse_bf16(const kda_reverse_args &args, const kda_prefill_args &forward) {
  KDA_TRY(check_sizes(forward, true));
  if (args.k_solved_dtype != KDA_BFLOAT16 && args.k_solved_dtype != KDA_FLOAT16)
    return fail(KDA_INVALID_ARGUMENT, "k_solved_dtype must be %d or %d, got %d", KDA_BFLOAT16, KDA_FLOAT16, args.k_solved_dtype);
  KDA_TRY(check_group(args.group));
  if (args.channels != 0 && args.channels != 64 && args.channels != 128)
    return fail(KDA_INVALID_ARGUMENT, "channels must be 0, 64 or 128, got %d", args.channels);
  if (args.channels > forward.value_dim)
    return fail(KDA_UNSUPPORTED, "channels must be 0 or 64 with value_dim = 64, got %d", args.channels);
  if ((args.d_states_lost != nullptr || args.q_lost != nullptr) && forward.key_dim != 64)
    return fail(KDA_UNSUPPORTED, "d_states_lost and q_lost must be NULL but with key_dim = 64, got key_dim = %lld",
                (long long)forward.key_dim);
  if (args.q_lost != nullptr && args.k_solved_dtype != KDA_BFLOAT16)
    return fail(KDA_UNSUPPORTED, "q_lost must be NULL but with k_solved_dtype = %d, got %d", KDA_BFLOAT16, args.k_solved_dtype);
  if (args.record != nullptr) {
    if (forward.key_dim != 128 || args.group > 1)
      return fail(KDA_UNSUPPORTED, "record needs key_dim = 128 and group = 0 or 1, got %lld and %d", (long long)forward.key_dim,
                  args.group);
    if (args.tiles || args.solved || args.decay)
      return fail(KDA_INVALID_ARGUMENT, "tiles, solved and decay must be NULL with record");
    if (forward.beta_kind != KDA_BETA_GIVEN ? args.factors || args.alone : !args.factors)
      return fail(KDA_INVALID_ARGUMENT, "factors must be given with record and beta_kind = %d, else it and alone must be NULL",
                  KDA_BETA_GIVEN);
    if (reinterpret_cast<uintptr_t>(args.record) % 128) return fail(KDA_UNSUPPORTED, "record must start at 128 bytes");
  }
  const int64_t slots = hopper::slots_of(forward);
  if (slots > ((int64_t{1} << 31) - 1) / (3 * hopper::kChunk) / forward.value_heads)  // rows of `tiles` are counted in 32 bits
    return fail(KDA_UNSUPPORTED, "the bfloat16 backward takes fewer than 2^31 / 192 chunks of value heads");
  if (forward.batch * forward.tokens == 0 && args.d_initial == nullptr) return KDA_OK;
  if (slots == 0) return fail(KDA_UNSUPPORTED, "the bfloat16 backward needs at least one chunk");
  KDA_TRY(check_reverse(args));
  KDA_TRY(check_hopper());
  KDA_CUDA(hopper::launch_reverse(hopper::reverse_of(args, forward), slots, static_cast<cudaStream_t>(forward.stream)));
  return KDA_OK;
}

}  // namespace kda
