// The prepare kernel of blocks, see hopper_prepare_blocks.cuh.
#include "hopper_forms.cuh"
#include "hopper_prepare_blocks.cuh"

namespace kda::hopper {
namespace {

template <Gate GATE, bool BOUNDED, bool G32, bool L2NORM>
__global__ void __launch_bounds__(BlockPlaces::threads, BlockPlaces::blocks)
    prepare_blocks_kernel(const __grid_constant__ HopperForward p) {
  let_next_kernel_start();
  prepare_block<GATE, BOUNDED, G32, L2NORM>(p, slot_of_block());
}

}  // namespace

#ifndef KDA_EMULATE
cudaError_t launch_prepare_blocks(const HopperForward& p, int64_t slots, cudaStream_t stream) {
  return of_form(p, [&](auto form) {
    using F = decltype(form);
    const auto kernel = prepare_blocks_kernel<F::gate, F::bounded, F::gate_float32, F::l2norm>;
    constexpr int bytes = BlockPlaces::bytes(F::bounded);
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (status != cudaSuccess) return status;
    kernel<<<grid_of(p, slots, 4), BlockPlaces::threads, bytes, stream>>>(p);
    return cudaGetLastError();
  });
}
#endif

}  // namespace kda::hopper
