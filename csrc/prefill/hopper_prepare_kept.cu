// The prepare kernels of a training forward, see hopper_prepare_chunk.cuh: of given log-decays, whatever their bound, and of normalised
// keys with gates that are computed here. prepare_record_kernel is for 128 channels: of normalised keys, and of given log-decays and betas.
#include "hopper_prepare_chunk.cuh"

#include <type_traits>

namespace kda::hopper {
namespace {

template <int HEAD, Gate GATE, bool BOUNDED, bool G32, bool L2NORM>
__global__ void __launch_bounds__(Warp<HEAD>::threads, Places<HEAD>::kept_blocks)
    prepare_kept_kernel(const __grid_constant__ HopperForward p, const __grid_constant__ Kept kept) {
  prepare_chunk<HEAD, GATE, BOUNDED, G32, L2NORM, Keep::checkpoints>(p, kept);
}
template <Gate GATE, bool BOUNDED, bool G32, bool L2NORM, Keep KEEP>
__global__ void __launch_bounds__(Warp<128>::threads, Places<128>::kept_blocks)
    prepare_record_kernel(const __grid_constant__ HopperForward p, const __grid_constant__ Kept kept) {
  prepare_chunk<128, GATE, BOUNDED, G32, L2NORM, KEEP>(p, kept);
}

// run(Form) of a call.
template <Gate GATE, bool BOUNDED, typename Run>
auto with_gate_dtype(const HopperForward& p, Run run) {
  return p.gate_float32 ? run(Form<GATE, BOUNDED, true, true>{}) : run(Form<GATE, BOUNDED, false, true>{});
}
template <typename Run>
auto of_record_form(const HopperForward& p, Run run) {
  if (p.gate == Gate::bounded) return with_gate_dtype<Gate::bounded, true>(p, run);
  return p.gate == Gate::softplus ? with_gate_dtype<Gate::softplus, false>(p, run) : with_gate_dtype<Gate::log_decay, false>(p, run);
}
// run(Form, its Keep) of one that keeps its records.
template <typename Run>
auto of_records(const HopperForward& p, Run run) {
  using Scaled = std::integral_constant<Keep, Keep::record>;
  using Plain = std::integral_constant<Keep, Keep::plain_record>;
  if (p.beta_kind == Beta::given) return with_form<Gate::log_decay, false>(p, [&](auto form) { return run(form, Plain{}); });
  return of_record_form(p, [&](auto form) { return run(form, Scaled{}); });
}
template <typename Run>
auto of_kept_form(const HopperForward& p, Run run) {
  return p.gate == Gate::log_decay ? with_form<Gate::log_decay, false>(p, run) : of_record_form(p, run);
}

}  // namespace

#ifndef KDA_EMULATE
namespace {

template <int HEAD, bool BOUNDED>
cudaError_t start(void (*kernel)(HopperForward, Kept), const HopperForward& p, const Kept& kept, int64_t slots, cudaStream_t stream) {
  constexpr int bytes = Places<HEAD>::kept_bytes(BOUNDED);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  kernel<<<grid_of(p, slots), Warp<HEAD>::threads, bytes, stream>>>(p, kept);
  return cudaGetLastError();
}
template <int HEAD>
cudaError_t launch(const HopperForward& p, const Kept& kept, int64_t slots, cudaStream_t stream) {
  return of_kept_form(p, [&](auto form) {
    using F = decltype(form);
    return start<HEAD, F::bounded>(prepare_kept_kernel<HEAD, F::gate, F::bounded, F::gate_float32, F::l2norm>, p, kept, slots, stream);
  });
}

}  // namespace

cudaError_t launch_prepare_kept(const HopperForward& p, const Kept& kept, int64_t slots, cudaStream_t stream) {
  return p.head == 64 ? launch<64>(p, kept, slots, stream) : launch<128>(p, kept, slots, stream);
}
cudaError_t launch_prepare_record(const HopperForward& p, const Kept& kept, int64_t slots, cudaStream_t stream) {
  return of_records(p, [&](auto form, auto keep) {
    using F = decltype(form);
    const auto kernel = prepare_record_kernel<F::gate, F::bounded, F::gate_float32, F::l2norm, decltype(keep)::value>;
    return start<128, F::bounded>(kernel, p, kept, slots, stream);
  });
}
#endif

}  // namespace kda::hopper
