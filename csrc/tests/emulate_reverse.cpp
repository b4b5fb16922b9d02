// The bfloat16 reverse kernel on a CPU: `kda_emulate_reverse_bf16(args, groups, order)`, with 1 or 2 warp groups a block.
//
//     g++ -O2 -std=c++17 -shared -fPIC -DKDA_EMULATE -o libkdakit_reverse_emulated.so csrc/tests/emulate_reverse.cpp
#include "emulate_wgmma.h"

#include "../include/kdakit.h"
#include "../backward/hopper_reverse_arguments.h"
#include "../backward/hopper_reverse.cu"

using namespace kda;
using namespace kda::hopper;

template <int GROUPS, bool HALF>
static void run(const HopperReverse &p, int order) {
  const auto matrix = [](const void *data, int columns, int rows) {
    return Matrix{static_cast<unsigned char *>(const_cast<void *>(data)), columns, rows};
  };
  const ReverseMatrices matrices{matrix(p.tiles, 128, 192), matrix(p.solved, 64, 64), matrix(p.d_states, 128, 16)};
  const auto blocks = unsigned(p.in.N * p.in.HV * (2 / GROUPS));
  gridDim = {blocks, 1, 1};
  for (unsigned block = 0; block < blocks; ++block)
    emulate::run_block(block, BackLayout<GROUPS>::threads, order, [&] { reverse_kernel<GROUPS, HALF>(p, matrices); });
}

// `args` complete, the forward's sequences too.
extern "C" void kda_emulate_reverse_bf16(const kda_reverse_args *args, int groups, int order) {
  const HopperReverse p = reverse_of(*args, *args->forward);
  if (groups == 1) return p.half_solved ? run<1, true>(p, order) : run<1, false>(p, order);
  return p.half_solved ? run<2, true>(p, order) : run<2, false>(p, order);
}
