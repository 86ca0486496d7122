// Checks of operator arguments: errors name the argument, its value and the expected value.
#pragma once

#include <torch/library.h>

#include "types.h"

namespace metselect {

inline void check_vector(const Tensor& value, const char* name) {
  TORCH_CHECK(value.scalar_type() == at::kLong && value.dim() == 1 && value.is_contiguous(), name,
              " must be a contiguous int64 vector, got ", value.scalar_type(), " of shape ",
              value.sizes());
}

// Checks that int64 numbers are in [0, limit), since kernels use them as offsets.
inline void check_numbers(const Tensor& value, int64_t limit, const char* name) {
  check_vector(value, name);
  const int64_t* number = value.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < value.size(0); ++i) {
    TORCH_CHECK_INDEX(0 <= number[i] && number[i] < limit, name, "[", i, "] is ", number[i],
                      ", expected 0 to ", limit - 1);
  }
}

// Checks that each layer [N, D] has a matrix [C, D] in `constants`, and that all layers have the
// same number of picked rows, which is returned. Reads no values, which would make the CPU wait for
// a GPU.
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

// Checks that layers have one dtype and constants the dtype `expected`.
inline void check_dtypes(TensorList layers, TensorList constants, at::ScalarType expected) {
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    const auto of_layer = layers[depth].scalar_type(), of_constant = constants[depth].scalar_type();
    TORCH_CHECK(of_constant == expected && of_layer == layers[0].scalar_type(), "layer ", depth,
                " is ", of_layer, ", its constants ", of_constant, ", layer 0 ",
                layers[0].scalar_type(), "; constants must be ", expected);
  }
}

// Checks shapes, dtypes and index values; returns the number of picked rows.
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

}  // namespace metselect
