// attention_sum: softmax over the in-edges of a node and the weighted sum of their sources.
//
//   e_ij = leaky_relu(source_j + target_i), a_i = softmax(e_i), out_i = sum_j a_ij feat_j
//   da_ij = <grad_i, feat_j>, de_ij = a_ij leaky_relu'(e_ij) (da_ij - m_i), m_i = sum_j a_ij da_ij
//   dfeat_j = sum_i a_ij grad_i, dsource_j = sum_i de_ij, dtarget_i = sum_j de_ij
//
// Each row of a result is computed by one thread in the order of its edges, without atomics, so
// results are the same for any number of threads.

#include <ATen/Dispatch.h>
#include <ATen/ops/exp.h>

#include "memory.h"
#include "sparse.h"

namespace metselect {
namespace {

constexpr int64_t kRun = 1024;  // edges whose logits stay in the first-level cache until used
constexpr int64_t kAhead = 16;  // edges between prefetching a row and using it

// The edges by one of their ends: row i is connected to other[indptr[i]] to other[indptr[i + 1]].
struct Side {
  const int64_t* indptr;
  const int32_t* other;
  int64_t rows;
  int64_t edges;

  Side(const Tensor& indptr, const Tensor& other)
      : indptr(indptr.const_data_ptr<int64_t>()),
        other(other.const_data_ptr<int32_t>()),
        rows(indptr.size(0) - 1),
        edges(other.size(0)) {}
};

template <typename T>
struct Inputs {
  const T* feat;    // [N, H, F]
  const T* source;  // [N, H]
  const T* target;  // [M, H]
  T slope;
  int64_t heads;
  int64_t width;

  Inputs(const Tensor& feat, const Tensor& source, const Tensor& target, double slope)
      : feat(feat.const_data_ptr<T>()),
        source(source.const_data_ptr<T>()),
        target(target.const_data_ptr<T>()),
        slope(static_cast<T>(slope)),
        heads(feat.size(1)),
        width(feat.size(2)) {}
};

// H and F if known at compile time, otherwise 0.
template <int64_t H, int64_t F>
struct Sizes {
  static constexpr int64_t kHeads = H, kWidth = F;
};

// Common sizes are compiled separately, so that sums stay in registers.
template <typename Body>
void with_sizes(int64_t heads, int64_t width, const Body& body) {
  if (heads == 4 && width == 16) {
    body(Sizes<4, 16>());
  } else {
    body(Sizes<0, 0>());
  }
}

template <typename T>
inline void prefetch(const T* row, int64_t n) {
  for (int64_t d = 0; d < n; d += 64 / sizeof(T)) __builtin_prefetch(row + d);
}

// The derivative of the leaky ReLU.
template <typename T>
inline T leaky_slope(T x, T slope) {
  return x > 0 ? T{1} : slope;
}

// sum[h] += weight[h] row[h] for [H, F] rows
template <typename T>
inline void add_row(const T* row, const T* weight, int64_t heads, int64_t width, T* sum) {
  for (int64_t h = 0; h < heads; ++h) {
    const T factor = weight[h];
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) sum[h * width + d] += factor * row[h * width + d];
  }
}

// Sums in four lanes: an OpenMP simd reduction combines the lanes one by one.
template <typename T>
inline T dot(const T* a, const T* b, int64_t n) {
  T lane[4] = {0, 0, 0, 0};
  const int64_t whole = n / 4 * 4;
  for (int64_t d = 0; d < whole; d += 4) {
#pragma omp simd
    for (int64_t k = 0; k < 4; ++k) lane[k] += a[d + k] * b[d + k];
  }
  T sum = (lane[0] + lane[2]) + (lane[1] + lane[3]);
  for (int64_t d = whole; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

// attention = e - max_j e for the rows [begin, end).
template <typename T, typename S>
METSELECT_CLONES void shifted_logits(const Side& in, const Inputs<T>& x, int64_t begin, int64_t end,
                                     T* __restrict__ space, T* __restrict__ attention) {
  const int64_t heads = S::kHeads ? S::kHeads : x.heads;
  T local[S::kHeads + 1], *top = S::kHeads ? local : space;
  for (int64_t i = begin; i < end; ++i) {
    std::fill_n(top, heads, -std::numeric_limits<T>::infinity());
    for (int64_t edge = in.indptr[i]; edge < in.indptr[i + 1]; ++edge) {
      if (edge + kAhead < in.edges) prefetch(x.source + in.other[edge + kAhead] * heads, heads);
      const T *far = x.source + in.other[edge] * heads, *own = x.target + i * heads;
      T* e = attention + edge * heads;
#pragma omp simd
      for (int64_t h = 0; h < heads; ++h) {
        const T sum = far[h] + own[h];
        e[h] = leaky_slope(sum, x.slope) * sum;
        top[h] = e[h] > top[h] ? e[h] : top[h];
      }
    }
    for (int64_t edge = in.indptr[i]; edge < in.indptr[i + 1]; ++edge) {
#pragma omp simd
      for (int64_t h = 0; h < heads; ++h) attention[edge * heads + h] -= top[h];
    }
  }
}

// Normalises attention = exp(e - max) and writes out.
template <typename T, typename S>
METSELECT_CLONES void weighted_sums(const Side& in, const Inputs<T>& x, int64_t begin, int64_t end,
                                    T* __restrict__ space, T* __restrict__ attention,
                                    T* __restrict__ out) {
  const int64_t heads = S::kHeads ? S::kHeads : x.heads, width = S::kWidth ? S::kWidth : x.width;
  T local[S::kHeads * (S::kWidth + 1) + 1], *sum = S::kHeads ? local : space;
  T* total = sum + heads * width;
  for (int64_t i = begin; i < end; ++i) {
    std::fill_n(sum, heads * (width + 1), T{0});
    for (int64_t edge = in.indptr[i]; edge < in.indptr[i + 1]; ++edge) {
#pragma omp simd
      for (int64_t h = 0; h < heads; ++h) total[h] += attention[edge * heads + h];
    }
    for (int64_t edge = in.indptr[i]; edge < in.indptr[i + 1]; ++edge) {
      if (edge + kAhead < in.edges) {
        prefetch(x.feat + in.other[edge + kAhead] * heads * width, heads * width);
      }
      T* a = attention + edge * heads;
#pragma omp simd
      for (int64_t h = 0; h < heads; ++h) a[h] /= total[h];
      add_row(x.feat + in.other[edge] * heads * width, a, heads, width, sum);
    }
    std::copy_n(sum, heads * width, out + i * heads * width);
  }
}

// Writes known = (target, m) [M, 2, H] and dtarget; `space` holds [2, H] per edge of the longest
// row
template <typename T, typename S>
METSELECT_CLONES void target_gradients(const Side& in, const Inputs<T>& x, const T* grad,
                                       const T* attention, int64_t begin, int64_t end,
                                       T* __restrict__ space, T* __restrict__ known,
                                       T* __restrict__ to_target) {
  const int64_t heads = S::kHeads ? S::kHeads : x.heads, width = S::kWidth ? S::kWidth : x.width;
  for (int64_t i = begin; i < end; ++i) {
    const T *own = x.target + i * heads, *g = grad + i * heads * width;
    T *mean = known + (2 * i + 1) * heads, *sum = to_target + i * heads, *da = space;
    std::copy_n(own, heads, known + 2 * i * heads);
    std::fill_n(mean, heads, T{0});
    std::fill_n(sum, heads, T{0});
    for (int64_t edge = in.indptr[i]; edge < in.indptr[i + 1]; ++edge, da += 2 * heads) {
      if (edge + kAhead < in.edges) {
        prefetch(x.feat + in.other[edge + kAhead] * heads * width, heads * width);
        prefetch(x.source + in.other[edge + kAhead] * heads, heads);
      }
      const T *far = x.source + in.other[edge] * heads, *a = attention + edge * heads;
      const T* row = x.feat + in.other[edge] * heads * width;
      for (int64_t h = 0; h < heads; ++h) da[h] = dot(g + h * width, row + h * width, width);
#pragma omp simd
      for (int64_t h = 0; h < heads; ++h) {
        mean[h] += a[h] * da[h];
        da[heads + h] = a[h] * leaky_slope(far[h] + own[h], x.slope);
      }
    }
    for (const T* past = space; past < da; past += 2 * heads) {
#pragma omp simd
      for (int64_t h = 0; h < heads; ++h) sum[h] += past[heads + h] * (past[h] - mean[h]);
    }
  }
}

// Writes dfeat and dsource; edge k of `back` is edge place[k] of the attention.
template <typename T, typename S>
METSELECT_CLONES void source_gradients(const Side& back, const int32_t* place, const Inputs<T>& x,
                                       const T* grad, const T* attention, const T* known,
                                       int64_t begin, int64_t end, T* __restrict__ space,
                                       T* __restrict__ to_feat, T* __restrict__ to_source) {
  const int64_t heads = S::kHeads ? S::kHeads : x.heads, width = S::kWidth ? S::kWidth : x.width;
  T local[S::kHeads * (S::kWidth + 2) + 1], *sum = S::kHeads ? local : space;
  T *total = sum + heads * width, *da = total + heads;
  for (int64_t j = begin; j < end; ++j) {
    std::fill_n(sum, heads * (width + 1), T{0});
    const T *own = x.source + j * heads, *row = x.feat + j * heads * width;
    for (int64_t edge = back.indptr[j]; edge < back.indptr[j + 1]; ++edge) {
      if (edge + kAhead < back.edges) {
        const int64_t next = back.other[edge + kAhead];
        prefetch(grad + next * heads * width, heads * width);
        prefetch(known + next * 2 * heads, 2 * heads);
        prefetch(attention + place[edge + kAhead] * heads, heads);
      }
      const int64_t i = back.other[edge];
      const T *far = known + i * 2 * heads, *mean = far + heads, *g = grad + i * heads * width;
      const T* a = attention + place[edge] * heads;
      add_row(g, a, heads, width, sum);
      for (int64_t h = 0; h < heads; ++h) da[h] = dot(g + h * width, row + h * width, width);
#pragma omp simd
      for (int64_t h = 0; h < heads; ++h) {
        total[h] += a[h] * leaky_slope(far[h] + own[h], x.slope) * (da[h] - mean[h]);
      }
    }
    std::copy_n(sum, heads * width, to_feat + j * heads * width);
    std::copy_n(total, heads, to_source + j * heads);
  }
}

void check_inputs(const Tensor& indptr, const Tensor& indices, const Tensor& feat,
                  const Tensor& source, const Tensor& target) {
  TORCH_CHECK(feat.dim() == 3 && source.dim() == 2 && target.dim() == 2 &&
                  source.sizes() == feat.sizes().slice(0, 2) && target.size(1) == feat.size(1),
              "feat [N, H, F], source [N, H] and target [M, H] have shapes ", feat.sizes(), ", ",
              source.sizes(), " and ", target.sizes());
  TORCH_CHECK(
      source.scalar_type() == feat.scalar_type() && target.scalar_type() == feat.scalar_type(),
      "feat, source and target have dtypes ", feat.scalar_type(), ", ", source.scalar_type(),
      " and ", target.scalar_type());
  check_small_numbers(indices, feat.size(0), "indices");
  check_indptr(indptr, target.size(0), indices.size(0), "indptr");
}

void check_backward(const Tensor& grad, const Tensor& back_indptr, const Tensor& back_indices,
                    const Tensor& back_edges, const Tensor& feat, const Tensor& target,
                    const Tensor& attention) {
  const int64_t edges = attention.size(0), heads = feat.size(1);
  TORCH_CHECK(grad.sizes() == at::IntArrayRef({target.size(0), heads, feat.size(2)}) &&
                  attention.sizes() == at::IntArrayRef({back_edges.size(0), heads}) &&
                  back_indices.size(0) == edges,
              "grad [M, H, F], attention [E, H], back_indices [E] and back_edges [E] have shapes ",
              grad.sizes(), ", ", attention.sizes(), ", ", back_indices.sizes(), " and ",
              back_edges.sizes());
  TORCH_CHECK(
      grad.scalar_type() == feat.scalar_type() && attention.scalar_type() == feat.scalar_type(),
      "grad, attention and feat have dtypes ", grad.scalar_type(), ", ", attention.scalar_type(),
      " and ", feat.scalar_type());
  check_small_numbers(back_indices, target.size(0), "back_indices");
  check_small_numbers(back_edges, edges, "back_edges");
  check_indptr(back_indptr, feat.size(0), edges, "back_indptr");
}

int64_t longest_row(const int64_t* indptr, int64_t begin, int64_t end) {
  int64_t longest = 0;
  for (int64_t i = begin; i < end; ++i) longest = std::max(longest, indptr[i + 1] - indptr[i]);
  return longest;
}

// Calls body on rows [begin, end) in runs of about kRun edges.
template <typename Body>
void over_runs(const int64_t* indptr, int64_t begin, int64_t end, const Body& body) {
  while (begin < end) {
    int64_t stop = begin + 1;
    while (stop < end && indptr[stop + 1] - indptr[begin] <= kRun) ++stop;
    body(begin, stop);
    begin = stop;
  }
}

template <typename T>
void forward(const Side& in, const Inputs<T>& x, Tensor& attention, Tensor& out) {
  T* a = attention.mutable_data_ptr<T>();
  with_sizes(x.heads, x.width, [&](auto sizes) {
    using S = decltype(sizes);
    over_edge_shares(in.indptr, in.rows, [&](int64_t begin, int64_t end) {
      std::vector<T> space(x.heads * (x.width + 1));
      over_runs(in.indptr, begin, end, [&](int64_t start, int64_t stop) {
        const int64_t first = in.indptr[start], edges = in.indptr[stop] - first;
        shifted_logits<T, S>(in, x, start, stop, space.data(), a);
        attention.narrow(0, first, edges).exp_();
        weighted_sums<T, S>(in, x, start, stop, space.data(), a, out.mutable_data_ptr<T>());
      });
    });
  });
}

std::tuple<Tensor, Tensor> attention_sum(const Tensor& indptr, const Tensor& indices,
                                         const Tensor& back_indptr, const Tensor& back_indices,
                                         const Tensor& back_edges, const Tensor& feat,
                                         const Tensor& source, const Tensor& target, double slope) {
  check_inputs(indptr, indices, feat, source, target);
  const int64_t heads = feat.size(1), width = feat.size(2);
  const Tensor rows = feat.contiguous(), far = source.contiguous(), own = target.contiguous();
  Tensor out = fresh({target.size(0), heads, width}, feat.options());
  Tensor attention = fresh({indices.size(0), heads}, feat.options());
  AT_DISPATCH_FLOATING_TYPES(feat.scalar_type(), "attention_sum", [&] {
    const Inputs<scalar_t> x(rows, far, own, slope);
    forward(Side(indptr, indices), x, attention, out);
  });
  return {out, attention};
}

std::tuple<Tensor, Tensor, Tensor> attention_sum_backward(
    const Tensor& grad, const Tensor& indptr, const Tensor& indices, const Tensor& back_indptr,
    const Tensor& back_indices, const Tensor& back_edges, const Tensor& feat, const Tensor& source,
    const Tensor& target, const Tensor& attention, double slope) {
  check_inputs(indptr, indices, feat, source, target);
  check_backward(grad, back_indptr, back_indices, back_edges, feat, target, attention);
  const int64_t heads = feat.size(1), width = feat.size(2);
  const Tensor rows = feat.contiguous(), far = source.contiguous(), own = target.contiguous();
  const Tensor grads = grad.contiguous(), weights = attention.contiguous();
  Tensor to_feat = fresh(feat.sizes(), feat.options());
  Tensor to_source = fresh(source.sizes(), feat.options());
  Tensor to_target = fresh(target.sizes(), feat.options());
  Tensor known = fresh({target.size(0), 2, heads}, feat.options());
  const Side in(indptr, indices), back(back_indptr, back_indices);
  AT_DISPATCH_FLOATING_TYPES(feat.scalar_type(), "attention_sum_backward", [&] {
    const Inputs<scalar_t> x(rows, far, own, slope);
    const scalar_t *g = grads.const_data_ptr<scalar_t>(), *a = weights.const_data_ptr<scalar_t>();
    scalar_t* k = known.mutable_data_ptr<scalar_t>();
    with_sizes(heads, width, [&](auto sizes) {
      using S = decltype(sizes);
      over_edge_shares(in.indptr, in.rows, [&](int64_t begin, int64_t end) {
        std::vector<scalar_t> space(2 * heads * longest_row(in.indptr, begin, end));
        target_gradients<scalar_t, S>(in, x, g, a, begin, end, space.data(), k,
                                      to_target.mutable_data_ptr<scalar_t>());
      });
      over_edge_shares(back.indptr, back.rows, [&](int64_t begin, int64_t end) {
        std::vector<scalar_t> space(heads * (width + 2));
        source_gradients<scalar_t, S>(back, back_edges.const_data_ptr<int32_t>(), x, g, a, k, begin,
                                      end, space.data(), to_feat.mutable_data_ptr<scalar_t>(),
                                      to_source.mutable_data_ptr<scalar_t>());
      });
    });
  });
  return {to_feat, to_source, to_target};
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) {
  m.impl("attention_sum", &attention_sum);
  m.impl("attention_sum_backward", &attention_sum_backward);
}

}  // namespace metselect
