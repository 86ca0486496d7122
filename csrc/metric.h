// Constants of the metric of one layer. Rows and class means are taken relative to the centre of
// the means, which does not change distances and avoids cancellation far from zero.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "checks.h"
#include "rows.h"

namespace metselect {

struct Metric {
  Tensor center;  // [D]
  Tensor factor;  // R [K, D]; K < D if a linear map of the layer is multiplied into R
  Tensor middle;  // R (mu - center) [C, K]
  Tensor slope;   // K^-1 (mu - center) [C, D]
  Tensor offset;  // (mu - center) K^-1 (mu - center) / 2 [C]
  bool alive;     // whether R is not zero

  Metric(const Tensor& mean, const Tensor& whitening, const Tensor& valid)
      : factor(whitening.contiguous()) {
    const Tensor seen = valid.nonzero().squeeze(1);
    center = seen.numel() ? at::index_select(mean, 0, seen).mean(0)
                          : at::zeros({mean.size(1)}, mean.options());
    const Tensor wide = factor.to(at::kDouble);
    const Tensor m = at::matmul((mean - center).to(at::kDouble), wide.t());
    middle = m.to(mean.scalar_type()).contiguous();
    slope = at::matmul(m, wide).to(mean.scalar_type()).contiguous();
    offset = (m.square().sum(1) / 2).to(mean.scalar_type());
    alive = factor.any().item<bool>();
  }
};

inline std::vector<Metric> metrics(TensorList means, TensorList factors, const Tensor& valid) {
  TORCH_CHECK(factors.size() == means.size(), "got ", means.size(), " means and ", factors.size(),
              " factors");
  TORCH_CHECK(
      valid.dim() == 1 && valid.size(0) == means[0].size(0) && valid.scalar_type() == at::kBool,
      "valid is ", valid.scalar_type(), " of shape ", valid.sizes(), " for ", means[0].size(0),
      " classes");
  std::vector<Metric> out;
  for (size_t depth = 0; depth < means.size(); ++depth) {
    const Tensor& factor = factors[depth];
    TORCH_CHECK(factor.dim() == 2 && factor.size(1) == means[depth].size(1) &&
                    factor.scalar_type() == means[depth].scalar_type(),
                "factor ", depth, " is ", factor.scalar_type(), " of shape ", factor.sizes(),
                ", its means ", means[depth].scalar_type(), " of ", means[depth].sizes());
    out.emplace_back(means[depth], factors[depth], valid);
  }
  return out;
}

// Writes the rows [begin, end) of `h` minus the centre to `out`.
template <typename T>
METSELECT_CLONES void centered(const Picked<T>& h, const Metric& metric, int64_t begin, int64_t end,
                               T* out) {
  const T* center = metric.center.const_data_ptr<T>();
  for (int64_t i = begin; i < end; ++i, out += h.width) {
    const T* row = h[i];
    for (int64_t d = 0; d < h.width; ++d) out[d] = row[d] - center[d];
  }
}

}  // namespace metselect
