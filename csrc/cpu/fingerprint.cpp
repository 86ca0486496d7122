// fingerprint: sum over rows i of m(n_i + m(i)) modulo 2^64, where m mixes all bits of an integer,
// n_i = sum_j u_i,2j u_i,2j+1 and u_ij = bits_ij + m(j) modulo 2^32.
//
// A change of two words cannot cancel as in a weighted sum: the keys m(j) multiply it.

#include <ATen/ops/scalar_tensor.h>

#include <vector>

#include "checks.h"
#include "threads.h"

namespace metselect {
namespace {

// SplitMix64.
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

METSELECT_CLONES uint64_t hash_row(const uint32_t* __restrict__ bits,
                                   const uint32_t* __restrict__ keys, int64_t width) {
  uint64_t sum = 0;
  for (int64_t pair = 0; pair < width / 2; ++pair) {
    const uint32_t first = bits[2 * pair] + keys[2 * pair];
    const uint32_t second = bits[2 * pair + 1] + keys[2 * pair + 1];
    sum += static_cast<uint64_t>(first) * second;
  }
  if (width % 2 == 1) {
    const uint32_t last = bits[width - 1] + keys[width - 1];
    sum += static_cast<uint64_t>(last) * keys[width];
  }
  return sum;
}

Tensor fingerprint(const Tensor& bits) {
  TORCH_CHECK(bits.dim() == 2 && bits.scalar_type() == at::kInt,
              "bits must be an int32 matrix, got ", bits.scalar_type(), " of shape ", bits.sizes());
  const Tensor contiguous = bits.contiguous();
  const auto* words = static_cast<const uint32_t*>(contiguous.const_data_ptr());
  const int64_t n = bits.size(0), width = bits.size(1), shares = workers(n);
  std::vector<uint32_t> keys(width + width % 2);
  for (size_t j = 0; j < keys.size(); ++j) keys[j] = static_cast<uint32_t>(mix(j));
  std::vector<uint64_t> partial(shares);
  over_shares(n, shares, [&](int64_t begin, int64_t end, int64_t worker) {
    uint64_t total = 0;
    for (int64_t i = begin; i < end; ++i) {
      total += mix(hash_row(words + i * width, keys.data(), width) + mix(i));
    }
    partial[worker] = total;
  });
  uint64_t total = 0;
  for (const uint64_t part : partial) total += part;
  return at::scalar_tensor(static_cast<int64_t>(total), at::kLong);
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) { m.impl("fingerprint", &fingerprint); }

}  // namespace metselect
