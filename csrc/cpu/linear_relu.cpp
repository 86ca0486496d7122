// linear_relu: out = max(0, h W + b), and its gradient, a tile of rows at a time.
//
//   g = grad where out > 0:  dh = g W^T,  dW = h^T g,  db = sum g

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "gemm.h"

namespace metselect {
namespace {

void check_linear(const Tensor& feat, const Tensor& weight) {
  TORCH_CHECK(feat.dim() == 2 && weight.dim() == 2 && feat.size(1) == weight.size(0),
              "feat has shape ", feat.sizes(), ", weight ", weight.sizes());
  TORCH_CHECK(feat.scalar_type() == weight.scalar_type(), "feat is ", feat.scalar_type(),
              ", weight ", weight.scalar_type());
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
        for (int64_t i = 0; i < size * out_feats; ++i) tile[i] = tile[i] < 0 ? 0 : tile[i];
      }
    });
  });
  return out;
}

// The sums of one thread.
template <typename T>
struct Sums {
  std::vector<T> weight;     // [D, K]
  std::vector<double> bias;  // [K]
};

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
  Tensor to_weight = at::zeros({in, out_feats}, feat.options());
  Tensor to_bias = at::zeros({out_feats}, feat.options().dtype(at::kDouble));
  AT_DISPATCH_FLOATING_TYPES(feat.scalar_type(), "linear_relu_backward", [&] {
    const int64_t shares = workers(n);
    std::vector<Sums<scalar_t>> parts(shares);
    const Matrix<const scalar_t> map{w.const_data_ptr<scalar_t>(), out_feats};
    over_shares(n, shares, [&](int64_t begin, int64_t end, int64_t worker) {
      Sums<scalar_t>& sums = parts[worker];
      sums.weight.resize(in * out_feats);
      sums.bias.resize(out_feats);
      std::vector<scalar_t> space(kTile * out_feats);
      for (int64_t start = begin; start < end; start += kTile) {
        const int64_t size = std::min(end, start + kTile) - start;
        const scalar_t* slope = g.const_data_ptr<scalar_t>() + start * out_feats;
        const scalar_t* result = o.const_data_ptr<scalar_t>() + start * out_feats;
        for (int64_t i = 0; i < size * out_feats; ++i) space[i] = result[i] > 0 ? slope[i] : 0;
        const Matrix<const scalar_t> tile{space.data(), out_feats};
        const Matrix<const scalar_t> rows{h.const_data_ptr<scalar_t>() + start * h.stride(0),
                                          h.stride(0)};
        gemm<scalar_t>(in, out_feats, size, rows.t(), tile, 1, {sums.weight.data(), out_feats});
        for (int64_t i = 0; i < size; ++i) {
          for (int64_t c = 0; c < out_feats; ++c) sums.bias[c] += space[i * out_feats + c];
        }
        if (!wanted) continue;
        gemm<scalar_t>(size, in, out_feats, tile, map.t(), 0,
                       {to_feat.mutable_data_ptr<scalar_t>() + start * in, in});
      }
    });
    for (const auto& part : parts) {
      scalar_t* dw = to_weight.mutable_data_ptr<scalar_t>();
      double* db = to_bias.mutable_data_ptr<double>();
      for (size_t i = 0; i < part.weight.size(); ++i) dw[i] += part.weight[i];
      for (size_t c = 0; c < part.bias.size(); ++c) db[c] += part.bias[c];
    }
  });
  return {to_feat, to_weight, to_bias.to(feat.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) {
  m.impl("linear_relu", &linear_relu);
  m.impl("linear_relu_backward", &linear_relu_backward);
}

}  // namespace metselect
