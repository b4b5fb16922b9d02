// The prepare kernel, see hopper_prepare_chunk.cuh.
#include "hopper_prepare_chunk.cuh"

namespace kda::hopper {
namespace {

template <int HEAD, Gate GATE, bool BOUNDED, bool G32, bool L2NORM>
__global__ void __launch_bounds__(Warp<HEAD>::threads, Places<HEAD>::blocks(BOUNDED))
    prepare_kernel(const __grid_constant__ HopperForward p) {
  prepare_chunk<HEAD, GATE, BOUNDED, G32, L2NORM, Keep::nothing>(p, Kept{});
}

}  // namespace

#ifndef KDA_EMULATE
namespace {

template <int HEAD>
cudaError_t launch(const HopperForward& p, int64_t slots, cudaStream_t stream) {
  return of_form(p, [&](auto form) {
    using F = decltype(form);
    const auto kernel = prepare_kernel<HEAD, F::gate, F::bounded, F::gate_float32, F::l2norm>;
    constexpr int bytes = Places<HEAD>::bytes(F::bounded);
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return status;
    kernel<<<grid_of(p, slots), Warp<HEAD>::threads, bytes, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_prepare(const HopperForward& p, int64_t slots, cudaStream_t stream) {
  return p.head == 64 ? launch<64>(p, slots, stream) : launch<128>(p, slots, stream);
}
#endif

}  // namespace kda::hopper
