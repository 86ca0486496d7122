// The language of kernel sources: CUDA under nvcc; under a C++ compiler the emulation header of
// tests/emulation, which defines the same two macros.
#pragma once

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// The shared memory of a block is one struct.
#define METSELECT_SHARED(Type, name) __shared__ Type name

#define METSELECT_LAUNCH(kernel, grid, threads, stream, ...) \
  kernel<<<grid, threads, 0, stream>>>(__VA_ARGS__)

#else
#include "cuda_on_cpu.h"
#endif
