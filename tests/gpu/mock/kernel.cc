// The kernels, run thread by thread.
#include "on_cpu.h"

#include <cstring>
#include <numeric>

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

#ifndef KERNEL_SOURCE
#define KERNEL_SOURCE "../../../kernels/paged.cu"
#endif
#include KERNEL_SOURCE

// Every thread of the launch, in order or, with a seed, in another one. False: no such kernel.
extern "C" bool run_kernel(const char* name, u32 blocks, u32 threads, const void* params, u64 seed) {
  void (*kernel)(const Params);
  if (!strcmp(name, "kvgate_scatter"))
    kernel = kvgate_scatter;
  else if (!strcmp(name, "kvgate_gather"))
    kernel = kvgate_gather;
  else
    return false;
  Params p;
  memcpy(&p, params, sizeof p);
  gridDim = {blocks, 1, 1};
  blockDim = {threads, 1, 1};
  const u64 all = (u64)blocks * threads;
  u64 step = seed % all | 1;
  while (std::gcd(step, all) != 1) step += 2;
  for (u64 n = 0, at = seed % all; n < all; ++n, at = (at + step) % all) {
    blockIdx = {(u32)(at / threads), 0, 0};
    threadIdx = {(u32)(at % threads), 0, 0};
    kernel(p);
  }
  return true;
}
