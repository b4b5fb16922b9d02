// kda_prefill_f32 as an XLA custom call: [B, T, H, D] row-major buffers, an empty buffer where an optional one is absent.
// Built with the headers that ship with jaxlib and linked to libkdakit.so; no CUDA headers.
#include <cstdint>
#include <string>

#include "include/kdakit.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using F32 = ffi::Buffer<ffi::F32>;

static kda_tensor tokens_first(void *data, const F32::Dimensions &dims) {
  const int64_t T = dims[1], H = dims[2], D = dims.size() > 3 ? dims[3] : 1;
  kda_tensor x = {data, KDA_FLOAT32, 0, T * H * D, D, H * D};
  return x;
}

static const float *optional(const F32 &x) { return x.element_count() ? x.typed_data() : nullptr; }

static ffi::Error failure(kda_status status) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("kdakit: ") + kda_status_name(status) + ": " + kda_last_error());
}

static ffi::Error prefill_f32(void *stream, ffi::ScratchAllocator scratch, F32 q, F32 k, F32 v, F32 g, F32 beta, F32 A_log, F32 dt_bias,
                              F32 initial_state, ffi::AnyBuffer cu_seqlens, ffi::Result<F32> o, ffi::Result<F32> final_state, int64_t chunk_size,
                              float scale, int32_t gate, float lower_bound, int32_t beta_kind, int32_t l2norm, int32_t state_v_first) {
  kda_prefill_args args = KDA_PREFILL_ARGS_INIT;
  const auto shape = q.dimensions(), values = v.dimensions();
  if (shape.size() != 4 || values.size() != 4) return ffi::Error(ffi::ErrorCode::kInvalidArgument, "kdakit: q must be [B, T, H, K] and v [B, T, HV, V]");
  args.batch = shape[0], args.tokens = shape[1], args.heads = shape[2], args.key_dim = shape[3];
  args.value_heads = values[2], args.value_dim = values[3], args.chunk_size = chunk_size;
  args.q = tokens_first(q.untyped_data(), q.dimensions());
  args.k = tokens_first(k.untyped_data(), k.dimensions());
  args.v = tokens_first(v.untyped_data(), v.dimensions());
  args.g = tokens_first(g.untyped_data(), g.dimensions());
  args.beta = tokens_first(beta.untyped_data(), beta.dimensions());
  args.o = tokens_first(o->untyped_data(), o->dimensions());
  args.A_log = optional(A_log), args.dt_bias = optional(dt_bias), args.initial_state = optional(initial_state);
  args.final_state = final_state->typed_data();
  args.scale = scale, args.gate = gate, args.lower_bound = lower_bound, args.beta_kind = beta_kind, args.l2norm = l2norm;
  args.state_v_first = state_v_first;
  if (cu_seqlens.element_count()) {
    args.cu_seqlens = cu_seqlens.untyped_data();
    args.cu_seqlens_64 = cu_seqlens.element_type() == ffi::S64;
    args.sequences = int64_t(cu_seqlens.element_count()) - 1;
  }
  kda_status status = kda_prefill_workspace_f32(&args, &args.workspace_size);
  if (status != KDA_OK) return failure(status);
  if (args.workspace_size) {
    auto memory = scratch.Allocate(args.workspace_size + 255);  // XLA's allocator promises less than the 256 bytes that are needed
    if (!memory.has_value()) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "kdakit: no memory for a workspace of " + std::to_string(args.workspace_size) + " bytes");
    args.workspace = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(*memory) + 255) / 256 * 256);
  }
  args.stream = stream;
  status = kda_prefill_f32(&args);
  return status == KDA_OK ? ffi::Error::Success() : failure(status);
}

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(kdakit_xla_prefill_f32, prefill_f32,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void *>>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Arg<F32>()             // q
                                  .Arg<F32>()             // k
                                  .Arg<F32>()             // v
                                  .Arg<F32>()             // g
                                  .Arg<F32>()             // beta
                                  .Arg<F32>()             // A_log
                                  .Arg<F32>()             // dt_bias
                                  .Arg<F32>()             // initial_state
                                  .Arg<ffi::AnyBuffer>()  // cu_seqlens
                                  .Ret<F32>()             // o
                                  .Ret<F32>()             // final_state
                                  .Attr<int64_t>("chunk_size")
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("gate")
                                  .Attr<float>("lower_bound")
                                  .Attr<int32_t>("beta_kind")
                                  .Attr<int32_t>("l2norm")
                                  .Attr<int32_t>("state_v_first"));
#pragma GCC visibility pop
