// Products of row-major matrices by direct BLAS calls: the overhead of a tensor operator, a few
// microseconds, is as long as the product of a tile.
#pragma once

#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <type_traits>

#include "types.h"

extern "C" {  // exported by libtorch_cpu, except in some builds of torch
__attribute__((weak)) void sgemm_(const char*, const char*, const int*, const int*, const int*,
                                  const float*, const float*, const int*, const float*, const int*,
                                  const float*, float*, const int*);
__attribute__((weak)) void dgemm_(const char*, const char*, const int*, const int*, const int*,
                                  const double*, const double*, const int*, const double*,
                                  const int*, const double*, double*, const int*);
}

namespace metselect {

// A row-major matrix: row i starts at data + i * stride.
template <typename T>
struct Matrix {
  T* data;
  int64_t stride;
  bool transposed = false;

  Matrix t() const { return {data, stride, !transposed}; }
};

template <typename T>
Tensor as_tensor(const Matrix<T>& m, int64_t rows, int64_t columns) {
  if (m.transposed) return as_tensor<T>(m.t(), columns, rows).t();
  using Value = std::remove_const_t<T>;
  return at::from_blob(const_cast<Value*>(m.data), {rows, columns}, {m.stride, 1},
                       at::TensorOptions().dtype(c10::CppTypeToScalarType<Value>::value));
}

// Returns the leading dimension for BLAS; the stride of a single row may have any value in torch.
template <typename T>
int leading(const Matrix<T>& m, int64_t rows, int64_t columns) {
  return static_cast<int>(std::max({m.stride, m.transposed ? rows : columns, int64_t{1}}));
}

// out [m, n] = a [m, k] b [k, n] + beta out
template <typename T>
void gemm(int64_t m, int64_t n, int64_t k, Matrix<const T> a, Matrix<const T> b, T beta,
          Matrix<T> out) {
  if (m == 0 || n == 0) return;
  const auto blas = [] {
    if constexpr (std::is_same_v<T, float>)
      return &sgemm_;
    else
      return &dgemm_;
  }();
  if (blas == nullptr) {
    Tensor c = as_tensor(out, m, n);
    at::addmm_out(c, c, as_tensor(a, m, k), as_tensor(b, k, n), beta, 1);
    return;
  }
  // BLAS is column-major, so the transposed product is computed: out^T = b^T a^T.
  const int rows = n, columns = m, inner = k;
  const int lda = leading(a, m, k), ldb = leading(b, k, n), ldc = leading(out, m, n);
  const T one = 1;
  blas(b.transposed ? "T" : "N", a.transposed ? "T" : "N", &rows, &columns, &inner, &one, b.data,
       &ldb, a.data, &lda, &beta, out.data, &ldc);
}

}  // namespace metselect
