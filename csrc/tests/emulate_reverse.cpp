// The bfloat16 reverse kernel on a CPU: `kda_emulate_reverse_bf16(args, groups, order)`, with 1 or 2 warp groups a block, or of 64
// channels as many blocks a multiprocessor.
//
//     g++ -O2 -std=c++17 -shared -fPIC -DKDA_EMULATE -o libkdakit_reverse_emulated.so csrc/tests/emulate_reverse.cpp
#include "emulate_wgmma.h"

#include "../include/kdakit.h"
#include "../backward/hopper_reverse_arguments.h"
#include "../backward/hopper_reverse.cu"

using namespace kda;
using namespace kda::hopper;

template <int HEAD, int GROUPS, int BLOCKS, bool HALF, bool EXACT = false>
static void run(const HopperReverse &p, int order) {
  const auto matrix = [](const void *data, int columns, int rows) {
    return Matrix{static_cast<unsigned char *>(const_cast<void *>(data)), columns, rows};
  };
  const ReverseMatrices matrices{matrix(p.tiles, HEAD, 192), matrix(p.solved, 64, 64), matrix(p.d_states, HEAD, 16),
                                 matrix(p.d_states_lost, HEAD, 16), matrix(p.q_lost, HEAD, 64)};
  const auto blocks = unsigned(p.in.N * p.in.HV * (HEAD / 64 / GROUPS));
  gridDim = {blocks, 1, 1};
  for (unsigned block = 0; block < blocks; ++block)
    emulate::run_block(block, BackLayout<HEAD, GROUPS, BLOCKS, EXACT>::threads, order,
                       [&] { reverse_kernel<HEAD, GROUPS, BLOCKS, HALF, EXACT>(p, matrices); });
}

// `args` complete, the forward's sequences too.
extern "C" void kda_emulate_reverse_bf16(const kda_reverse_args *args, int groups, int order) {
  const HopperReverse p = reverse_of(*args, *args->forward);
  if (p.in.head == 64) {
    if (p.q_lost) return run<64, 1, 1, false, true>(p, order);
    if (groups == 1) return p.half_solved ? run<64, 1, 1, true>(p, order) : run<64, 1, 1, false>(p, order);
    return p.half_solved ? run<64, 1, 2, true>(p, order) : run<64, 1, 2, false>(p, order);
  }
  if (groups == 1) return p.half_solved ? run<128, 1, 1, true>(p, order) : run<128, 1, 1, false>(p, order);
  return p.half_solved ? run<128, 2, 1, true>(p, order) : run<128, 2, 1, false>(p, order);
}
