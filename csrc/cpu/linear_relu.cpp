// linear_relu: out = max(0, h W + b) and its gradient, one tile of rows at a time.
//
//   g = grad where out > 0:  dh = g W^T,  dW = h^T g,  db = sum g

#include <ATen/Dispatch.h>

#include "checks.h"
#include "linear.h"
#include "memory.h"
#include "threads.h"

namespace metselect {
namespace {

void check_linear(const Tensor& feat, const Tensor& weight) {
  TORCH_CHECK(feat.dim() == 2 && weight.dim() == 2 && feat.size(1) == weight.size(0),
              "feat has shape ", feat.sizes(), ", weight ", weight.sizes());
  TORCH_CHECK(feat.scalar_type() == weight.scalar_type(), "feat is ", feat.scalar_type(),
              ", weight ", weight.scalar_type());
}

template <typename T>
METSELECT_CLONES void relu(T* a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) a[i] = a[i] < 0 ? T{0} : a[i];
}

Tensor linear_relu(const Tensor& feat, const Tensor& weight, const Tensor& bias) {
  check_linear(feat, weight);
  const int64_t n = feat.size(0), in = weight.size(0), out_feats = weight.size(1);
  TORCH_CHECK(bias.dim() == 1 && bias.size(0) == out_feats, "bias has shape ", bias.sizes());
  const Tensor h = unit_stride(feat), w = weight.contiguous(), b = bias.contiguous();
  Tensor out = fresh({n, out_feats}, feat.options());
  AT_DISPATCH_FLOATING_TYPES(feat.scalar_type(), "linear_relu", [&] {
    const scalar_t *rows = h.const_data_ptr<scalar_t>(), *shift = b.const_data_ptr<scalar_t>();
    const Matrix<const scalar_t> map{w.const_data_ptr<scalar_t>(), out_feats};
    scalar_t* result = out.mutable_data_ptr<scalar_t>();
    over_shares(n, workers(n), [&](int64_t begin, int64_t end, int64_t) {
      for (int64_t start = begin; start < end; start += kTile) {
        const int64_t size = std::min(end, start + kTile) - start;
        scalar_t* tile = result + start * out_feats;
        for (int64_t i = 0; i < size; ++i) std::copy_n(shift, out_feats, tile + i * out_feats);
        gemm<scalar_t>(size, out_feats, in, {rows + start * h.stride(0), h.stride(0)}, map, 1,
                       {tile, out_feats});
        relu(tile, size * out_feats);
      }
    });
  });
  return out;
}

// g = grad where out > 0
template <typename T>
METSELECT_CLONES void gate(const T* grad, const T* out, int64_t n, T* __restrict__ g) {
  for (int64_t i = 0; i < n; ++i) g[i] = out[i] > 0 ? grad[i] : T{0};
}

std::tuple<Tensor, Tensor, Tensor> linear_relu_backward(const Tensor& grad, const Tensor& feat,
                                                        const Tensor& weight, const Tensor& out,
                                                        bool wanted) {
  check_linear(feat, weight);
  const int64_t n = feat.size(0), in = weight.size(0), out_feats = weight.size(1);
  TORCH_CHECK(grad.sizes() == out.sizes() && out.size(0) == n && out.size(1) == out_feats,
              "grad has shape ", grad.sizes(), ", out ", out.sizes());
  const Tensor h = unit_stride(feat), w = weight.contiguous(), g = grad.contiguous(),
               o = out.contiguous();
  Tensor to_feat = fresh({wanted ? n : 0, in}, feat.options());
  Tensor to_weight, to_bias;
  AT_DISPATCH_FLOATING_TYPES(feat.scalar_type(), "linear_relu_backward", [&] {
    using T = scalar_t;
    const int64_t shares = workers(n);
    std::vector<LinearSums<T>> parts(shares, LinearSums<T>(out_feats, in));
    const Matrix<const T> map{w.const_data_ptr<T>(), out_feats};
    over_shares(n, shares, [&](int64_t begin, int64_t end, int64_t worker) {
      std::vector<T> space(kTile * out_feats);
      for (int64_t start = begin; start < end; start += kTile) {
        const int64_t size = std::min(end, start + kTile) - start, first = start * out_feats;
        gate(g.const_data_ptr<T>() + first, o.const_data_ptr<T>() + first, size * out_feats,
             space.data());
        const T* rows = h.const_data_ptr<T>() + start * h.stride(0);
        parts[worker].add({rows, h.stride(0)}, space.data(), size, in);
        if (!wanted) continue;
        gemm<T>(size, in, out_feats, {space.data(), out_feats}, map.t(), 0,
                {to_feat.mutable_data_ptr<T>() + start * in, in});
      }
    });
    std::tie(to_weight, to_bias) = total(parts, in, feat);
  });
  return {to_feat, to_weight.t().contiguous(), to_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) {
  m.impl("linear_relu", &linear_relu);
  m.impl("linear_relu_backward", &linear_relu_backward);
}

}  // namespace metselect
