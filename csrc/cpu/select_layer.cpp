// metric_logits, and select_layer: (layer, class, score) of every node, one tile of nodes at a
// time, all layers of a tile in turn.
//
// confidence, opposite: the log-odds a_y - logsumexp_{c != y} a_c of the linear logits
//   a_c = (h . K^-1 mu_c - mu_c K^-1 mu_c / 2) / T, with h and mu taken from the centre;
// distance: -|| R (h - mu_y) ||^2, where y is the label or, without labels, the best class.
// select_layer stores nothing of size N x L x C, which is the size of the result of metric_logits.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cmath>
#include <limits>

#include "gemm.h"
#include "memory.h"
#include "metric.h"
#include "softmax.h"
#include "threads.h"

namespace metselect {
namespace {

enum class Rule { kConfidence, kDistance, kOpposite };

Rule parse(c10::string_view rule) {
  if (rule == "confidence") return Rule::kConfidence;
  if (rule == "distance") return Rule::kDistance;
  TORCH_CHECK(rule == "opposite", "rule is ", rule, "; use confidence, distance or opposite");
  return Rule::kOpposite;
}

// One layer and its logits a = rows slope^T + offset, where slope and offset include the division
// by the temperature; the offset of a class without nodes is -inf.
template <typename T>
struct Scored {
  Picked<T> h;
  const Metric& metric;
  std::vector<T> slope, offset;

  Scored(const Tensor& layer, const OptionalTensor& index, const Metric& known, const Tensor& valid,
         double temperature)
      : h(layer, index), metric(known) {
    const T *s = known.slope.const_data_ptr<T>(), *o = known.offset.const_data_ptr<T>();
    for (int64_t i = 0; i < known.slope.numel(); ++i) slope.push_back(s[i] / temperature);
    for (int64_t c = 0; c < valid.size(0); ++c) {
      const bool seen = valid[c].item<bool>();
      offset.push_back(seen ? -o[c] / temperature : -std::numeric_limits<T>::infinity());
    }
  }

  int64_t classes() const { return static_cast<int64_t>(offset.size()); }

  void logits(const T* rows, int64_t n, T* a) const {
    for (int64_t i = 0; i < n; ++i) std::copy_n(offset.data(), classes(), a + i * classes());
    gemm<T>(n, classes(), h.width, {rows, h.width}, Matrix<const T>{slope.data(), h.width}.t(), 1,
            {a, classes()});
  }
};

// Buffers of one thread.
template <typename T>
struct Space {
  std::vector<T> rows, whitened, logits, top, sum, score;
  std::vector<int64_t> answer;

  explicit Space(const std::vector<Scored<T>>& layers)
      : logits(kTile * layers[0].classes()), top(kTile), sum(kTile), score(kTile), answer(kTile) {
    int64_t widest = 0, largest_rank = 0;
    for (const auto& layer : layers) {
      widest = std::max(widest, layer.h.width);
      largest_rank = std::max(largest_rank, layer.metric.factor.size(0));
    }
    rows.resize(kTile * widest);
    whitened.resize(kTile * largest_rank);
  }
};

template <typename T>
struct Best {
  int64_t* layer;
  int64_t* answer;
  T* score;
  std::vector<T> rank;
};

template <typename T>
T squared_distance(const T* z, const T* middle, int64_t width) {
  T sum = 0;
  for (int64_t d = 0; d < width; ++d) sum += (z[d] - middle[d]) * (z[d] - middle[d]);
  return sum;
}

template <typename T>
METSELECT_CLONES void best_classes(const T* a, int64_t n, int64_t classes, int64_t* answer) {
  for (int64_t i = 0; i < n; ++i, a += classes) {
    const T top = largest(a, classes);
    int64_t at = 0;
    while (at + 1 < classes && a[at] != top) ++at;
    answer[i] = at;
  }
}

// score = a_y - logsumexp_{c != y} a_c with y = asked; overwrites the logits.
template <typename T>
void log_odds(T* a, int64_t n, int64_t classes, const int64_t* asked, T* top, T* sum, T* score) {
  for (int64_t i = 0; i < n; ++i) {
    T& own = a[i * classes + asked[i]];
    score[i] = own;
    own = -std::numeric_limits<T>::infinity();
  }
  exponentials(a, n, classes, top, sum);
  for (int64_t i = 0; i < n; ++i) {
    // with a single valid class all other logits are -inf and the sum is 0
    score[i] -= sum[i] == 0 ? -std::numeric_limits<T>::infinity() : top[i] + std::log(sum[i]);
  }
}

// score = -|| R (h - mu_y) ||^2 with y = asked
template <typename T>
void nearness(const Scored<T>& layer, const T* rows, int64_t n, const int64_t* asked, T* z,
              T* score) {
  const Metric& metric = layer.metric;
  const int64_t width = metric.factor.size(0);
  const Matrix<const T> factor{metric.factor.const_data_ptr<T>(), layer.h.width};
  const T* middle = metric.middle.const_data_ptr<T>();
  gemm<T>(n, width, layer.h.width, {rows, layer.h.width}, factor.t(), 0, {z, width});
  for (int64_t i = 0; i < n; ++i) {
    score[i] = -squared_distance(z + i * width, middle + asked[i] * width, width);
  }
}

template <typename T>
void share_of_nodes(const std::vector<Scored<T>>& layers, const int64_t* labels, Rule rule,
                    int64_t begin, int64_t end, Space<T> space, Best<T>& best) {
  const int64_t classes = layers[0].classes();
  for (int64_t start = begin; start < end; start += kTile) {
    const int64_t n = std::min(end, start + kTile) - start;
    for (size_t depth = 0; depth < layers.size(); ++depth) {
      const Scored<T>& layer = layers[depth];
      T* a = space.logits.data();
      centered(layer.h, layer.metric, start, start + n, space.rows.data());
      layer.logits(space.rows.data(), n, a);
      best_classes(a, n, classes, space.answer.data());
      const int64_t* asked = labels ? labels + start : space.answer.data();
      if (rule == Rule::kDistance) {
        nearness(layer, space.rows.data(), n, asked, space.whitened.data(), space.score.data());
      } else {
        log_odds(a, n, classes, asked, space.top.data(), space.sum.data(), space.score.data());
      }
      for (int64_t i = 0; i < n; ++i) {
        const T score = space.score[i], side = rule == Rule::kOpposite ? -score : score;
        const T rank = layer.metric.alive ? side : -std::numeric_limits<T>::infinity();
        if (depth > 0 && !(rank > best.rank[start + i])) continue;
        best.rank[start + i] = rank;
        best.layer[start + i] = static_cast<int64_t>(depth);
        best.answer[start + i] = space.answer[i];
        best.score[start + i] = score;
      }
    }
  }
}

template <typename T>
std::vector<Scored<T>> scored_layers(const std::vector<Tensor>& rows, const Indices& index,
                                     const std::vector<Metric>& known, const Tensor& valid,
                                     const Tensor& temperature) {
  TORCH_CHECK(temperature.dim() == 1 && temperature.size(0) == static_cast<int64_t>(rows.size()),
              "temperature has shape ", temperature.sizes(), " for ", rows.size(), " layers");
  std::vector<Scored<T>> out;
  for (size_t depth = 0; depth < rows.size(); ++depth) {
    out.emplace_back(rows[depth], index.get(depth), known[depth], valid,
                     temperature[depth].item<double>());
  }
  return out;
}

Tensor metric_logits(TensorList layers, TensorList means, TensorList factors, const Tensor& valid,
                     const Tensor& temperature, const Indices& index) {
  const int64_t n = check_layers(layers, index, means), classes = valid.size(0);
  const std::vector<Tensor> rows = unit_stride(layers);
  const std::vector<Metric> known = metrics(means, factors, valid);
  Tensor logits = fresh({static_cast<int64_t>(layers.size()), n, classes}, layers[0].options());
  AT_DISPATCH_FLOATING_TYPES(logits.scalar_type(), "metric_logits", [&] {
    scalar_t* out = logits.mutable_data_ptr<scalar_t>();
    for (const auto& layer : scored_layers<scalar_t>(rows, index, known, valid, temperature)) {
      over_shares(n, workers(n), [&](int64_t begin, int64_t end, int64_t) {
        std::vector<scalar_t> space(kTile * layer.h.width);
        for (int64_t start = begin; start < end; start += kTile) {
          const int64_t stop = std::min(end, start + kTile);
          centered(layer.h, layer.metric, start, stop, space.data());
          layer.logits(space.data(), stop - start, out + start * classes);
        }
      });
      out += n * classes;
    }
  });
  return logits;
}

std::tuple<Tensor, Tensor, Tensor> select_layer(TensorList layers, TensorList means,
                                                TensorList factors, const Tensor& valid,
                                                const Tensor& temperature, const Indices& index,
                                                const OptionalTensor& labels,
                                                c10::string_view rule) {
  const int64_t n = check_layers(layers, index, means);
  if (labels) check_labels(*labels, n, valid.size(0));
  const Rule parsed = parse(rule);
  Tensor score = at::empty({n}, layers[0].options());
  Tensor layer = at::empty({n}, score.options().dtype(at::kLong)), answer = at::empty_like(layer);
  const std::vector<Tensor> rows = unit_stride(layers);
  const std::vector<Metric> known = metrics(means, factors, valid);
  const int64_t* truth = labels ? labels->const_data_ptr<int64_t>() : nullptr;
  AT_DISPATCH_FLOATING_TYPES(score.scalar_type(), "select_layer", [&] {
    const auto scored = scored_layers<scalar_t>(rows, index, known, valid, temperature);
    Best<scalar_t> best{layer.mutable_data_ptr<int64_t>(), answer.mutable_data_ptr<int64_t>(),
                        score.mutable_data_ptr<scalar_t>(), std::vector<scalar_t>(n)};
    over_shares(n, workers(n), [&](int64_t begin, int64_t end, int64_t) {
      share_of_nodes(scored, truth, parsed, begin, end, Space<scalar_t>(scored), best);
    });
  });
  return {layer, answer, score};
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) {
  m.impl("metric_logits", &metric_logits);
  m.impl("select_layer", &select_layer);
}

}  // namespace metselect
