// The CUDA moments as C functions: what the torch binding and the tests call.
#pragma once

#include <stdint.h>

extern "C" {

// One layer; every pointer is to memory of the device. Strides count elements.
struct MetselectMomentsLayer {
  const void* h;  // [rows, width]
  int64_t rows, row_stride, column_stride, width;
  const int64_t* index;  // [n] rows that are picked; null: all in order
  const void* shift;     // [classes, width], contiguous
  double* sum;           // [classes, width]
  double* gram;          // [width, width]
};

// Of the layers; sums are taken in float32, for float64 layers in float64, and shifts are of that.
enum MetselectDtype { kMetselectFloat, kMetselectDouble, kMetselectHalf, kMetselectBfloat16 };

struct MetselectMomentsBatch {
  const MetselectMomentsLayer* layers;  // on the host
  int64_t n_layers;
  const int64_t* labels;  // [n]
  int64_t n, classes;
  double* count;  // [classes]
  int32_t dtype;
  int32_t accumulate;  // add to what sum, gram and count hold
  int32_t blocks;      // of the first stage, about; the results depend on it in their last bits
};

// As many blocks as the current device runs at a time; 0 where there is none.
int32_t metselect_moments_blocks();

int64_t metselect_moments_workspace_bytes(const MetselectMomentsBatch* batch);

// Starts the work on `stream`, a cudaStream_t, and returns a cudaError_t. `workspace` must stay
// until that work is done.
int32_t metselect_moments(const MetselectMomentsBatch* batch, void* workspace, void* stream);

}  // extern "C"
