// What the ops share: argument checks; and on the CPU rows picked by an index, tiles over threads.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zero.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace metselect {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;
using Indices = c10::List<std::optional<Tensor>>;  // of each layer; none: all rows in order

// The same source for several instruction sets, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define METSELECT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define METSELECT_CLONES
#endif

// An empty tensor; a large one asks for pages of 2 MB. malloc takes more than 32 MB fresh from the
// system each time, and the first touch of 4 KB pages then takes longer than the filling.
inline Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options) {
  Tensor out = at::empty(sizes, options);
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 1 << 21;
  const auto begin = reinterpret_cast<uintptr_t>(out.data_ptr()), end = begin + out.nbytes();
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
  if (out.nbytes() > 2 * kPage) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
  return out;
}

inline Tensor fresh_zeros(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return fresh(sizes, options).zero_();
}

constexpr int64_t kTile = 512;  // rows: 512 x 128 floats stay in the second-level cache

inline void check_vector(const Tensor& value, const char* name) {
  TORCH_CHECK(value.scalar_type() == at::kLong && value.dim() == 1 && value.is_contiguous(), name,
              " must be a contiguous int64 vector, got ", value.scalar_type(), " of shape ",
              value.sizes());
}

// Numbers below `limit`: the loops below read and write where these point.
inline void check_numbers(const Tensor& value, int64_t limit, const char* name) {
  check_vector(value, name);
  const int64_t* number = value.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < value.size(0); ++i) {
    TORCH_CHECK_INDEX(0 <= number[i] && number[i] < limit, name, "[", i, "] is ", number[i],
                      ", expected 0 to ", limit - 1);
  }
}

// One [N, D] layer for each [C, D] matrix of `constants`, and as many rows picked in each; returns
// how many. Reads no numbers, which would make the CPU wait for a GPU.
inline int64_t check_shapes(TensorList layers, const Indices& index, TensorList constants) {
  TORCH_CHECK(!layers.empty() && layers.size() == constants.size() && layers.size() == index.size(),
              "got ", layers.size(), " layers, constants of ", constants.size(), " and indices of ",
              index.size());
  int64_t rows = -1;
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    const Tensor &h = layers[depth], &c = constants[depth];
    TORCH_CHECK(h.dim() == 2 && c.dim() == 2 && h.size(1) == c.size(1) && c.size(0) > 0 &&
                    c.size(0) == constants[0].size(0),
                "layer ", depth, " has shape ", h.sizes(), ", its constants ", c.sizes());
    const OptionalTensor picked = index.get(depth);
    if (picked) check_vector(*picked, "index");
    const int64_t here = picked ? picked->size(0) : h.size(0);
    TORCH_CHECK(depth == 0 || here == rows, "layer ", depth, " has ", here, " rows, layer 0 has ",
                rows);
    rows = here;
  }
  return rows;
}

// Layers of one dtype, and constants of the dtype that goes with it.
inline void check_dtypes(TensorList layers, TensorList constants, at::ScalarType of_constants) {
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    const auto of_layer = layers[depth].scalar_type(), of_constant = constants[depth].scalar_type();
    TORCH_CHECK(of_constant == of_constants && of_layer == layers[0].scalar_type(), "layer ", depth,
                " is ", of_layer, ", its constants ", of_constant, ", layer 0 ",
                layers[0].scalar_type(), "; constants must be ", of_constants);
  }
}

inline int64_t check_layers(TensorList layers, const Indices& index, TensorList constants) {
  const int64_t rows = check_shapes(layers, index, constants);
  check_dtypes(layers, constants, layers[0].scalar_type());
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    const OptionalTensor picked = index.get(depth);
    if (picked) check_numbers(*picked, layers[depth].size(0), "index");
  }
  return rows;
}

inline void check_label_count(const Tensor& labels, int64_t rows) {
  check_vector(labels, "labels");
  TORCH_CHECK(labels.size(0) == rows, "got ", labels.size(0), " labels for ", rows, " rows");
}

inline void check_labels(const Tensor& labels, int64_t rows, int64_t classes) {
  check_label_count(labels, rows);
  check_numbers(labels, classes, "labels");
}

// A [N, D] matrix of which some rows are picked; `rows` is null for all of them in order.
template <typename T>
struct Picked {
  const T* data;
  int64_t stride;
  int64_t width;
  const int64_t* rows;

  Picked(const Tensor& h, const OptionalTensor& index)
      : data(h.const_data_ptr<T>()),
        stride(h.stride(0)),
        width(h.size(1)),
        rows(index ? index->const_data_ptr<int64_t>() : nullptr) {}

  int64_t number(int64_t i) const { return rows ? rows[i] : i; }
  const T* operator[](int64_t i) const { return data + number(i) * stride; }
};

// `tile` is added to the picked rows [start, start + n) of `into` [N, D].
template <typename T>
void add_rows(const T* tile, const Picked<T>& picked, int64_t start, int64_t n, T* into) {
  for (int64_t i = start; i < start + n; ++i) {
    T* out = into + picked.number(i) * picked.width;
    for (int64_t d = 0; d < picked.width; ++d) out[d] += *tile++;
  }
}

// Rows are read with stride 1 and must not overlap; anything else is copied once.
inline Tensor unit_stride(const Tensor& h) {
  const bool dense = h.stride(1) == 1 || h.size(1) == 1;
  return dense && h.stride(0) >= h.size(1) ? h : h.contiguous();
}

inline std::vector<Tensor> unit_stride(TensorList layers) {
  std::vector<Tensor> out;
  for (const Tensor& h : layers) out.push_back(unit_stride(h));
  return out;
}

inline bool has_duplicates(const OptionalTensor& index, int64_t rows) {
  if (!index) return false;
  std::vector<char> seen(rows, 0);
  const int64_t* numbers = index->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < index->size(0); ++i) {
    if (seen[numbers[i]]++) return true;
  }
  return false;
}

// Calls body(begin, end, worker) on one contiguous share of [0, n) per thread, so that results
// are the same for the same number of threads.
inline int64_t workers(int64_t n) {
  const int64_t tiles = (n + kTile - 1) / kTile;
  return std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), tiles));
}

inline void over_shares(int64_t n, int64_t shares,
                        const std::function<void(int64_t, int64_t, int64_t)>& body) {
  const int64_t share = (n + shares - 1) / shares;
  at::parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
    at::AutoDispatchBelowADInplaceOrView guard;  // workers do not inherit it
    for (int64_t worker = first; worker < last; ++worker) {
      const int64_t begin = std::min(n, worker * share);
      body(begin, std::min(n, begin + share), worker);
    }
  });
}

}  // namespace metselect
