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

template <int HEAD, int GROUPS, int BLOCKS, From FROM>
static void run(const HopperReverse &p, int order) {
  const auto matrix = [](const void *data, int columns, int rows) {
    return Matrix{static_cast<unsigned char *>(const_cast<void *>(data)), columns, rows};
  };
  const ReverseMatrices matrices{matrix(p.tiles, HEAD, 192), matrix(p.solved, 64, 64), matrix(p.d_states, HEAD, 16),
                                 matrix(p.d_states_lost, HEAD, 16), matrix(p.q_lost, HEAD, 64)};
  const auto blocks = unsigned(p.in.N * p.in.HV * (HEAD / 64 / GROUPS));
  gridDim = {blocks, 1, 1};
  for (unsigned block = 0; block < blocks; ++block)
    emulate::run_block(block, BackLayout<HEAD, GROUPS, BLOCKS, FROM>::threads, order,
                       [&] { reverse_kernel<HEAD, GROUPS, BLOCKS, FROM>(p, matrices); });
}

template <int HEAD, int GROUPS, int BLOCKS>
static void run_from(const HopperReverse &p, int order) {
  p.half_solved ? run<HEAD, GROUPS, BLOCKS, From::half_tiles>(p, order) : run<HEAD, GROUPS, BLOCKS, From::tiles>(p, order);
}

// `args` complete, the forward's sequences too.
extern "C" void kda_emulate_reverse_bf16(const kda_reverse_args *args, int groups, int order) {
  const HopperReverse p = reverse_of(*args, *args->forward);
  if (p.q_lost) return run<64, 1, 1, From::exact_tiles>(p, order);
  if (p.record && p.in.beta_kind == Beta::given)
    return groups == 1 ? run<128, 1, 1, From::plain_record>(p, order) : run<128, 2, 1, From::plain_record>(p, order);
  if (p.record) return groups == 1 ? run<128, 1, 1, From::record>(p, order) : run<128, 2, 1, From::record>(p, order);
  if (p.in.head == 64) return groups == 1 ? run_from<64, 1, 1>(p, order) : run_from<64, 1, 2>(p, order);
  return groups == 1 ? run_from<128, 1, 1>(p, order) : run_from<128, 2, 1>(p, order);
}
