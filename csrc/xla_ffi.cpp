// kda_prefill_f32 and kda_prefill_bf16 as one XLA custom call: [B, T, H, D] row-major buffers, an empty buffer where an optional one is
// absent. q's dtype chooses. Built with the headers that ship with jaxlib and linked to libkdakit.so; no CUDA headers.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "include/kdakit.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using Any = ffi::AnyBuffer;
using F32 = ffi::Buffer<ffi::F32>;

static const int32_t UNKNOWN = -1;  // a dtype that the library refuses by name

static kda_tensor tokens_first(const Any &x) {
  const auto dims = x.dimensions();
  const int64_t T = dims[1], H = dims[2], D = dims.size() > 3 ? dims[3] : 1;
  const int32_t dtype = x.element_type() == ffi::F32    ? int32_t(KDA_FLOAT32)
                        : x.element_type() == ffi::BF16 ? int32_t(KDA_BFLOAT16)
                                                        : UNKNOWN;
  kda_tensor tensor = {x.untyped_data(), dtype, 0, T * H * D, D, H * D};
  return tensor;
}

static std::string shape_text(ffi::Span<const int64_t> dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

// Empty, or what is wrong with the shape of a buffer: XLA gives a handler whatever the program says.
static std::string wrong_shape(const char *name, ffi::Span<const int64_t> dims, std::initializer_list<int64_t> want) {
  if (dims.size() == want.size() && std::equal(want.begin(), want.end(), dims.begin())) return "";
  return std::string("kdakit: ") + name + " must be " + shape_text(ffi::Span<const int64_t>(want.begin(), want.size())) +
         ", got " + shape_text(dims);
}

static std::string wrong_count(const char *name, size_t found, int64_t want) {
  if (found == 0 || found == size_t(want)) return "";
  return std::string("kdakit: ") + name + " must hold 0 or " + std::to_string(want) + " elements, got " + std::to_string(found);
}

static const float *optional(const F32 &x) { return x.element_count() ? x.typed_data() : nullptr; }

static ffi::Error failure(kda_status status) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("kdakit: ") + kda_status_name(status) + ": " + kda_last_error());
}

// Empty, or the first buffer of a call that is not of the shape which q, v and cu_seqlens give it.
static std::string wrong_buffer(const Any &q, const Any &k, const Any &v, const Any &g, const Any &beta, const F32 &A_log,
                                const F32 &dt_bias, const F32 &initial_state, const Any &cu_seqlens, const Any &o,
                                const F32 &final_state, bool state_v_first) {
  const auto shape = q.dimensions(), values = v.dimensions();
  if (shape.size() != 4 || values.size() != 4) return "kdakit: q must be [B, T, H, K] and v [B, T, HV, V]";
  const int64_t B = shape[0], T = shape[1], H = shape[2], K = shape[3], HV = values[2], V = values[3];
  const bool packed = cu_seqlens.element_count() != 0;
  const int64_t N = packed ? int64_t(cu_seqlens.element_count()) - 1 : B, rows = state_v_first ? V : K, columns = state_v_first ? K : V;
  for (const std::string &wrong : {
         wrong_shape("k", k.dimensions(), {B, T, H, K}), wrong_shape("v", values, {B, T, HV, V}),
         wrong_shape("g", g.dimensions(), {B, T, HV, K}),
         wrong_shape("beta", beta.dimensions(), {B, T, HV}), wrong_shape("o", o.dimensions(), {B, T, HV, V}),
         wrong_shape("final_state", final_state.dimensions(), {N, HV, rows, columns}),
         initial_state.element_count() ? wrong_shape("initial_state", initial_state.dimensions(), {N, HV, rows, columns}) : std::string(),
         wrong_count("A_log", A_log.element_count(), HV), wrong_count("dt_bias", dt_bias.element_count(), HV * K),
       })
    if (!wrong.empty()) return wrong;
  if (packed && cu_seqlens.element_type() != ffi::S32 && cu_seqlens.element_type() != ffi::S64)
    return "kdakit: cu_seqlens must be int32 or int64";
  return "";
}

static ffi::Error prefill(void *stream, ffi::ScratchAllocator scratch, Any q, Any k, Any v, Any g, Any beta, F32 A_log, F32 dt_bias,
                          F32 initial_state, Any cu_seqlens, ffi::Result<Any> o, ffi::Result<F32> final_state, int64_t chunk_size,
                          float scale, int32_t gate, float lower_bound, int32_t safe_gate, int32_t beta_kind, int32_t l2norm,
                          int32_t state_v_first) {
  const std::string wrong =
      wrong_buffer(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *o, *final_state, state_v_first != 0);
  if (!wrong.empty()) return ffi::Error(ffi::ErrorCode::kInvalidArgument, wrong);
  kda_prefill_args args = KDA_PREFILL_ARGS_INIT;
  const auto shape = q.dimensions(), values = v.dimensions();
  const bool packed = cu_seqlens.element_count() != 0;
  const bool half = q.element_type() == ffi::BF16;
  args.batch = shape[0], args.tokens = shape[1], args.heads = shape[2], args.key_dim = shape[3];
  args.value_heads = values[2], args.value_dim = values[3], args.chunk_size = chunk_size;
  args.q = tokens_first(q), args.k = tokens_first(k), args.v = tokens_first(v), args.g = tokens_first(g);
  args.beta = tokens_first(beta), args.o = tokens_first(*o);
  args.A_log = optional(A_log), args.dt_bias = optional(dt_bias), args.initial_state = optional(initial_state);
  args.final_state = final_state->typed_data();
  args.scale = scale, args.gate = gate, args.lower_bound = lower_bound, args.safe_gate = safe_gate, args.beta_kind = beta_kind;
  args.l2norm = l2norm, args.state_v_first = state_v_first;
  if (packed) {
    args.cu_seqlens = cu_seqlens.untyped_data();
    args.cu_seqlens_64 = cu_seqlens.element_type() == ffi::S64;
    args.sequences = int64_t(cu_seqlens.element_count()) - 1;
  }
  kda_status status = half ? kda_prefill_workspace_bf16(&args, &args.workspace_size)
                           : kda_prefill_workspace_f32(&args, &args.workspace_size);
  if (status != KDA_OK) return failure(status);
  if (args.workspace_size) {
    auto memory = scratch.Allocate(args.workspace_size + 255);  // XLA's allocator promises less than the 256 bytes that are needed
    if (!memory.has_value())
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        "kdakit: no memory for a workspace of " + std::to_string(args.workspace_size) + " bytes");
    args.workspace = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(*memory) + 255) / 256 * 256);
  }
  args.stream = stream;
  status = half ? kda_prefill_bf16(&args) : kda_prefill_f32(&args);
  return status == KDA_OK ? ffi::Error::Success() : failure(status);
}

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(kdakit_xla_prefill, prefill,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void *>>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Arg<Any>()  // q
                                  .Arg<Any>()  // k
                                  .Arg<Any>()  // v
                                  .Arg<Any>()  // g
                                  .Arg<Any>()  // beta
                                  .Arg<F32>()  // A_log
                                  .Arg<F32>()  // dt_bias
                                  .Arg<F32>()  // initial_state
                                  .Arg<Any>()  // cu_seqlens
                                  .Ret<Any>()  // o
                                  .Ret<F32>()  // final_state
                                  .Attr<int64_t>("chunk_size")
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("gate")
                                  .Attr<float>("lower_bound")
                                  .Attr<int32_t>("safe_gate")
                                  .Attr<int32_t>("beta_kind")
                                  .Attr<int32_t>("l2norm")
                                  .Attr<int32_t>("state_v_first"));
#pragma GCC visibility pop
