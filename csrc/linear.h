// The gradient of a linear map to its weight and bias, summed over tiles of rows.
#pragma once

#include <ATen/ops/zeros.h>

#include <tuple>
#include <vector>

#include "gemm.h"

namespace metselect {

// Adds the rows of a [n, width] to `sums`: four rows are added in T, their sum in float64.
template <typename T>
METSELECT_CLONES void add_columns(const T* a, int64_t n, int64_t width, double* __restrict__ sums) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4, a += 4 * width) {
    const T *b = a + width, *c = b + width, *d = c + width;
    for (int64_t k = 0; k < width; ++k) sums[k] += (a[k] + b[k]) + (c[k] + d[k]);
  }
  for (; i < n; ++i, a += width) {
    for (int64_t k = 0; k < width; ++k) sums[k] += a[k];
  }
}

// dW = slope^T rows and db = sum of slope, over the tiles of one thread.
template <typename T>
struct LinearSums {
  std::vector<T> weight;     // [C, D]
  std::vector<double> bias;  // [C]

  LinearSums(int64_t classes, int64_t width) : weight(classes * width), bias(classes) {}

  int64_t classes() const { return static_cast<int64_t>(bias.size()); }

  void add(Matrix<const T> rows, const T* slope, int64_t n, int64_t width) {
    const Matrix<const T> s{slope, classes()};
    gemm<T>(classes(), width, n, s.t(), rows, 1, {weight.data(), width});
    add_columns(slope, n, classes(), bias.data());
  }
};

// Returns dW [C, D] and db [C], summed over all threads, in the dtype of `like`.
template <typename T>
std::tuple<Tensor, Tensor> total(const std::vector<LinearSums<T>>& parts, int64_t width,
                                 const Tensor& like) {
  const int64_t classes = parts[0].classes();
  Tensor weight = at::zeros({classes, width}, like.options());
  Tensor bias = at::zeros({classes}, like.options().dtype(at::kDouble));
  for (const auto& part : parts) {
    T* dw = weight.mutable_data_ptr<T>();
    double* db = bias.mutable_data_ptr<double>();
    for (int64_t i = 0; i < weight.numel(); ++i) dw[i] += part.weight[i];
    for (int64_t c = 0; c < classes; ++c) db[c] += part.bias[c];
  }
  return {weight, bias.to(like.scalar_type())};
}

}  // namespace metselect
