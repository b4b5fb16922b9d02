// The bfloat16 scan on a CPU, in one piece: `kda_emulate_scan_bf16(args, groups, order)` reads the records in args.workspace, with
// 1 or 2 warp groups a block, or of 64 channels as many blocks a multiprocessor.
//
//     g++ -O2 -std=c++17 -shared -fPIC -DKDA_EMULATE -o libkdakit_scan_emulated.so csrc/tests/emulate_scan.cpp
#include "emulate_wgmma.h"

#include "../include/kdakit.h"
#include "../prefill/hopper_arguments.h"
#include "../prefill/hopper_scan.cu"
#include "../prefill/hopper_scan_blocks.cu"

using namespace kda;
using namespace kda::hopper;

template <int HEAD, int GROUPS, int BLOCKS>
static void run(const HopperForward &p, const Kept &kept, int order) {
  const auto blocks = unsigned(p.N * p.HV * (HEAD / 64 / GROUPS));
  gridDim = {blocks, 1, 1};
  for (unsigned block = 0; block < blocks; ++block)
    emulate::run_block(block, Layout<HEAD, GROUPS, BLOCKS>::threads, order, [&] {
      if constexpr (HEAD == 128)
        if (kept.r)
          return p.beta_kind == Beta::given ? scan_record_kernel<GROUPS, Keep::plain_record>(p, kept)
                                            : scan_record_kernel<GROUPS, Keep::record>(p, kept);
      if (kept.states) scan_kept_kernel<HEAD, GROUPS, BLOCKS>(p, kept);
      else scan_kernel<HEAD, GROUPS, BLOCKS>(p);
    });
}

// `args` complete: strides, sequences, a workspace of records. Where checkpoints are kept, they are written too, and with them r.
extern "C" void kda_emulate_scan_bf16(const kda_prefill_args *args, int groups, int order) {
  const HopperForward p = forward_of(*args);
  const Kept kept = kept_of(*args);
  if (p.head == 64) return groups == 1 ? run<64, 1, 1>(p, kept, order) : run<64, 1, 2>(p, kept, order);
  return groups == 1 ? run<128, 1, 1>(p, kept, order) : run<128, 2, 1>(p, kept, order);
}

template <int GROUPS>
static void run_blocks(const HopperForward &p, int order) {
  gridDim = {unsigned(p.N * p.HV * (2 / GROUPS)), 1, 1};
  for (unsigned block = 0; block < gridDim.x; ++block)
    emulate::run_block(block, BlocksLayout<GROUPS>::threads, order, [&] { scan_blocks_kernel<GROUPS>(p); });
}

// Along records of blocks.
extern "C" void kda_emulate_scan_blocks_bf16(const kda_prefill_args *args, int groups, int order) {
  const HopperForward p = forward_of(*args);
  groups == 1 ? run_blocks<1>(p, order) : run_blocks<2>(p, order);
}
