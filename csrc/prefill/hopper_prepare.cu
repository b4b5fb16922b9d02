// The prepare kernel, see hopper_prepare_chunk.cuh.
#include "hopper_prepare_chunk.cuh"

namespace kda::hopper {
namespace {

template <Gate GATE, bool BOUNDED, bool G32, bool L2NORM>
__global__ void __launch_bounds__(kWarps * 32, 3) prepare_kernel(const __grid_constant__ HopperForward p) {
  prepare_chunk<GATE, BOUNDED, G32, L2NORM, false>(p, Kept{});
}

}  // namespace

#ifndef KDA_EMULATE
cudaError_t launch_prepare(const HopperForward& p, int64_t slots, cudaStream_t stream) {
  return of_form(p, [&](auto form) {
    using F = decltype(form);
    const auto kernel = prepare_kernel<F::gate, F::bounded, F::gate_float32, F::l2norm>;
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes(F::bounded));
    if (status != cudaSuccess) return status;
    kernel<<<grid_of(p, slots), kWarps * 32, shared_bytes(F::bounded), stream>>>(p);
    return cudaGetLastError();
  });
}
#endif

}  // namespace kda::hopper
