// A list of kernel launches and of calls of the CUDA library as one XLA custom call: what program.py writes into `table`, on XLA's stream.
// Built by handler.py with the headers that ship with jaxlib; the driver is opened at run time, so that no CUDA is needed to build it.
//
// table    for each launch: LAUNCH, function, 3 numbers of blocks, threads, bytes of shared memory, number of parameters; then of each
//          parameter (kind, value, offset): BUFFER the value-th of operands, results and scratch, offset bytes on; WORD, LONG, NOTHING
//          for each call: CALL, function, kda_last_error, words of kda_prefill_args, words of the stage's own arguments or 0, byte of the
//          former where the stream goes, byte of the latter where the address of the former goes, number of addresses; the words of both;
//          then of each address (0: in the former, 1: in the latter; byte; buffer; offset)
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

enum Item : int64_t { LAUNCH = 0, CALL = 1 };
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

using Buffers = std::vector<char *>;
static const char kEnds[] = "the table of launches ends in the middle of one", kNowhere[] = "the table names a place that is not there";

// Both return how many words they have read, or 0: `problem` says why.
static size_t run_launch(void *stream, const Buffers &buffers, const int64_t *head, size_t left, std::string &problem) {
  Launch launch = driver();
  if (!launch) return problem = "libcuda.so.1 has no cuLaunchKernel", 0;
  if (left < 8 || left < 8 + 3 * size_t(head[7])) return problem = kEnds, 0;
  const int64_t count = head[7], *words = head + 8;
  std::vector<int64_t> values(count);
  std::vector<void *> parameters(count);
  for (int64_t i = 0; i < count; ++i, words += 3) {
    values[i] = words[1];
    if (words[0] == BUFFER) {
      if (words[1] < 0 || words[1] >= int64_t(buffers.size())) return problem = kNowhere, 0;
      values[i] = reinterpret_cast<int64_t>(buffers[words[1]] + words[2]);
    } else if (words[0] == NOTHING) {
      values[i] = 0;
    }
    parameters[i] = &values[i];  // of a WORD the first four bytes are read
  }
  const int status = launch(reinterpret_cast<void *>(head[1]), head[2], head[3], head[4], head[5], 1, 1, head[6], stream,
                            parameters.data(), nullptr);
  if (status) problem = "a launch failed with CUDA's error " + std::to_string(status);
  return 8 + 3 * count;
}

static size_t run_call(void *stream, const Buffers &buffers, const int64_t *head, size_t left, std::string &problem) {
  if (left < 8 || left < 8 + size_t(head[3] + head[4] + 4 * head[7])) return problem = kEnds, 0;
  const int64_t *words = head + 8, *addresses = words + head[3] + head[4], count = head[7];
  std::vector<int64_t> arguments[2] = {{words, words + head[3]}, {words + head[3], addresses}};
  const auto put = [&](int64_t which, int64_t byte, const void *address) {
    const bool inside = (which == 0 || which == 1) && byte >= 0 && byte % 8 == 0 && byte / 8 < int64_t(arguments[which].size());
    if (inside) arguments[which][byte / 8] = reinterpret_cast<int64_t>(address);
    return inside;
  };
  bool fits = put(0, head[5], stream) && (head[4] == 0 || put(1, head[6], arguments[0].data()));
  for (int64_t i = 0; fits && i < count; ++i, addresses += 4)
    fits = addresses[2] >= 0 && addresses[2] < int64_t(buffers.size()) && put(addresses[0], addresses[1], buffers[addresses[2]] + addresses[3]);
  if (!fits) return problem = kNowhere, 0;
  const int status = reinterpret_cast<int (*)(const void *)>(head[1])(arguments[head[4] ? 1 : 0].data());
  if (status) problem = std::string("the CUDA library says: ") + reinterpret_cast<const char *(*)()>(head[2])();
  return 8 + head[3] + head[4] + 4 * count;
}

// "": all is under way.
static std::string run(void *stream, const Buffers &buffers, const int64_t *table, size_t size) {
  std::string problem;
  for (size_t at = 0; at < size && problem.empty();) {
    const auto one = table[at] == CALL ? run_call : run_launch;
    at += one(stream, buffers, table + at, size - at, problem);
  }
  return problem;
}

static ffi::Error launches(void *stream, ffi::ScratchAllocator memory, ffi::RemainingArgs operands, ffi::RemainingRets results,
                           ffi::Span<const int64_t> table, int64_t scratch) {
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
  const std::string problem = run(stream, buffers, table.begin(), table.size());
  return problem.empty() ? ffi::Error::Success() : wrong(problem);
}

#pragma GCC visibility push(default)
// The same without XLA; the problem goes to `message`, of `room` bytes.
extern "C" int kdakit_run_table(void *stream, char *const *buffers, size_t count, const int64_t *table, size_t size, char *message,
                                size_t room) {
  const std::string problem = run(stream, Buffers(buffers, buffers + count), table, size);
  snprintf(message, room, "%s", problem.c_str());
  return !problem.empty();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kdakit_xla_launches, launches,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void *>>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("table")
                                  .Attr<int64_t>("scratch"));
#pragma GCC visibility pop
