/* Device memory with guards of 0xff bytes (NaN in every floating-point type) on both sides. */
#ifndef KDAKIT_TESTS_GUARDED_H
#define KDAKIT_TESTS_GUARDED_H

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GUARD 4096 /* bytes before and after */

#define CUDA(call)                                                                        \
  do {                                                                                    \
    cudaError_t error_ = (call);                                                          \
    if (error_ != cudaSuccess) {                                                          \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_));     \
      exit(1);                                                                            \
    }                                                                                     \
  } while (0)

typedef struct {
  size_t bytes;
  void *host;
  unsigned char *device; /* GUARD + bytes + GUARD */
} guarded;

/* `poison`: the inside starts as 0xff too; otherwise it is left unset, for tools that watch reads of unset memory. */
static guarded guarded_make(size_t bytes, int poison) {
  guarded x = {bytes, calloc(1, bytes + 1), NULL};
  CUDA(cudaMalloc((void **)&x.device, bytes + 2 * GUARD));
  CUDA(cudaMemset(x.device, 0xff, poison ? bytes + 2 * GUARD : GUARD));
  if (!poison) CUDA(cudaMemset(x.device + GUARD + bytes, 0xff, GUARD));
  return x;
}

static void *guarded_inside(guarded x) { return x.device + GUARD; }

static void guarded_upload(guarded x) { CUDA(cudaMemcpy(guarded_inside(x), x.host, x.bytes, cudaMemcpyHostToDevice)); }

/* The number of guard bytes that changed; `inside`: copies the rest back first. */
static int guarded_broken(guarded x, int inside) {
  unsigned char *sides = malloc(2 * GUARD);
  int broken = 0;
  if (inside) CUDA(cudaMemcpy(x.host, guarded_inside(x), x.bytes, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(sides, x.device, GUARD, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(sides + GUARD, x.device + GUARD + x.bytes, GUARD, cudaMemcpyDeviceToHost));
  for (int i = 0; i < 2 * GUARD; ++i) broken += sides[i] != 0xff;
  free(sides);
  return broken;
}

static void guarded_drop(guarded x) {
  free(x.host);
  CUDA(cudaFree(x.device));
}

static double uniform(uint64_t *seed) {
  *seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
  return (double)(*seed >> 11) / 9007199254740992.0;
}

#endif
