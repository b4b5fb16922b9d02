// The shape checks of the XLA custom call as a call of its own, for a CPU: no kernel is behind it.
//
//     g++ -std=c++17 -shared -fPIC -I$(python -c 'import jax; print(jax.ffi.include_dir())') -o libshapes.so csrc/tests/xla_shapes.cpp
#include "../xla_ffi.cpp"

extern "C" {
const char *kda_status_name(kda_status) { return "stub"; }
const char *kda_last_error(void) { return ""; }
kda_status kda_prefill_workspace_f32(const kda_prefill_args *, size_t *) { return KDA_OK; }
kda_status kda_prefill_workspace_bf16(const kda_prefill_args *, size_t *) { return KDA_OK; }
kda_status kda_prefill_f32(const kda_prefill_args *) { return KDA_OK; }
kda_status kda_prefill_bf16(const kda_prefill_args *) { return KDA_OK; }
}

static ffi::Error shapes(Any q, Any k, Any v, Any g, Any beta, F32 A_log, F32 dt_bias, F32 initial_state, Any cu_seqlens,
                         ffi::Result<Any> o, ffi::Result<F32> final_state, int32_t state_v_first) {
  const std::string wrong =
      wrong_buffer(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *o, *final_state, state_v_first != 0);
  return wrong.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInvalidArgument, wrong);
}

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(kdakit_xla_shapes, shapes,
                              ffi::Ffi::Bind()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<Any>()
                                  .Ret<Any>()
                                  .Ret<F32>()
                                  .Attr<int32_t>("state_v_first"));
#pragma GCC visibility pop
