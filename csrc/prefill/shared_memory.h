// What a block needs of shared memory, held against what the device has before anything is launched.
#pragma once

#include "intra.cuh"
#include "state_block.cuh"
#include "status.h"

namespace kda {

inline kda_status check_shared(const char *kernel, size_t bytes, int limit, int C) {
  if (bytes <= size_t(limit)) return KDA_OK;
  return fail(KDA_DEVICE_TOO_SMALL, "the %s kernel needs %zu bytes of shared memory per block, this device has %d%s", kernel, bytes, limit,
              C == 64 ? "; try chunk_size 32" : "");
}

// intra, and state with one chunk in flight.
template <int K, int C>
kda_status check_shared(int limit) {
  KDA_TRY(check_shared("intra", sizeof(typename Intra<K, K, C>::Shared), limit, C));
  return check_shared("state", sizeof(typename State<K, K, C, K / 8, 1>::Shared), limit, C);
}

}  // namespace kda
