// moments: class sums and shifted Gram matrices of all layers in one pass over the picked rows.
//
//   r_i = h_i - shift[y_i],  sum[c] = sum of r_i over y_i = c,  gram = sum of r_i r_i^T
//
// A tile of r is built in a buffer that stays in the cache, its products are taken in the dtype of
// the layer and added up in float64. A tile whose largest entry is beyond 2^+-40 is scaled to 1 by
// a power of two first, so that squares neither overflow nor vanish.

#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "checks.h"

namespace metselect {
namespace {

struct Sums {
  Tensor total;  // [C, D] float64
  Tensor gram;   // [D, D] float64
};

// Fills `tile` with the residuals of rows [begin, end) and returns the largest magnitude.
template <typename T>
T fill(const Picked<T>& h, const int64_t* y, const T* shift, int64_t begin, int64_t end, T* tile) {
  T largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    const T *row = h[i], *mean = shift + y[i] * h.width;
    for (int64_t d = 0; d < h.width; ++d) {
      const T r = row[d] - mean[d];
      *tile++ = r;
      largest = std::max(largest, std::abs(r));
    }
  }
  return largest;
}

template <typename T>
void share_of_layer(const Picked<T>& h, const int64_t* y, const T* shift, int64_t begin,
                    int64_t end, Sums& sums) {
  const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value);
  const int64_t width = h.width;
  Tensor tile = at::empty({kTile, width}, options), product = at::empty({width, width}, options);
  double* total = sums.total.mutable_data_ptr<double>();
  for (int64_t start = begin; start < end; start += kTile) {
    const int64_t stop = std::min(end, start + kTile);
    T* r = tile.mutable_data_ptr<T>();
    const T largest = fill(h, y, shift, start, stop, r);
    for (int64_t i = start; i < stop; ++i) {
      double* into = total + y[i] * width;
      for (int64_t d = 0; d < width; ++d) into[d] += r[(i - start) * width + d];
    }
    Tensor rows = tile.narrow(0, 0, stop - start);
    int exponent = 0;
    if (largest > 0) std::frexp(largest, &exponent);
    const bool extreme = std::abs(exponent) > 40;
    if (extreme) rows.mul_(std::ldexp(1.0, -exponent));
    at::mm_out(product, rows.t(), rows);
    sums.gram.add_(product, extreme ? std::ldexp(1.0, 2 * exponent) : 1.0);
  }
}

template <typename T>
Sums of_layer(const Tensor& h, const Tensor& labels, const OptionalTensor& index,
              const Tensor& shift) {
  const int64_t n = labels.size(0), shares = workers(n);
  std::vector<Sums> parts;
  for (int64_t worker = 0; worker < shares; ++worker) {
    parts.push_back({at::zeros_like(shift, at::kDouble),
                     at::zeros({h.size(1), h.size(1)}, shift.options().dtype(at::kDouble))});
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
                                                                     const OptionalTensor& index,
                                                                     TensorList shifts) {
  check_layers(layers, shifts);
  check_numbers(labels, shifts[0].size(0), "labels");
  if (index) check_numbers(*index, layers[0].size(0), "index");
  TORCH_CHECK(labels.size(0) == picked_rows(layers, index), "got ", labels.size(0), " labels for ",
              picked_rows(layers, index), " rows");
  Tensor count = at::bincount(labels, {}, shifts[0].size(0)).to(at::kDouble);
  std::vector<Tensor> totals, grams;
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    const Tensor h = unit_stride(layers[depth]), shift = shifts[depth].contiguous();
    AT_DISPATCH_FLOATING_TYPES(h.scalar_type(), "moments", [&] {
      Sums sums = of_layer<scalar_t>(h, labels, index, shift);
      totals.push_back(sums.total);
      grams.push_back(sums.gram);
    });
  }
  return {count, totals, grams};
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) { m.impl("moments", &moments); }

}  // namespace metselect
