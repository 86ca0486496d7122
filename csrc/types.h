// Names of the tensor types that operators take, and the attribute for vectorised functions.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace metselect {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;
using Indices = c10::List<std::optional<Tensor>>;  // one per layer; none: all rows in order

// Compile a function for several instruction sets; the loader chooses one of them.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define METSELECT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define METSELECT_CLONES
#endif

}  // namespace metselect
