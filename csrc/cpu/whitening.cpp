// whitening: R = chol(K)^-1 of every layer's shrunk covariance, in float64.
//
//   K = (1 - rho) K / unit + max(rho, 16 D eps) I with unit = tr(K) / D;  R / sqrt(unit), or 0 if
//   the trace is 0

#include <ATen/ops/linalg_cholesky.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <vector>

#include "checks.h"

namespace metselect {
namespace {

Tensor factor(const Tensor& covariance, double rho, double eps) {
  const int64_t width = covariance.size(0);
  TORCH_CHECK(covariance.dim() == 2 && covariance.size(1) == width,
              "a covariance must be square, got shape ", covariance.sizes());
  Tensor shrunk = covariance.to(at::kDouble, false, /*copy=*/true).contiguous();
  double* k = shrunk.mutable_data_ptr<double>();
  double variance = 0;
  for (int64_t d = 0; d < width; ++d) variance += k[d * width + d] / width;
  const double unit = variance > 0 ? variance : 1;
  for (int64_t i = 0; i < width * width; ++i) k[i] *= (1 - rho) / unit;
  Tensor scaled_eye = at::zeros({width, width}, shrunk.options());
  double* eye = scaled_eye.mutable_data_ptr<double>();
  for (int64_t d = 0; d < width; ++d) {
    k[d * width + d] += std::max(rho, 16 * width * eps);
    eye[d * width + d] = variance > 0 ? 1 / std::sqrt(unit) : 0;
  }
  return at::linalg_solve_triangular(at::linalg_cholesky(shrunk), scaled_eye, /*upper=*/false)
      .contiguous();
}

std::vector<Tensor> whitening(TensorList covariances, const Tensor& rho, double eps) {
  TORCH_CHECK(rho.dim() == 1 && rho.size(0) == static_cast<int64_t>(covariances.size()), "got ",
              covariances.size(), " covariances and rho of shape ", rho.sizes());
  const Tensor amounts = rho.to(at::kDouble).contiguous();
  std::vector<Tensor> factors;
  for (size_t depth = 0; depth < covariances.size(); ++depth) {
    factors.push_back(factor(covariances[depth], amounts.const_data_ptr<double>()[depth], eps));
  }
  return factors;
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) { m.impl("whitening", &whitening); }

}  // namespace metselect
