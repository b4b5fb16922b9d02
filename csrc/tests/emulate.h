// A block of CUDA threads on a CPU, one fiber each, so that the kernels themselves can be tested where there is no GPU.
//
// A fiber runs until it meets a barrier. Shared memory starts as NaN. Asynchronous copies land when they are waited for, as late as they
// may. `order` < 0 runs the threads backwards, 2 and -2 one warp as far as it gets before the next: results that depend on it are a race.
// Tensor cores truncate their sums.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(n)
struct uint2 {
  uint32_t x, y;
};

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t bytes) {
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(both >> 8 * (bytes >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx, blockIdx, gridDim;

namespace kda {

alignas(16) inline unsigned char memory[232448];

namespace emulate {

struct Copy {
  void *to;
  const void *from;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  std::vector<std::vector<Copy>> copies;  // the last group is open
  enum { READY, WARP, NAMED, BLOCK, DONE } at = READY;
  int barrier, threads;  // where NAMED: which, and how many wait there
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline float exchange[1024];
inline uint32_t operands[32][32][6];  // [warp, lane]: a and b of a matrix product

inline void entry() {
  body();
  fibers[threadIdx.x].at = Fiber::DONE;
}

inline void wait(decltype(Fiber::at) where) {
  Fiber &self = fibers[threadIdx.x];
  self.at = where;
  swapcontext(&self.context, &scheduler);
}

inline void wait_named(int barrier, int threads) {
  fibers[threadIdx.x].barrier = barrier, fibers[threadIdx.x].threads = threads;
  wait(Fiber::NAMED);
}

// Run one block. Every thread goes on until all live threads of its warp, of a named barrier, or of the block are at the same barrier.
inline void run_block(unsigned block, int threads, int order, const std::function<void()> &kernel) {
  memset(memory, 0xff, sizeof memory);
  body = kernel;
  blockIdx.x = block;
  fibers.clear();
  fibers.resize(threads);
  for (Fiber &fiber : fibers) {
    fiber.stack.resize(128 * 1024);
    fiber.copies.emplace_back();
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, entry, 0);
  }
  for (;;) {
    int ready = 0, done = 0, blocked = 0, warp = -1;
    for (int i = 0; i < threads; ++i) {
      const int t = order < 0 ? threads - 1 - i : i;
      if (fibers[t].at != Fiber::READY || (std::abs(order) > 1 && warp >= 0 && warp != t / 32)) continue;
      ++ready, warp = t / 32;
      threadIdx.x = t;
      swapcontext(&scheduler, &fibers[t].context);
    }
    for (int first = 0; first < threads; first += 32) {
      int waiting = 0, alive = 0;
      for (int t = first; t < first + 32; ++t) waiting += fibers[t].at == Fiber::WARP, alive += fibers[t].at != Fiber::DONE;
      if (waiting && waiting == alive) {
        for (int t = first; t < first + 32; ++t)
          if (fibers[t].at == Fiber::WARP) fibers[t].at = Fiber::READY;
        ++ready;
      }
    }
    int waiting[16] = {};
    for (const Fiber &fiber : fibers)
      if (fiber.at == Fiber::NAMED) ++waiting[fiber.barrier];
    for (Fiber &fiber : fibers)
      if (fiber.at == Fiber::NAMED && waiting[fiber.barrier] == fiber.threads) fiber.at = Fiber::READY, ++ready;
    for (const Fiber &fiber : fibers) done += fiber.at == Fiber::DONE, blocked += fiber.at == Fiber::BLOCK;
    if (done == threads) return;
    if (blocked + done == threads) {
      for (Fiber &fiber : fibers)
        if (fiber.at == Fiber::BLOCK) fiber.at = Fiber::READY;
    } else if (ready == 0) {
      fprintf(stderr, "threads of a warp wait at different barriers\n");
      abort();
    }
  }
}

inline float truncated(double x) {
  const float cut = float(x);
  return std::fabs(double(cut)) > std::fabs(x) ? std::nextafter(cut, 0.f) : cut;
}

inline void check_aligned(const void *address, const char *what, int bytes = 16) {
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
  fprintf(stderr, "%s of an address, %p, that is not aligned to %d bytes\n", what, address, bytes);
  abort();
}

}  // namespace emulate

#ifdef __aarch64__
using Half = __fp16;  // g++ has no _Float16 there before its version 13
#else
using Half = _Float16;
#endif

inline uint32_t pack_half(float a, float b) {
  const Half x[2] = {Half(a), Half(b)};
  uint32_t bits;
  memcpy(&bits, x, 4);
  return bits;
}

inline float2 unpack_half(uint32_t bits) {
  Half x[2];
  memcpy(x, &bits, 4);
  return {float(x[0]), float(x[1])};
}

inline void mma_half(float (&d)[4], const uint4 &a, uint32_t b0, uint32_t b1, const float (&c)[4]) {
  using namespace emulate;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t mine[6] = {a.x, a.y, a.z, a.w, b0, b1};
  memcpy(operands[warp][lane], mine, sizeof mine);
  wait(Fiber::WARP);
  for (int e = 0; e < 4; ++e) {
    const int row = g + e / 2 * 8, column = 2 * t + e % 2;
    double sum = c[e];
    for (int k = 0; k < 16; k += 2) {
      const float2 x = unpack_half(operands[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2]);
      const float2 y = unpack_half(operands[warp][column * 4 + k % 8 / 2][4 + k / 8]);
      sum += double(x.x) * y.x + double(x.y) * y.y;
    }
    d[e] = truncated(sum);
  }
  wait(Fiber::WARP);
}

inline void load_transposed(uint32_t (&x)[4], const void *row) {
  using namespace emulate;
  static const unsigned char *rows[1024];
  const int lane = threadIdx.x % 32, first = threadIdx.x - lane, g = lane / 4, t = lane % 4;
  rows[threadIdx.x] = static_cast<const unsigned char *>(row);
  check_aligned(row, "ldmatrix");
  wait(Fiber::WARP);
  for (int block = 0; block < 4; ++block) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) memcpy(pair + i, rows[first + block * 8 + 2 * t + i] + 2 * g, 2);
    x[block] = pair[0] | uint32_t(pair[1]) << 16;
  }
  wait(Fiber::WARP);
}

inline void load_transposed(uint4 &x, const void *row) {
  uint32_t words[4];
  load_transposed(words, row);
  x = make_uint4(words[0], words[1], words[2], words[3]);
}

inline void let_next_kernel_start() {}
inline void wait_for_previous_kernel() {}

inline float warp_largest(float x) {
  using namespace emulate;
  static float all[1024];
  const int first = threadIdx.x / 32 * 32;
  all[threadIdx.x] = x;
  wait(Fiber::WARP);
  for (int lane = 0; lane < 32; ++lane) x = all[first + lane] > x ? all[first + lane] : x;
  wait(Fiber::WARP);
  return x;
}

inline void copy_async(void *to, const void *from) {
  const auto *byte = reinterpret_cast<const unsigned char *>(to);
  if (byte < memory || byte + 16 > memory + sizeof memory) {
    fprintf(stderr, "cp.async outside of shared memory\n");
    abort();
  }
  emulate::check_aligned(to, "cp.async");
  emulate::check_aligned(from, "cp.async");
  emulate::fibers[threadIdx.x].copies.back().push_back({to, from});
}

inline void copies_commit() { emulate::fibers[threadIdx.x].copies.emplace_back(); }

template <int PENDING>
inline void copies_wait() {
  auto &groups = emulate::fibers[threadIdx.x].copies;
  while (groups.size() > 1 + PENDING) {
    for (const auto &copy : groups.front()) memcpy(copy.to, copy.from, 16);
    groups.erase(groups.begin());
  }
}

}  // namespace kda

inline void __syncthreads() { kda::emulate::wait(kda::emulate::Fiber::BLOCK); }
inline void __syncwarp() { kda::emulate::wait(kda::emulate::Fiber::WARP); }

inline float __shfl_xor_sync(unsigned, float x, int lanes) {
  using namespace kda::emulate;
  exchange[threadIdx.x] = x;
  wait(Fiber::WARP);
  const float other = exchange[threadIdx.x ^ lanes];
  wait(Fiber::WARP);
  return other;
}
