// The prepare kernel of a training forward, see hopper_prepare_chunk.cuh: of given log-decays, whatever their bound, and of normalised keys
// with gates that are computed here.
#include "hopper_prepare_chunk.cuh"

namespace kda::hopper {
namespace {

template <int HEAD, Gate GATE, bool BOUNDED, bool G32, bool L2NORM>
__global__ void __launch_bounds__(Warp<HEAD>::threads, Places<HEAD>::kept_blocks)
    prepare_kept_kernel(const __grid_constant__ HopperForward p, const __grid_constant__ Kept kept) {
  prepare_chunk<HEAD, GATE, BOUNDED, G32, L2NORM, true>(p, kept);
}

// run(Form) of a call.
template <typename Run>
auto of_kept_form(const HopperForward& p, Run run) {
  if (p.gate == Gate::bounded)
    return p.gate_float32 ? run(Form<Gate::bounded, true, true, true>{}) : run(Form<Gate::bounded, true, false, true>{});
  if (p.gate == Gate::softplus)
    return p.gate_float32 ? run(Form<Gate::softplus, false, true, true>{}) : run(Form<Gate::softplus, false, false, true>{});
  return with_form<Gate::log_decay, false>(p, run);
}

}  // namespace

#ifndef KDA_EMULATE
namespace {

template <int HEAD>
cudaError_t launch(const HopperForward& p, const Kept& kept, int64_t slots, cudaStream_t stream) {
  return of_kept_form(p, [&](auto form) {
    using F = decltype(form);
    const auto kernel = prepare_kept_kernel<HEAD, F::gate, F::bounded, F::gate_float32, F::l2norm>;
    constexpr int bytes = Places<HEAD>::kept_bytes(F::bounded);
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return status;
    kernel<<<grid_of(p, slots), Warp<HEAD>::threads, bytes, stream>>>(p, kept);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_prepare_kept(const HopperForward& p, const Kept& kept, int64_t slots, cudaStream_t stream) {
  return p.head == 64 ? launch<64>(p, kept, slots, stream) : launch<128>(p, kept, slots, stream);
}
#endif

}  // namespace kda::hopper
