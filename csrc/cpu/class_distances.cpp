// class_distances: dist2[l, i, c] = || R_l (h_i - mu_c) ||^2, and its gradient to the layers.
//
//   z = R (h - center), m = R (mu - center):  dist2 = || z - m_c ||^2
//   dh = 2 R^T sum_c g_c (z - m_c) = (2 (sum_c g_c) z - 2 g m) R
//
// Each tile of nodes is whitened once for all classes. Means and factors have no gradient.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "memory.h"
#include "metric.h"
#include "threads.h"

namespace metselect {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Whitens the rows [begin, end) tile by tile and calls body(z, start) on each tile.
template <typename T, typename Body>
void whitened_tiles(const Picked<T>& h, const Metric& metric, int64_t begin, int64_t end,
                    const Body& body) {
  const auto options = metric.center.options();
  Tensor space = at::empty({kTile, h.width}, options);
  Tensor z = at::empty({kTile, metric.factor.size(0)}, options);
  for (int64_t start = begin; start < end; start += kTile) {
    const int64_t stop = std::min(end, start + kTile);
    centered(h, metric, start, stop, space.mutable_data_ptr<T>());
    Tensor tile = z.narrow(0, 0, stop - start);
    at::mm_out(tile, space.narrow(0, 0, stop - start), metric.factor.t());
    body(tile, start);
  }
}

constexpr int64_t kRows = 4, kLanes = 16;  // a block of sums that fits in registers

// Returns the whitened means transposed, [K, C], with C padded by zeros to whole blocks.
Tensor side_by_side(const Tensor& middle) {
  const int64_t classes = middle.size(0), padded = (classes + kLanes - 1) / kLanes * kLanes;
  Tensor out = at::zeros({middle.size(1), padded}, middle.options());
  out.narrow(1, 0, classes).copy_(middle.t());
  return out;
}

// Writes squared distances [n, C]. Classes are the lanes, so each sum runs over the features in
// order; the last block of rows repeats its last row.
template <typename T>
METSELECT_CLONES void distances(const T* z, int64_t n, int64_t width, const T* m, int64_t classes,
                                T* __restrict__ out) {
  const int64_t padded = (classes + kLanes - 1) / kLanes * kLanes;
  for (int64_t start = 0; start < n; start += kRows) {
    const T* row[kRows];
    for (int64_t r = 0; r < kRows; ++r) row[r] = z + std::min(start + r, n - 1) * width;
    for (int64_t first = 0; first < classes; first += kLanes) {
      T sum[kRows][kLanes] = {};
      for (int64_t d = 0; d < width; ++d) {
        const T* mean = m + d * padded + first;
        for (int64_t r = 0; r < kRows; ++r) {
          const T own = row[r][d];
#pragma omp simd
          for (int64_t c = 0; c < kLanes; ++c) sum[r][c] += (own - mean[c]) * (own - mean[c]);
        }
      }
      const int64_t rows = std::min(kRows, n - start), lanes = std::min(kLanes, classes - first);
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(sum[r], lanes, out + (start + r) * classes + first);
      }
    }
  }
}

Tensor class_distances(TensorList layers, TensorList means, TensorList factors, const Tensor& valid,
                       const Indices& index) {
  const int64_t n = check_layers(layers, index, means), classes = valid.size(0);
  Tensor dist2 = fresh({static_cast<int64_t>(layers.size()), n, classes}, layers[0].options());
  const std::vector<Metric> known = metrics(means, factors, valid);
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    const Tensor h = unit_stride(layers[depth]);
    AT_DISPATCH_FLOATING_TYPES(h.scalar_type(), "class_distances", [&] {
      const Picked<scalar_t> picked(h, index.get(depth));
      scalar_t* out = dist2[depth].mutable_data_ptr<scalar_t>();
      const Tensor lanes = side_by_side(known[depth].middle);
      over_shares(n, workers(n), [&](int64_t begin, int64_t end, int64_t) {
        whitened_tiles(picked, known[depth], begin, end, [&](const Tensor& z, int64_t start) {
          distances(z.const_data_ptr<scalar_t>(), z.size(0), z.size(1),
                    lanes.const_data_ptr<scalar_t>(), classes, out + start * classes);
        });
      });
    });
  }
  return dist2.masked_fill_(valid.logical_not(), kInfinity);
}

std::vector<Tensor> class_distances_backward(const Tensor& grad, TensorList layers,
                                             TensorList means, TensorList factors,
                                             const Tensor& valid, const Indices& index) {
  const int64_t n = check_layers(layers, index, means);
  const std::vector<Metric> known = metrics(means, factors, valid);
  std::vector<Tensor> grads;
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    const Tensor h = unit_stride(layers[depth]);
    const Metric& metric = known[depth];
    const int64_t shares = has_duplicates(index.get(depth), h.size(0)) ? 1 : workers(n);
    Tensor out = fresh_zeros(h.sizes(), h.options());
    AT_DISPATCH_FLOATING_TYPES(h.scalar_type(), "class_distances_backward", [&] {
      const Picked<scalar_t> picked(h, index.get(depth));
      over_shares(n, shares, [&](int64_t begin, int64_t end, int64_t) {
        whitened_tiles(picked, metric, begin, end, [&](const Tensor& z, int64_t start) {
          const Tensor g =
              grad[depth].narrow(0, start, z.size(0)).masked_fill(valid.logical_not(), 0);
          const Tensor gz = (z * g.sum(1, true)).addmm_(g, metric.middle, 2, -2);
          const Tensor tile = at::mm(gz, metric.factor);
          add_rows(tile.const_data_ptr<scalar_t>(), picked, start, z.size(0),
                   out.mutable_data_ptr<scalar_t>());
        });
      });
    });
    grads.push_back(out);
  }
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) {
  m.impl("class_distances", &class_distances);
  m.impl("class_distances_backward", &class_distances_backward);
}

}  // namespace metselect
