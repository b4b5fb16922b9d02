// Warp groups' products and the copy engine on a CPU: what the walks along a sequence and the gradient kernel use of hopper_ptx.cuh,
// hopper_wgmma.cuh and hopper_tensor.cuh.
//
// Copies land when their barrier is waited for, and leave when they are waited for: as late as they may. Products are done at once; what
// they read of shared memory must be the same when they are waited for.
#pragma once

#include <map>

#include "emulate_hopper.h"

using std::max;

namespace kda::hopper {

struct Barrier {
  int expected, arrived = 0;
  int64_t bytes = 0;  // to come
  unsigned phase = 0;
  std::vector<std::function<void()>> late;
  void check() {
    if (arrived == expected && bytes == 0) ++phase, arrived = 0;
  }
};
inline std::map<uint32_t, Barrier> barriers;

inline void barrier_init(uint32_t barrier, uint32_t count) { barriers[barrier] = Barrier{int(count)}; }
inline void barriers_ready() {}
inline void barrier_arrive(uint32_t barrier) { ++barriers[barrier].arrived, barriers[barrier].check(); }
inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) { barriers[barrier].bytes += bytes, barrier_arrive(barrier); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  Barrier &it = barriers[barrier];
  for (int64_t turns = 0; (it.phase & 1) == parity; ++turns) {
    const auto late = std::move(it.late);
    it.late.clear();
    for (const auto &copy : late) copy();
    if ((it.phase & 1) != parity) break;
    if (turns > 10'000'000) fprintf(stderr, "a barrier is never complete\n"), abort();
    emulate::wait(emulate::Fiber::READY);
  }
}

inline void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
  emulate::check_aligned(from, "cp.async.bulk");
  barriers[barrier].late.push_back([=] { memcpy(memory + to, from, bytes), barriers[barrier].bytes -= bytes, barriers[barrier].check(); });
}
inline void copy_async_arrive(uint32_t barrier) {
  auto &open = emulate::fibers[threadIdx.x].copies.back();
  barriers[barrier].late.push_back([=, copies = std::move(open)] {
    for (const auto &copy : copies) memcpy(copy.to, copy.from, 16);
    barrier_arrive(barrier);
  });
  open.clear();
}

struct Matrix {
  unsigned char *data;
  int columns, piece_rows;
  unsigned char *at(int x, int y) const { return data + (int64_t(y) * columns + x) * 2; }
};
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
inline void load_piece(uint32_t to, const Matrix &matrix, int x, int y, uint32_t barrier) {
  barriers[barrier].late.push_back([=] {
    for (int row = 0; row < matrix.piece_rows; ++row)
      for (int unit = 0; unit < 8; ++unit) memcpy(memory + swizzled(to + row * 128 + unit * 16), matrix.at(x + unit * 8, y + row), 16);
    barriers[barrier].bytes -= matrix.piece_rows * 128, barriers[barrier].check();
  });
}
inline std::vector<std::function<void()>> leaving[1024];
inline void store_piece(const Matrix &matrix, int x, int y, uint32_t from) {
  leaving[threadIdx.x].push_back([=] {
    for (int row = 0; row < matrix.piece_rows; ++row)
      for (int unit = 0; unit < 8; ++unit) memcpy(matrix.at(x + unit * 8, y + row), memory + swizzled(from + row * 128 + unit * 16), 16);
  });
}
inline void pieces_commit() {}
inline void pieces_read() {
  for (const auto &copy : leaving[threadIdx.x]) copy();
  leaving[threadIdx.x].clear();
}

inline void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
  emulate::check_aligned(memory + address, "stmatrix");
  const auto rows = gather(address);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      const uint16_t x = uint16_t(r[i] >> 16 * j);
      memcpy(memory + rows.of[8 * i + 2 * (lane % 4) + j] + 2 * (lane / 4), &x, 2);
    }
  __syncwarp();
}
inline void store_global(void *to, uint4 x) { memcpy(to, &x, 16); }
inline uint32_t larger_bf16(uint32_t a, uint32_t b) {
  return pack_bf16(std::fmax(std::fabs(low(a)), std::fabs(low(b))), std::fmax(std::fabs(high(a)), std::fabs(high(b))));
}
template <int COUNT>
inline void fewer_registers() {}
template <int COUNT>
inline void more_registers() {}

// What a thread's products have read, group by group; the last group is open.
struct Read {
  uint32_t at;
  uint16_t x;
};
inline std::vector<std::vector<Read>> reads[1024];
inline uint16_t read_shared(uint32_t at) {
  uint16_t x;
  memcpy(&x, memory + at, 2);
  return x;
}
inline void remember(uint32_t at) {
  auto &groups = reads[threadIdx.x];
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({at, read_shared(at)});
}
inline void wgmma_begin() {}
inline void wgmma_commit() { reads[threadIdx.x].emplace_back(); }
template <int PENDING>
inline void wgmma_wait() {
  for (auto &groups = reads[threadIdx.x]; groups.size() > PENDING + 1; groups.erase(groups.begin()))
    for (const Read &it : groups.front())
      if (read_shared(it.at) != it.x) fprintf(stderr, "shared memory changes while a product reads it\n"), abort();
}
template <int N>
inline void touch(float (&)[N]) {}

// d [64, N] += a b; of each warp its 16 rows. b [16, N] as its descriptor says, with the swizzle of 128 bytes or of 32.
template <int TRANSPOSED, int COUNT, typename Unpack>
inline void multiply_group(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, int add, Unpack unpack) {
  struct Operands {
    uint32_t x[4];
  };
  const auto all = gather(Operands{{a[0], a[1], a[2], a[3]}});
  const uint32_t start = uint32_t(b & 0x3fff) << 4, halves = uint32_t(b >> 16 & 0x3fff) << 4, groups = uint32_t(b >> 32 & 0x3fff) << 4;
  const bool squares = b >> 62 == 3;
  if (b >> 62 != 1 && !squares) fprintf(stderr, "not a swizzle of these\n"), abort();
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < COUNT; ++i) {
    const int row = lane / 4 + i / 2 % 2 * 8, n = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    double sum = add ? d[i] : 0.0f;
    for (int k = 0; k < 16; ++k) {
      const float2 pair = unpack(all.of[row % 8 * 4 + k % 8 / 2].x[row / 8 + k / 8 * 2]);
      uint32_t at = TRANSPOSED ? start + n / 64 * halves + k / 8 * groups + k % 8 * 128 + n % 64 * 2
                               : start + n / 8 * groups + n % 8 * 128 + k * 2;
      if (squares)
        at = TRANSPOSED ? start + n / 16 * halves + k / 8 * groups + k % 8 * 32 + n % 16 * 2 : start + n / 8 * groups + n % 8 * 32 + k * 2;
      at = squares ? at ^ (at >> 7 & 1) << 4 : swizzled(at);
      if (lane < 4 && i / 2 % 2 == 0) remember(at);  // four lanes read all of b
      sum += double(k % 2 ? pair.y : pair.x) * unpack(read_shared(at)).x;
    }
    d[i] = emulate::truncated(sum);
  }
}
template <int TRANSPOSED, int COUNT>
inline void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, int add) {
  multiply_group<TRANSPOSED>(d, a, b, add, [](uint32_t x) { return float2{low(x), high(x)}; });
}
// a [64, 16] in shared memory, with the swizzle of 128 bytes and rows that are 8 a group.
template <int TRANSPOSED, int COUNT>
inline void wgmma_shared(float (&d)[COUNT], uint64_t a, uint64_t b, int add) {
  const uint32_t start = uint32_t(a & 0x3fff) << 4, groups = uint32_t(a >> 32 & 0x3fff) << 4;
  if (a >> 62 != 1) fprintf(stderr, "not a swizzle of 128 bytes\n"), abort();
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16;
  uint32_t mine[4];
  for (int i = 0; i < 4; ++i) {
    const int row = first + lane / 4 + i % 2 * 8, k = 2 * (lane % 4) + i / 2 * 8;
    const uint32_t at = swizzled(start + row / 8 * groups + row % 8 * 128 + k * 2);
    remember(at), remember(at + 2);
    mine[i] = load_shared_word(at);
  }
  wgmma<TRANSPOSED>(d, mine, b, add);
}
inline void wgmma_half(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  multiply_group<0>(d, a, b, add, [](uint32_t x) { return unpack_half(x); });
}

}  // namespace kda::hopper
