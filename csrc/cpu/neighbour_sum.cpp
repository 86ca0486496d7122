// neighbour_sum: out_i = more_i + t_i sum_{j -> i} s_j h_j, a row at a time on compressed sparse
// rows. Its gradient to h is the same sum along the reversed edges with s and t exchanged.

#include <ATen/ops/empty.h>

#include "sparse.h"

namespace metselect {
namespace {

template <typename T>
struct Scaled {
  const int64_t* indptr;
  const int32_t* indices;
  const T* source;  // s, null: ones
  const T* target;  // t, null: ones
  const T* feat;
  int64_t stride, width;
  const T* more;  // null: zeros
};

#define METSELECT_ROWS(T)                                                               \
  METSELECT_CLONES void rows(const Scaled<T>& in, int64_t begin, int64_t end, T* out) { \
    sum_rows<T>(in, begin, end, out);                                                   \
  }

constexpr int64_t kAhead = 8;  // edges: rows of random nodes are fetched before they are needed

template <typename T>
inline __attribute__((always_inline)) void sum_rows(const Scaled<T>& in, int64_t begin, int64_t end,
                                                    T* out) {
  const int64_t width = in.width, last = in.indptr[end];
  for (int64_t i = begin; i < end; ++i) {
    T* __restrict__ sum = out + i * width;
    for (int64_t d = 0; d < width; ++d) sum[d] = 0;
    for (int64_t e = in.indptr[i]; e < in.indptr[i + 1]; ++e) {
      if (e + kAhead < last) {
        const T* next = in.feat + in.indices[e + kAhead] * in.stride;
        for (int64_t d = 0; d < width; d += 64 / sizeof(T)) __builtin_prefetch(next + d);
      }
      const int64_t j = in.indices[e];
      const T* __restrict__ row = in.feat + j * in.stride;
      const T s = in.source ? in.source[j] : T(1);
      for (int64_t d = 0; d < width; ++d) sum[d] += s * row[d];
    }
    const T t = in.target ? in.target[i] : T(1);
    if (in.more) {
      const T* more = in.more + i * width;
      for (int64_t d = 0; d < width; ++d) sum[d] = more[d] + t * sum[d];
    } else if (in.target) {
      for (int64_t d = 0; d < width; ++d) sum[d] *= t;
    }
  }
}

METSELECT_ROWS(float)
METSELECT_ROWS(double)

OptionalTensor checked(const OptionalTensor& value, at::IntArrayRef shape, const Tensor& like,
                       const char* name) {
  if (!value) return value;
  TORCH_CHECK(value->sizes() == shape && value->scalar_type() == like.scalar_type(), name, " is ",
              value->scalar_type(), " of shape ", value->sizes(), ", expected ", like.scalar_type(),
              " of ", shape);
  return value->contiguous();
}

Tensor neighbour_sum(const Tensor& indptr, const Tensor& indices, const Tensor& back_indptr,
                     const Tensor& back_indices, const OptionalTensor& source_scale,
                     const OptionalTensor& target_scale, const Tensor& feat,
                     const OptionalTensor& more) {
  TORCH_CHECK(feat.dim() == 2, "feat has shape ", feat.sizes());
  const int64_t n = indptr.size(0) - 1, width = feat.size(1);
  check_indptr(indptr, n, indices.size(0), "indptr");
  check_small_numbers(indices, feat.size(0), "indices");
  const Tensor h = unit_stride(feat);
  const OptionalTensor source = checked(source_scale, {feat.size(0)}, feat, "source_scale"),
                       target = checked(target_scale, {n}, feat, "target_scale"),
                       start = checked(more, {n, width}, feat, "more");
  Tensor out = at::empty({n, width}, feat.options());
  AT_DISPATCH_FLOATING_TYPES(feat.scalar_type(), "neighbour_sum", [&] {
    const auto data = [](const OptionalTensor& value) {
      return value ? value->const_data_ptr<scalar_t>() : nullptr;
    };
    const Scaled<scalar_t> in{indptr.const_data_ptr<int64_t>(),
                              indices.const_data_ptr<int32_t>(),
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
