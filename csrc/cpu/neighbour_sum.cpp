// neighbour_sum: out_i = more_i + t_i sum_{j -> i} w_ij s_j h_j on compressed sparse rows. The
// gradient to h is the same sum over the reversed edges with s and t exchanged.

#include <ATen/Dispatch.h>

#include "memory.h"
#include "sparse.h"

namespace metselect {
namespace {

template <typename T>
struct Scaled {
  const int64_t* indptr;
  const int32_t* indices;
  const T* weight;  // w, null: ones
  const T* source;  // s, null: ones
  const T* target;  // t, null: ones
  const T* feat;
  int64_t stride, width;
  const T* more;  // null: zeros
};

constexpr int64_t kAhead = 8;   // edges between prefetching a row and using it
constexpr int64_t kBlock = 64;  // columns whose sums fit in registers

// Writes the columns [column, column + W) of row i of the result; `width` columns if W = 0.
template <typename T, int64_t W>
inline __attribute__((always_inline)) void sum_columns(const Scaled<T>& in, int64_t i,
                                                       int64_t column, int64_t width, int64_t last,
                                                       T* __restrict__ out) {
  const int64_t n = W ? W : width;
  T sum[kBlock] = {};
  for (int64_t e = in.indptr[i]; e < in.indptr[i + 1]; ++e) {
    const T* next = in.feat + in.indices[std::min(e + kAhead, last)] * in.stride + column;
    for (int64_t d = 0; d < n; d += 64 / sizeof(T)) __builtin_prefetch(next + d);
    const int64_t j = in.indices[e];
    const T* __restrict__ row = in.feat + j * in.stride + column;
    const T s = (in.weight ? in.weight[e] : T(1)) * (in.source ? in.source[j] : T(1));
#pragma omp simd
    for (int64_t d = 0; d < n; ++d) sum[d] += s * row[d];
  }
  const T t = in.target ? in.target[i] : T(1);
  const T* more = in.more ? in.more + i * in.width + column : nullptr;
  for (int64_t d = 0; d < n; ++d) out[d] = (more ? more[d] : T(0)) + t * sum[d];
}

template <typename T>
METSELECT_CLONES void rows(const Scaled<T>& in, int64_t begin, int64_t end, T* out) {
  const int64_t last = in.indptr[end] - 1, whole = in.width / kBlock * kBlock;
  for (int64_t i = begin; i < end; ++i) {
    T* row = out + i * in.width;
    for (int64_t d = 0; d < whole; d += kBlock) {
      sum_columns<T, kBlock>(in, i, d, kBlock, last, row + d);
    }
    if (whole < in.width) sum_columns<T, 0>(in, i, whole, in.width - whole, last, row + whole);
  }
}

OptionalTensor checked(const OptionalTensor& value, at::IntArrayRef shape, const Tensor& like,
                       const char* name) {
  if (!value) return value;
  TORCH_CHECK(value->sizes() == shape && value->scalar_type() == like.scalar_type(), name, " is ",
              value->scalar_type(), " of shape ", value->sizes(), ", expected ", like.scalar_type(),
              " of ", shape);
  return value->contiguous();
}

Tensor neighbour_sum(const Tensor& indptr, const Tensor& indices, const Tensor& back_indptr,
                     const Tensor& back_indices, const OptionalTensor& weights,
                     const OptionalTensor& back_weights, const OptionalTensor& source_scale,
                     const OptionalTensor& target_scale, const Tensor& feat,
                     const OptionalTensor& more) {
  TORCH_CHECK(feat.dim() == 2, "feat has shape ", feat.sizes());
  const int64_t n = indptr.size(0) - 1, width = feat.size(1);
  check_indptr(indptr, n, indices.size(0), "indptr");
  check_small_numbers(indices, feat.size(0), "indices");
  const Tensor h = unit_stride(feat);
  const OptionalTensor edge = checked(weights, {indices.size(0)}, feat, "weights"),
                       source = checked(source_scale, {feat.size(0)}, feat, "source_scale"),
                       target = checked(target_scale, {n}, feat, "target_scale"),
                       start = checked(more, {n, width}, feat, "more");
  Tensor out = fresh({n, width}, feat.options());
  AT_DISPATCH_FLOATING_TYPES(feat.scalar_type(), "neighbour_sum", [&] {
    const auto data = [](const OptionalTensor& value) {
      return value ? value->const_data_ptr<scalar_t>() : nullptr;
    };
    const Scaled<scalar_t> in{indptr.const_data_ptr<int64_t>(),
                              indices.const_data_ptr<int32_t>(),
                              data(edge),
                              data(source),
                              data(target),
                              h.const_data_ptr<scalar_t>(),
                              h.stride(0),
                              width,
                              data(start)};
    over_edge_shares(in.indptr, n, [&](int64_t begin, int64_t end) {
      rows(in, begin, end, out.mutable_data_ptr<scalar_t>());
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) { m.impl("neighbour_sum", &neighbour_sum); }

}  // namespace metselect
