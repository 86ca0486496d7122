// Memory of results, and the layout of inputs.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zero.h>

#include <vector>

#include "types.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace metselect {

// Returns an empty tensor; a large one requests pages of 2 MB. glibc maps blocks above 32 MB anew
// for each allocation, and the page faults of 4 KB pages then take longer than writing the result.
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

// Returns h with contiguous rows that do not overlap; copies any other layout.
inline Tensor unit_stride(const Tensor& h) {
  const bool dense = h.stride(1) == 1 || h.size(1) == 1;
  return dense && h.stride(0) >= h.size(1) ? h : h.contiguous();
}

inline std::vector<Tensor> unit_stride(TensorList layers) {
  std::vector<Tensor> out;
  for (const Tensor& h : layers) out.push_back(unit_stride(h));
  return out;
}

}  // namespace metselect
