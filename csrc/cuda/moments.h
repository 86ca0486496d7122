// The CUDA moments as C functions, for the torch binding and the tests.
#pragma once

#include <stdint.h>

extern "C" {

// One layer; all pointers are device pointers. Strides are in elements.
struct MetselectMomentsLayer {
  const void* h;  // [rows, width]
  int64_t rows, row_stride, column_stride, width;
  const int64_t* index;  // [n] picked rows; null: all in order
  const void* shift;     // [classes, width], contiguous
  double* sum;           // [classes, width]
  double* gram;          // [width, width]
};

// The dtype of the layers. Products and shifts are float32, for float64 layers float64.
enum MetselectDtype { kMetselectFloat, kMetselectDouble, kMetselectHalf, kMetselectBfloat16 };

struct MetselectMomentsBatch {
  const MetselectMomentsLayer* layers;  // on the host
  int64_t n_layers;
  const int64_t* labels;  // [n]
  int64_t n, classes;
  double* count;  // [classes]
  int32_t dtype;
  int32_t accumulate;  // add to the contents of sum, gram and count
  int32_t blocks;      // approximate number in the first stage; changes the last bits of results
};

// Returns the number of blocks that the current device runs at a time; 0 without a device.
int32_t metselect_moments_blocks();

int64_t metselect_moments_workspace_bytes(const MetselectMomentsBatch* batch);

// Launches the kernels on `stream`, a cudaStream_t, and returns a cudaError_t. `workspace` must
// stay allocated until they have finished.
int32_t metselect_moments(const MetselectMomentsBatch* batch, void* workspace, void* stream);

}  // extern "C"
