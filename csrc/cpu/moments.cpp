// moments: class sums and shifted Gram matrices of all layers in one pass over the picked rows.
//
//   r_i = h_i - shift[y_i],  sum[c] = sum of r_i over y_i = c,  gram = sum of r_i r_i^T
//
// A tile of r is built in a buffer that stays in the cache; its products are computed in the dtype
// of the layer and summed in float64. A tile whose largest entry is outside 2^+-40 is first scaled
// to 1 by a power of two, so that squares neither overflow nor underflow.

#include <ATen/Dispatch.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "checks.h"
#include "gemm.h"
#include "memory.h"
#include "rows.h"
#include "threads.h"

namespace metselect {
namespace {

struct Sums {
  Tensor total;  // [C, D] float64
  Tensor gram;   // [D, D] float64
};

// Fills `tile` with r of the rows [begin, end) and returns its largest magnitude.
template <typename T>
METSELECT_CLONES T fill(const Picked<T>& h, const int64_t* y, const T* shift, int64_t begin,
                        int64_t end, T* tile) {
  T largest = 0;
  for (int64_t i = begin; i < end; ++i, tile += h.width) {
    const T *row = h[i], *mean = shift + y[i] * h.width;
#pragma omp simd reduction(max : largest)
    for (int64_t d = 0; d < h.width; ++d) {
      tile[d] = row[d] - mean[d];
      const T size = tile[d] < 0 ? -tile[d] : tile[d];
      largest = size > largest ? size : largest;
    }
  }
  return largest;
}

template <typename T>
METSELECT_CLONES void add_by_class(const T* r, const int64_t* y, int64_t n, int64_t width,
                                   double* __restrict__ total) {
  for (int64_t i = 0; i < n; ++i, r += width) {
    for (int64_t d = 0; d < width; ++d) total[y[i] * width + d] += r[d];
  }
}

template <typename T>
METSELECT_CLONES void add_scaled(const T* product, int64_t n, double unit,
                                 double* __restrict__ gram) {
  for (int64_t i = 0; i < n; ++i) gram[i] += unit * product[i];
}

// Returns the exponent by which a tile is scaled, 0 within 2^+-40.
template <typename T>
int extreme(T largest) {
  int exponent = 0;
  if (largest > 0) std::frexp(largest, &exponent);
  return std::abs(exponent) > 40 ? exponent : 0;
}

template <typename T>
void share_of_layer(const Picked<T>& h, const int64_t* y, const T* shift, int64_t begin,
                    int64_t end, Sums& sums) {
  const int64_t width = h.width;
  std::vector<T> tile(kTile * width), product(width * width);
  double* total = sums.total.mutable_data_ptr<double>();
  double* gram = sums.gram.mutable_data_ptr<double>();
  for (int64_t start = begin; start < end; start += kTile) {
    const int64_t stop = std::min(end, start + kTile);
    const int exponent = extreme(fill(h, y, shift, start, stop, tile.data()));
    add_by_class(tile.data(), y + start, stop - start, width, total);
    if (exponent) {
      for (T& value : tile) value = std::ldexp(value, -exponent);
    }
    const Matrix<const T> rows{tile.data(), width};
    gemm<T>(width, width, stop - start, rows.t(), rows, 0, {product.data(), width});
    const double unit = std::ldexp(1.0, 2 * exponent);
    add_scaled(product.data(), width * width, unit, gram);
  }
}

template <typename T>
Sums layer_sums(const Tensor& h, const Tensor& labels, const OptionalTensor& index,
                const Tensor& shift) {
  const int64_t n = labels.size(0), shares = workers(n);
  const auto wide = shift.options().dtype(at::kDouble);
  std::vector<Sums> parts;
  for (int64_t worker = 0; worker < shares; ++worker) {
    parts.push_back({at::zeros(shift.sizes(), wide), at::zeros({h.size(1), h.size(1)}, wide)});
  }
  const Picked<T> picked(h, index);
  over_shares(n, shares, [&](int64_t begin, int64_t end, int64_t worker) {
    share_of_layer<T>(picked, labels.const_data_ptr<int64_t>(), shift.const_data_ptr<T>(), begin,
                      end, parts[worker]);
  });
  for (int64_t worker = 1; worker < shares; ++worker) {
    parts[0].total.add_(parts[worker].total);
    parts[0].gram.add_(parts[worker].gram);
  }
  return parts[0];
}

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>> moments(TensorList layers,
                                                                     const Tensor& labels,
                                                                     const Indices& index,
                                                                     TensorList shifts) {
  check_labels(labels, check_layers(layers, index, shifts), shifts[0].size(0));
  Tensor count = at::bincount(labels, {}, shifts[0].size(0)).to(at::kDouble);
  std::vector<Tensor> totals, grams;
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    const Tensor h = unit_stride(layers[depth]), shift = shifts[depth].contiguous();
    AT_DISPATCH_FLOATING_TYPES(h.scalar_type(), "moments", [&] {
      Sums sums = layer_sums<scalar_t>(h, labels, index.get(depth), shift);
      totals.push_back(sums.total);
      grams.push_back(sums.gram);
    });
  }
  return {count, totals, grams};
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) { m.impl("moments", &moments); }

}  // namespace metselect
