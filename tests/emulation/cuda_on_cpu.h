// Runs CUDA kernels on the CPU, one block after the other. Each thread of a block is a fiber, which
// runs until it reaches a barrier or its end. Between two barriers the threads run in a random
// order, so with a missing barrier the result depends on the seed. Shared memory is on the heap in
// its exact size, for AddressSanitizer, and is initialised with huge numbers.
#pragma once

#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)

#define METSELECT_SHARED(Type, name) Type& name = *emulation::shared_memory<Type>()
#define METSELECT_LAUNCH(kernel, grid, threads, stream, ...) \
  (void(stream), emulation::launch(grid, threads, [&] { kernel(__VA_ARGS__); }))
#define __syncthreads() emulation::barrier(__LINE__)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 15);
  int waits_at = 0;  // the line of the barrier; 0: has ended
};

inline std::vector<Thread> threads;
inline std::vector<unsigned> order;  // in which the threads run
inline size_t started;
inline Thread* running;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline char* shared;    // of the block, allocated by the first thread that uses it
inline uint64_t state;  // of the random number generator
inline std::string error;
inline int processors = 2;

template <typename Type>
Type* shared_memory() {
  if (!shared) memset(shared = new char[sizeof(Type)], 0x7f, sizeof(Type));
  return reinterpret_cast<Type*>(shared);
}

inline void barrier(int line) {
  running->waits_at = line;
  swapcontext(&running->context, &scheduler);
}

inline void enter(unsigned number) {
  running = &threads[number];
  threadIdx = dim3(number);
}

// A fiber runs one thread after the other until one of them waits at a barrier, and then stays with
// that thread. A kernel without barriers thus needs a single fiber.
inline void run_fiber() {
  do {
    body();
    running->waits_at = 0;
    if (started == order.size()) return;
    enter(order[started++]);
  } while (true);
}

inline void shuffle_order() {
  for (size_t left = order.size(); left > 1; --left) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::swap(order[left - 1], order[(state >> 33) % left]);
  }
}

// Starts all threads of a block and runs them to their first barrier.
inline void start_threads() {
  shuffle_order();
  for (started = 0; started < order.size();) {
    enter(order[started++]);
    ucontext_t& context = running->context;
    getcontext(&context);
    context.uc_stack.ss_sp = running->stack.data();
    context.uc_stack.ss_size = running->stack.size();
    context.uc_link = &scheduler;
    makecontext(&context, run_fiber, 0);
    swapcontext(&scheduler, &context);
  }
}

// Returns the line of the barrier at which all threads wait, 0 when they have ended.
inline int meeting_line() {
  const int line = threads[0].waits_at;
  for (unsigned number : order) {
    const int other = threads[number].waits_at;
    if (other == line) continue;
    error = "divergent barrier: thread 0 is at line " + std::to_string(line) + ", thread " +
            std::to_string(number) + " at line " + std::to_string(other) + " (0: has ended)";
    return 0;
  }
  return line;
}

inline void run_block() {
  start_threads();
  while (meeting_line()) {
    shuffle_order();
    for (unsigned number : order) {
      enter(number);
      swapcontext(&scheduler, &running->context);
    }
  }
  delete[] shared;
  shared = nullptr;
}

inline void launch(dim3 grid, dim3 block, std::function<void()> kernel) {
  body = std::move(kernel);
  blockDim = block, gridDim = grid;
  threads.resize(block.x);
  order.resize(block.x);
  for (unsigned i = 0; i < block.x; ++i) order[i] = i;
  for (unsigned at = 0; at < grid.x * grid.y && error.empty(); ++at) {
    blockIdx = dim3(at % grid.x, at / grid.x);
    run_block();
  }
}

}  // namespace emulation

extern "C" {
inline __attribute__((used)) void emulation_start(unsigned seed) {
  emulation::state = seed;
  emulation::error.clear();
}
inline __attribute__((used)) const char* emulation_error() { return emulation::error.c_str(); }
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaGetLastError() {
  return emulation::error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = emulation::processors, cudaSuccess;
}

inline int atomicMax(int* into, int value) {
  const int before = *into;
  *into = std::max(before, value);
  return before;
}

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __half2float(__half value) {
  const int exponent = value.bits >> 10 & 31, fraction = value.bits & 1023;
  float size = exponent ? std::ldexp(1024.f + fraction, exponent - 25) : std::ldexp(fraction, -24);
  if (exponent == 31) size = fraction ? NAN : INFINITY;
  return value.bits >> 15 ? -size : size;
}

inline float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}
