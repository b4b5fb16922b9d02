// The two launches of the Hopper forward.
#pragma once
#include "hopper.h"

namespace kdakit {

cudaError_t launch_prepare(const HopperForward& p, int64_t slots, cudaStream_t stream);
cudaError_t launch_scan(const HopperForward& p, cudaStream_t stream);

}  // namespace kdakit
