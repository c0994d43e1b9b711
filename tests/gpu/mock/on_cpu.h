// Enough of CUDA C++ for kernels without barriers, so that g++ compiles kernels/paged.cu as it is.
#pragma once
#include <cstdint>

#define KVGATE_ON_CPU
typedef unsigned char u8;
typedef uint32_t u32;
typedef unsigned long long u64;

struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct dim3 {
  u32 x, y, z;
};

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
