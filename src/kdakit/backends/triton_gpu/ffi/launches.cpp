// A list of kernel launches as one XLA custom call: what program.py writes into `table`, on XLA's stream.
// Built by handler.py with the headers that ship with jaxlib; the driver is opened at run time, so that no CUDA is needed to build it.
//
// table    for each launch: function, 3 numbers of blocks, threads, bytes of shared memory, number of parameters; then of each parameter
//          (kind, value, offset): BUFFER the value-th of operands, results and scratch, offset bytes on; WORD, LONG, NOTHING
#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

enum Kind : int64_t { BUFFER = 0, WORD = 1, LONG = 2, NOTHING = 3 };

using Launch = int (*)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared, void *stream,
                       void **parameters, void **extra);

static Launch driver() {
  static Launch found = [] {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    return library ? reinterpret_cast<Launch>(dlsym(library, "cuLaunchKernel")) : nullptr;
  }();
  return found;
}

static ffi::Error wrong(const std::string &what) { return ffi::Error(ffi::ErrorCode::kInternal, "kdakit: " + what); }

static ffi::Error launches(void *stream, ffi::ScratchAllocator memory, ffi::RemainingArgs operands, ffi::RemainingRets results,
                           ffi::Span<const int64_t> table, int64_t scratch) {
  Launch launch = driver();
  if (!launch) return wrong("libcuda.so.1 has no cuLaunchKernel");
  std::vector<char *> buffers;
  for (size_t i = 0; i < operands.size(); ++i) {
    auto x = operands.get<ffi::AnyBuffer>(i);
    if (x.has_error()) return x.error();
    buffers.push_back(static_cast<char *>(x->untyped_data()));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto x = results.get<ffi::AnyBuffer>(i);
    if (x.has_error()) return x.error();
    buffers.push_back(static_cast<char *>((*x)->untyped_data()));
  }
  if (scratch) {
    auto space = memory.Allocate(scratch + 255);
    if (!space.has_value()) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "kdakit: no memory for a workspace");
    buffers.push_back(reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(*space) + 255) / 256 * 256));
  }
  const size_t size = table.size();
  for (size_t at = 0; at < size;) {
    if (at + 7 > size || at + 7 + 3 * table[at + 6] > size) return wrong("the table of launches ends in the middle of one");
    const int64_t *head = &table[at], count = head[6], *words = head + 7;
    std::vector<int64_t> values(count);
    std::vector<void *> parameters(count);
    for (int64_t i = 0; i < count; ++i, words += 3) {
      values[i] = words[1];
      if (words[0] == BUFFER) {
        if (words[1] < 0 || words[1] >= int64_t(buffers.size())) return wrong("the table names a buffer that is not there");
        values[i] = reinterpret_cast<int64_t>(buffers[words[1]] + words[2]);
      } else if (words[0] == NOTHING) {
        values[i] = 0;
      }
      parameters[i] = &values[i];  // of a WORD the first four bytes are read
    }
    const int status = launch(reinterpret_cast<void *>(head[0]), head[1], head[2], head[3], head[4], 1, 1, head[5], stream,
                              parameters.data(), nullptr);
    if (status) return wrong("launch " + std::to_string(at) + " failed with CUDA's error " + std::to_string(status));
    at += 7 + 3 * count;
  }
  return ffi::Error::Success();
}

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(kdakit_xla_launches, launches,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void *>>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("table")
                                  .Attr<int64_t>("scratch"));
#pragma GCC visibility pop
