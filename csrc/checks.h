// What every CPU op shares: argument checks, rows picked by an index, tiles over threads.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

namespace metselect {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kTile = 512;  // rows: 512 x 128 floats stay in the second-level cache

// Numbers below `limit`: the loops below read and write where these point.
inline void check_numbers(const Tensor& value, int64_t limit, const char* name) {
  TORCH_CHECK(value.scalar_type() == at::kLong && value.dim() == 1 && value.is_contiguous(), name,
              " must be a contiguous int64 vector, got ", value.scalar_type(), " of shape ",
              value.sizes());
  const int64_t* number = value.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < value.size(0); ++i) {
    TORCH_CHECK_INDEX(0 <= number[i] && number[i] < limit, name, "[", i, "] is ", number[i],
                      ", expected 0 to ", limit - 1);
  }
}

// One [N, D] layer with the same N for each [C, D] matrix of `constants`.
inline void check_layers(TensorList layers, TensorList constants) {
  TORCH_CHECK(!layers.empty() && layers.size() == constants.size(), "got ", layers.size(),
              " layers and constants of ", constants.size());
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    const Tensor &h = layers[depth], &c = constants[depth];
    TORCH_CHECK(h.dim() == 2 && c.dim() == 2 && h.size(0) == layers[0].size(0) &&
                    h.size(1) == c.size(1) && c.size(0) == constants[0].size(0),
                "layer ", depth, " has shape ", h.sizes(), ", its constants ", c.sizes());
  }
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

// Rows are read with stride 1; anything else is copied once.
inline Tensor unit_stride(const Tensor& h) {
  return h.stride(1) == 1 || h.size(1) == 1 ? h : h.contiguous();
}

inline std::vector<Tensor> unit_stride(TensorList layers) {
  std::vector<Tensor> out;
  for (const Tensor& h : layers) out.push_back(unit_stride(h));
  return out;
}

inline int64_t picked_rows(TensorList layers, const OptionalTensor& index) {
  return index ? index->size(0) : layers[0].size(0);
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
