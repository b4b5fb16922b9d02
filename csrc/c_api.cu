// The C ABI: copies the caller's struct, checks every field, and calls the kernels. No kernel is in this file.
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "backward/backward.h"
#include "prefill/prefill.h"

namespace kda {

static thread_local char last_error[512] = "";

kda_status fail(kda_status status, const char *format, ...) {
  va_list rest;
  va_start(rest, format);
  vsnprintf(last_error, sizeof last_error, format, rest);
  va_end(rest);
  return status;
}

static constexpr int64_t MAX_SIZE = int64_t(1) << 40;
static constexpr size_t MAX_STRUCT = 4096;  // no struct of any version is larger: a size beyond it was never set

static constexpr int64_t MAX_ELEMENTS = int64_t(1) << 60;  // of a tensor: 8 bytes each, and sums of two such numbers, fit 64 bits

// a * b, or MAX_ELEMENTS + 1 where that is more than MAX_ELEMENTS; neither is negative.
static int64_t product(int64_t a, int64_t b) {
  int64_t found = 0;
  return __builtin_mul_overflow(a, b, &found) || found > MAX_ELEMENTS ? MAX_ELEMENTS + 1 : found;
}

static kda_status check_elements(const char *what, int64_t a, int64_t b, int64_t c, int64_t d) {
  if (product(product(product(a, b), c), d) <= MAX_ELEMENTS) return KDA_OK;
  return fail(KDA_INVALID_ARGUMENT, "%s may hold 2^60 elements, got %lld x %lld x %lld x %lld", what, (long long)a, (long long)b,
              (long long)c, (long long)d);
}

static kda_status check_address(const char *name, const void *data, uintptr_t bytes) {
  if (reinterpret_cast<uintptr_t>(data) % bytes == 0) return KDA_OK;
  return fail(KDA_INVALID_ARGUMENT, "%s must be aligned to the %d bytes of its elements, got %p", name, int(bytes), data);
}

// Strides of a tensor of [batch, heads, tokens, dim]: they reach no element that 64 bits do not; `written`: each once.
static kda_status check_strides(const char *name, const kda_tensor &x, int64_t batch, int64_t heads, int64_t tokens, int64_t dim,
                                bool written) {
  if (x.batch_stride < 0 || x.head_stride < 0 || x.token_stride < 0)
    return fail(KDA_INVALID_ARGUMENT, "%s must have strides >= 0, got %lld, %lld, %lld", name, (long long)x.batch_stride,
                (long long)x.head_stride, (long long)x.token_stride);
  if (batch <= 0 || tokens <= 0) return KDA_OK;
  const int64_t far = MAX_ELEMENTS / 4;
  if (product(batch - 1, x.batch_stride) > far || product(heads - 1, x.head_stride) > far || product(tokens - 1, x.token_stride) > far)
    return fail(KDA_INVALID_ARGUMENT, "%s must have strides that reach fewer than 2^58 elements, got %lld, %lld, %lld", name,
                (long long)x.batch_stride, (long long)x.head_stride, (long long)x.token_stride);
  if (written && ((batch > 1 && x.batch_stride < dim) || (heads > 1 && x.head_stride < dim) || (tokens > 1 && x.token_stride < dim)))
    return fail(KDA_INVALID_ARGUMENT, "%s is written: its strides must be at least %lld, got %lld, %lld, %lld", name, (long long)dim,
                (long long)x.batch_stride, (long long)x.head_stride, (long long)x.token_stride);
  return KDA_OK;
}

static kda_status check_tensor(const char *name, kda_tensor &x, int64_t batch, int64_t heads, int64_t tokens, int64_t dim,
                               const int32_t *dtypes, int count, bool pointers, bool written = false) {
  bool known = false;
  for (int i = 0; i < count; ++i) known = known || x.dtype == dtypes[i];
  if (!known)
    return fail(KDA_INVALID_ARGUMENT, "%s.dtype must be %d%s, got %d", name, dtypes[0], count > 1 ? " or another listed dtype" : "",
                x.dtype);
  if (x.batch_stride == 0 && x.head_stride == 0 && x.token_stride == 0) {
    x.token_stride = dim;
    x.head_stride = dim * tokens;
    x.batch_stride = dim * tokens * heads;
  }
  KDA_TRY(check_strides(name, x, batch, heads, tokens, dim, written));
  if (pointers && x.data == nullptr && tokens > 0) return fail(KDA_INVALID_ARGUMENT, "%s.data must not be NULL", name);
  return check_address(name, x.data, x.dtype == KDA_FLOAT32 ? 4 : 2);
}

static kda_status check_size(const char *name, int64_t value, int64_t least) {
  if (value < least || value > MAX_SIZE)
    return fail(KDA_INVALID_ARGUMENT, "%s must lie in %lld..2^40, got %lld", name, (long long)least, (long long)value);
  return KDA_OK;
}

static kda_status check_options(const kda_prefill_args &args) {
  if (args.gate < KDA_GATE_LOG_DECAY || args.gate > KDA_GATE_BOUNDED)
    return fail(KDA_INVALID_ARGUMENT, "gate must be 0, 1 or 2, got %d", args.gate);
  if (args.beta_kind < KDA_BETA_GIVEN || args.beta_kind > KDA_BETA_DOUBLE_SIGMOID)
    return fail(KDA_INVALID_ARGUMENT, "beta_kind must be 0, 1 or 2, got %d", args.beta_kind);
  if (args.gate == KDA_GATE_SOFTPLUS && args.A_log == nullptr)
    return fail(KDA_INVALID_ARGUMENT, "A_log is required with the softplus gate, got NULL");
  if ((args.gate == KDA_GATE_BOUNDED || args.safe_gate) && !(args.lower_bound >= -5.0f && args.lower_bound < 0.0f))
    return fail(KDA_INVALID_ARGUMENT, "lower_bound must lie in [-5, 0), got %g", args.lower_bound);
  if (!std::isfinite(args.scale)) return fail(KDA_INVALID_ARGUMENT, "scale must be finite, got %g", args.scale);
  if (args.cu_seqlens != nullptr && args.batch != 1)
    return fail(KDA_INVALID_ARGUMENT, "batch must be 1 with cu_seqlens, got %lld", (long long)args.batch);
  if (args.cu_seqlens != nullptr && (args.w != nullptr || args.u != nullptr))
    return fail(KDA_UNSUPPORTED, "w and u are not given out with cu_seqlens: pass NULL");
  if (args.chunk_size != 0 && args.chunk_size != 16 && args.chunk_size != 32 && args.chunk_size != 64 && args.chunk_size != 128)
    return fail(KDA_INVALID_ARGUMENT, "chunk_size must be 0, 16, 32, 64 or 128, got %lld", (long long)args.chunk_size);
  return KDA_OK;
}

// The caller's struct as this library knows it: shorter ones end in zeros; longer ones may not ask for what it does not know.
// `least`: bytes that a caller's struct must have; `name`: its type.
template <class Args>
static kda_status read_struct(const Args *given, size_t least, const char *name, Args &args) {
  if (given == nullptr) return fail(KDA_INVALID_ARGUMENT, "args must not be NULL");
  if (given->size < least || given->size > MAX_STRUCT)
    return fail(KDA_INVALID_ARGUMENT, "args.size must be sizeof(%s) = %zu, got %zu", name, sizeof args, given->size);
  memset(&args, 0, sizeof args);
  memcpy(&args, given, given->size < sizeof args ? given->size : sizeof args);
  const unsigned char *byte = reinterpret_cast<const unsigned char *>(given);
  for (size_t i = sizeof args; i < given->size; ++i)
    if (byte[i])
      return fail(KDA_UNSUPPORTED, "args sets a field at byte %zu of %zu: this library knows the first %zu", i, given->size, sizeof args);
  return KDA_OK;
}

// The same with every field checked and defaults filled in. `pointers`: the tensors' memory must be there already.
static kda_status read_args(const kda_prefill_args *given, const int32_t *io, int n_io, const int32_t *wide, int n_wide, bool pointers,
                            kda_prefill_args &args) {
  KDA_TRY(read_struct(given, offsetof(kda_prefill_args, scale), "kda_prefill_args", args));
  KDA_TRY(check_size("batch", args.batch, 0));
  KDA_TRY(check_size("tokens", args.tokens, 0));
  KDA_TRY(check_size("heads", args.heads, 1));
  KDA_TRY(check_size("value_heads", args.value_heads, 1));
  KDA_TRY(check_size("key_dim", args.key_dim, 1));
  KDA_TRY(check_size("value_dim", args.value_dim, 1));
  if (args.value_heads % args.heads)
    return fail(KDA_INVALID_ARGUMENT, "value_heads must be a multiple of heads, got %lld and %lld", (long long)args.value_heads,
                (long long)args.heads);
  const int64_t dim = args.key_dim > args.value_dim ? args.key_dim : args.value_dim;
  KDA_TRY(check_elements("a tensor of batch x tokens x value_heads x dim", args.batch, args.tokens, args.value_heads, dim));
  KDA_TRY(check_options(args));
  if (args.cu_seqlens != nullptr) KDA_TRY(check_size("sequences", args.sequences, 1));
  else args.sequences = args.batch;
  KDA_TRY(check_elements("the states of sequences x value_heads x key_dim x value_dim", args.sequences, args.value_heads, args.key_dim,
                         args.value_dim));
  KDA_TRY(check_address("initial_state", args.initial_state, 4));
  KDA_TRY(check_address("final_state", args.final_state, 4));
  KDA_TRY(check_address("A_log", args.A_log, 4));
  KDA_TRY(check_address("dt_bias", args.dt_bias, 4));
  KDA_TRY(check_address("cu_seqlens", args.cu_seqlens, args.cu_seqlens_64 ? 8 : 4));
  const int64_t T = args.batch > 0 ? args.tokens : 0;
  KDA_TRY(check_tensor("q", args.q, args.batch, args.heads, T, args.key_dim, io, n_io, pointers));
  KDA_TRY(check_tensor("k", args.k, args.batch, args.heads, T, args.key_dim, io, n_io, pointers));
  KDA_TRY(check_tensor("v", args.v, args.batch, args.value_heads, T, args.value_dim, io, n_io, pointers));
  KDA_TRY(check_tensor("g", args.g, args.batch, args.value_heads, T, args.key_dim, wide, n_wide, pointers));
  KDA_TRY(check_tensor("beta", args.beta, args.batch, args.value_heads, T, 1, wide, n_wide, pointers));
  KDA_TRY(check_tensor("o", args.o, args.batch, args.value_heads, T, args.value_dim, io, n_io, pointers, true));
  if (args.scale == 0.0f) args.scale = float(1.0 / std::sqrt(double(args.key_dim)));
  return KDA_OK;
}

static kda_status check_workspace(const kda_prefill_args &args, size_t bytes) {
  if (args.workspace_size < bytes)
    return fail(KDA_WORKSPACE_TOO_SMALL, "workspace_size must be at least %zu, got %zu", bytes, args.workspace_size);
  if (bytes > 0 && (args.workspace == nullptr || reinterpret_cast<uintptr_t>(args.workspace) % 256))
    return fail(KDA_INVALID_ARGUMENT, "workspace must be device memory aligned to 256 bytes, got %p", args.workspace);
  return KDA_OK;
}

static kda_status check_not_kept(const kda_prefill_args &args) {
  return keeps(args) ? fail(KDA_UNSUPPORTED, "the float32 kernels keep nothing for a backward: lower, solved, checkpoints and what follows "
                                             "them must be NULL")
                     : KDA_OK;
}

static const int32_t F32[] = {KDA_FLOAT32};
#ifdef KDAKIT_HOPPER
static const int32_t BF16[] = {KDA_BFLOAT16}, EITHER[] = {KDA_BFLOAT16, KDA_FLOAT32};
#endif

}  // namespace kda

using namespace kda;

extern "C" kda_status kda_prefill_workspace_f32(const kda_prefill_args *given, size_t *bytes) {
  kda_prefill_args args;
  if (bytes == nullptr) return fail(KDA_INVALID_ARGUMENT, "bytes must not be NULL");
  KDA_TRY(read_args(given, F32, 1, F32, 1, false, args));
  KDA_TRY(check_not_kept(args));
  return workspace_f32(args, *bytes);
}

extern "C" kda_status kda_prefill_f32(const kda_prefill_args *given) {
  kda_prefill_args args;
  size_t bytes = 0;
  KDA_TRY(read_args(given, F32, 1, F32, 1, true, args));
  KDA_TRY(check_not_kept(args));
  KDA_TRY(workspace_f32(args, bytes));
  KDA_TRY(check_workspace(args, bytes));
  KDA_TRY(clear_padding(args, 4));
  return prefill_f32(args);
}

#ifdef KDAKIT_HOPPER
extern "C" kda_status kda_prefill_workspace_bf16(const kda_prefill_args *given, size_t *bytes) {
  kda_prefill_args args;
  if (bytes == nullptr) return fail(KDA_INVALID_ARGUMENT, "bytes must not be NULL");
  KDA_TRY(read_args(given, BF16, 1, EITHER, 2, false, args));
  return workspace_bf16(args, *bytes);
}

extern "C" kda_status kda_prefill_bf16(const kda_prefill_args *given) {
  kda_prefill_args args;
  size_t bytes = 0;
  KDA_TRY(read_args(given, BF16, 1, EITHER, 2, true, args));
  KDA_TRY(workspace_bf16(args, bytes));
  KDA_TRY(check_workspace(args, bytes));
  KDA_TRY(clear_padding(args, 2));
  return prefill_bf16(args);
}

extern "C" kda_status kda_gradient_bf16(const kda_gradient_args *given) {
  kda_gradient_args args;
  kda_prefill_args forward;
  KDA_TRY(read_struct(given, offsetof(kda_gradient_args, lower_dtype), "kda_gradient_args", args));
  KDA_TRY(read_args(args.forward, BF16, 1, EITHER, 2, false, forward));
  return gradient_bf16(args, forward);
}

extern "C" kda_status kda_rebuild_bf16(const kda_rebuild_args *given) {
  kda_rebuild_args args;
  kda_prefill_args forward;
  KDA_TRY(read_struct(given, offsetof(kda_rebuild_args, lower_dtype), "kda_rebuild_args", args));
  KDA_TRY(read_args(args.forward, BF16, 1, EITHER, 2, false, forward));
  return rebuild_bf16(args, forward);
}

extern "C" kda_status kda_reverse_bf16(const kda_reverse_args *given) {
  kda_reverse_args args;
  kda_prefill_args forward;
  KDA_TRY(read_struct(given, offsetof(kda_reverse_args, k_solved_dtype), "kda_reverse_args", args));
  KDA_TRY(read_args(args.forward, BF16, 1, EITHER, 2, false, forward));
  return reverse_bf16(args, forward);
}
#else
static kda_status no_bf16() { return fail(KDA_NOT_BUILT, "this library was built without the bfloat16 kernel"); }
extern "C" kda_status kda_prefill_workspace_bf16(const kda_prefill_args *, size_t *) { return no_bf16(); }
extern "C" kda_status kda_prefill_bf16(const kda_prefill_args *) { return no_bf16(); }
extern "C" kda_status kda_gradient_bf16(const kda_gradient_args *) { return no_bf16(); }
extern "C" kda_status kda_rebuild_bf16(const kda_rebuild_args *) { return no_bf16(); }
extern "C" kda_status kda_reverse_bf16(const kda_reverse_args *) { return no_bf16(); }
#endif

extern "C" const char *kda_last_error(void) { return last_error; }

extern "C" int kda_abi_version(void) { return KDA_ABI_VERSION; }

extern "C" const char *kda_status_name(kda_status status) {
  switch (status) {
    case KDA_OK: return "ok";
    case KDA_INVALID_ARGUMENT: return "invalid argument";
    case KDA_UNSUPPORTED: return "unsupported";
    case KDA_NOT_BUILT: return "not built";
    case KDA_WORKSPACE_TOO_SMALL: return "workspace too small";
    case KDA_DEVICE_TOO_SMALL: return "device too small";
    case KDA_CUDA_ERROR: return "CUDA error";
  }
  return "unknown status";
}
