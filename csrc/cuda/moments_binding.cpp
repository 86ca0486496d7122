// Registers moments for the CUDA dispatch key.

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "checks.h"
#include "moments.h"

namespace metselect {
namespace {

MetselectDtype dtype_of(const Tensor& h) {
  switch (h.scalar_type()) {
    case at::kFloat:
      return kMetselectFloat;
    case at::kDouble:
      return kMetselectDouble;
    case at::kHalf:
      return kMetselectHalf;
    case at::kBFloat16:
      return kMetselectBfloat16;
    default:
      TORCH_CHECK(false, "layer 0 is ", h.scalar_type(), ", expected a floating dtype");
  }
}

// Index and label values are not checked, which would wait for the GPU; values out of range give
// NaN.
void check(TensorList layers, const Tensor& labels, const Indices& index, TensorList shifts) {
  check_label_count(labels, check_shapes(layers, index, shifts));
  const bool wide = layers[0].scalar_type() == at::kDouble;
  check_dtypes(layers, shifts, wide ? at::kDouble : at::kFloat);
  const auto same = [&](const Tensor& value, const char* name) {
    TORCH_CHECK(value.device() == layers[0].device() && value.is_cuda(), name, " is on ",
                value.device(), ", layer 0 on ", layers[0].device());
  };
  same(labels, "labels");
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    same(layers[depth], "a layer");
    same(shifts[depth], "a shift");
    const OptionalTensor picked = index.get(depth);
    if (picked) same(*picked, "an index");
  }
}

struct Outputs {
  Tensor count;                     // [C] float64
  std::vector<Tensor> sums, grams;  // [C, D], [D, D] float64
  std::vector<Tensor> shifts;       // contiguous
  std::vector<MetselectMomentsLayer> layers;
};

Outputs prepared(TensorList layers, const Indices& index, TensorList shifts) {
  const auto options = layers[0].options().dtype(at::kDouble);
  Outputs out;
  out.count = at::empty({shifts[0].size(0)}, options);
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    const Tensor& h = layers[depth];
    const OptionalTensor picked = index.get(depth);
    out.shifts.push_back(shifts[depth].contiguous());
    out.sums.push_back(at::empty(shifts[depth].sizes(), options));
    out.grams.push_back(at::empty({h.size(1), h.size(1)}, options));
    out.layers.push_back(
        {h.const_data_ptr(), h.size(0), h.stride(0), h.stride(1), h.size(1),
         picked ? picked->const_data_ptr<int64_t>() : nullptr, out.shifts.back().const_data_ptr(),
         out.sums.back().mutable_data_ptr<double>(), out.grams.back().mutable_data_ptr<double>()});
  }
  return out;
}

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>> moments(TensorList layers,
                                                                     const Tensor& labels,
                                                                     const Indices& index,
                                                                     TensorList shifts) {
  check(layers, labels, index, shifts);
  const c10::cuda::CUDAGuard guard(layers[0].device());
  Outputs out = prepared(layers, index, shifts);
  MetselectMomentsBatch batch = {};
  batch.layers = out.layers.data();
  batch.n_layers = int64_t(out.layers.size());
  batch.labels = labels.const_data_ptr<int64_t>();
  batch.n = labels.size(0);
  batch.classes = shifts[0].size(0);
  batch.count = out.count.mutable_data_ptr<double>();
  batch.dtype = dtype_of(layers[0]);
  batch.blocks = metselect_moments_blocks();
  // Freed while the kernels run, which the caching allocator allows on the current stream.
  const Tensor workspace =
      at::empty({metselect_moments_workspace_bytes(&batch)}, layers[0].options().dtype(at::kByte));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(
      static_cast<cudaError_t>(metselect_moments(&batch, workspace.mutable_data_ptr(), stream)));
  return {out.count, out.sums, out.grams};
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CUDA, m) { m.impl("moments", &moments); }

}  // namespace metselect
